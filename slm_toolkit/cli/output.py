"""Output of `slm compare` and `slm report`: flags, rows, exports, notes and the exit code."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_price_flag
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.tables.fitted import console_of_stdout

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row
    from slm_toolkit.results import Report

MANY_ROWS = 200
"rows that a terminal is shown; a pipe has all"


def check_exports(paths: list[Path]) -> None:
    """Raise ValueError for files of --export that can't be written, before anything runs."""
    from slm_toolkit.report.tables.export import ENDINGS

    for path in paths:
        problem = None
        if path.suffix not in ENDINGS:
            problem = f"the file must end in {', '.join(ENDINGS)}"
        elif path.is_dir() or not path.parent.is_dir():
            problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        if problem:
            raise ValueError(f"--export {path}: {problem}\nhint: name a file in an existing folder")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_price_flag(parser)
    parser.add_argument(
        "--sort",
        choices=("rank", "strategy", "memory", "cost"),
        help="order of the rows of each model: fastest first (rank), in the order of the study (strategy), "
        "smallest first, or cheapest first (default: rank; strategy with --json and a CSV, whose "
        "order should not depend on noise)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="don't rank rows that were computed with other numerics"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print where the memory peak is, and its parts. Needs runs with --profile memory or --rehearse",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="compare with earlier records. Exit code 1 if something became slower, larger or less accurate",
    ).basic = True
    parser.add_argument(
        "--export",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write FILE.csv with the rows of --json, FILE.md with the table and all of its columns, or "
        "FILE.html, one page with the table and all charts. Can be repeated",
    ).basic = True


def read_baseline(folder: Path | None) -> list[tuple[Path, RunRecord]]:
    """Read the records of --baseline, before new records are written. Raises ValueError if there are none."""
    from slm_toolkit.results import read_records

    if folder is None:
        return []
    records = read_records(folder)
    for problem in records.problems:
        print(f"left out of the baseline: {problem}", file=sys.stderr)
    return records.pairs


def print_records(
    report: "Report",
    args: argparse.Namespace,
    *,
    baseline: list[tuple[Path, RunRecord]],
) -> int:
    """Print the rows; return 1 if a row failed, broke parity or is worse than its baseline, else 0.

    Also returns 1 if a record can't be shown, or requested results are missing: no parity check, no run in
    common with the baseline, or no traced memory.
    """
    from slm_toolkit.report.labels import labelled
    from slm_toolkit.report.tables.baseline import baseline_table, changes
    from slm_toolkit.report.tables.export import json_text, write_export
    from slm_toolkit.report.tables.sections import failed_references, sections

    for problem in report.problems:
        print(f"left out: {problem}", file=sys.stderr)
    rows, records = report.rows, report.records.pairs
    named = labelled(rows)
    found, missing = changes(rows, asked_rows(baseline, args)) if baseline else ([], [])
    unchecked = failed_references(records)
    if args.memory and all(row.memory_at_peak is None for row in rows):
        unchecked.append(
            "no traced memory: only runs with --profile memory, or --rehearse without a GPU, have one"
        )
    parity_due = getattr(args, "parity", None) and not failed_references(records)
    if parity_due and all(row.parity_holds is None for row in rows):
        unchecked.append("no parity check: no row is ok, or no row has a reference")
    content = report.to_dicts() if args.json or args.export else []
    if baseline:
        by_record = {change.record_now: change.as_json() for change in found}
        content = [{**row, "baseline": by_record.get(row["record"])} for row in content]
    for path in args.export:
        with user_errors():
            write_export(path, rows, content, page=report.to_html)
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json_text(content))
        print("".join(f"{line}\n" for line in unchecked), end="", file=sys.stderr)
    else:
        console = console_of_stdout()
        width = console.width
        for part in sections(
            rows,
            width=width,
            most_rows=MANY_ROWS if console.is_terminal else None,
            unchecked=unchecked,
            with_memory=args.memory,
        ):
            console.print(part, crop=False)
        if baseline:
            labels = {row.record: label for label, row in named.items()}
            console.print(
                baseline_table(found, missing, named=labels, baseline=args.baseline, width=width), crop=False
            )
    well = all(row.status in ("ok", "oom") and row.parity_holds is not False for row in rows)
    worse = any(change.is_regression for change in found) or (bool(baseline) and not found)
    return 0 if well and not worse and not unchecked and not report.problems else 1


def asked_rows(
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    problems: list[str] | None = None,
) -> list["Row"]:
    """Return the rows of records, by the flags of `add_output_flags`."""
    from slm_toolkit.report.rows import rows_of, sorted_rows

    rows = rows_of(
        records,
        prices=args.prices,
        strict=args.strict,
        problems=problems,
    )
    return sorted_rows(rows, sort_of(args))


def sort_of(args: argparse.Namespace) -> str:
    """Return --sort, or its default: what programs read has an order that does not depend on noise."""
    is_data = args.json or any(path.suffix == ".csv" for path in args.export)
    return args.sort or ("strategy" if is_data else "rank")
