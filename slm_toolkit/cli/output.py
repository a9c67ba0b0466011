"""Output of `slm compare` and `slm report`: flags, rows, exports, notes and the exit code."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_price_flag
from slm_toolkit.config.parser import positive_number
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord
from slm_toolkit.report.tables.fitted import MANY_ROWS, console_of_stdout

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row


STDOUT = Path("-")
EXPORTS = ("csv", "markdown")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "exports", "write to a file, or print on stdout (-) instead of the table"
    )
    group.add_argument(
        "--csv", type=Path, metavar="FILE|-", help="write the rows of --json as CSV"
    ).basic = True
    group.add_argument(
        "--markdown", type=Path, metavar="FILE|-", help="write the table with all of its columns"
    )


def exports_asked(args: argparse.Namespace) -> list[str]:
    return [name for name in EXPORTS if getattr(args, name) is not None]


def on_stdout(args: argparse.Namespace) -> list[str]:
    """Return the flags that write to stdout."""
    named = [name for name in exports_asked(args) if getattr(args, name) == STDOUT]
    return [*named, *(["json"] if args.json else [])]


def check_exports(args: argparse.Namespace) -> None:
    """Raise ValueError for a file that can't be written, or two exports on stdout, before anything runs."""
    problems = []
    if len(taken := on_stdout(args)) > 1:
        problems.append(f"--{' and --'.join(taken)} both go to stdout\nhint: give one of them a file")
    for name in exports_asked(args):
        path = getattr(args, name)
        if path != STDOUT and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            problems.append(f"--{name} {path}: {what}\nhint: name a file in an existing folder")
    if problems:
        raise ValueError("\n".join(problems))


def write_exports(rows: list["Row"], content: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Write all exports; return True if one of them used stdout. `content`: the objects of `--json`."""
    from slm_toolkit.report.tables.export import csv_text, json_text, markdown_text

    texts = {"csv": lambda: csv_text(content), "markdown": lambda: markdown_text(rows)}
    for name in exports_asked(args):
        path = getattr(args, name)
        if path == STDOUT:
            sys.stdout.write(texts[name]())
            continue
        with user_errors():
            try:
                path.write_text(texts[name](), encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"--{name} {path}: {error}\nhint: use another folder, or free some space"
                ) from None
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json_text(content))
    return bool(on_stdout(args))


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_price_flag(parser)
    parser.add_argument(
        "--sort",
        choices=("rank", "strategy", "memory", "cost"),
        help="order of the rows of each model: fastest first (rank), in the order of the study (strategy), "
        "smallest first, or cheapest first (default: rank; strategy with --json and --csv, whose "
        "order should not depend on noise)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="don't rank rows that were computed with other numerics"
    )
    parser.add_argument(
        "--parity_tolerance",
        type=positive_number,
        metavar="X",
        help="largest loss difference that passes at a step (default: by numerics; grows with the steps)",
    )
    parser.add_argument(
        "--phases", action="store_true", help="also print the times of data, forward, backward and optimizer"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print where the memory peak is, which modules own it, and a chart of the step. Needs "
        "runs with --profile memory or --rehearse",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="compare with earlier records. Exit code 1 if something became slower, larger or less accurate",
    ).basic = True
    add_export_flags(parser)


def print_notes(notes: Iterable[str]) -> None:
    """Print lines on stderr; a terminal wraps them between words, a file has one line each."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for note in notes:
        console.print(Text(note), soft_wrap=not console.is_terminal)


def read_baseline(folder: Path | None) -> list[tuple[Path, RunRecord]]:
    """Read the records of --baseline, before new records are written. Raises ValueError if there are none."""
    if folder is None:
        return []
    records, problems = find_records([folder])
    if not records:
        raise ValueError(
            (problems or [f"no {RECORD_FILE} under {folder}"])[0] + "\nhint: --baseline takes earlier records"
        )
    for problem in problems:
        print(f"left out of the baseline: {problem}", file=sys.stderr)
    return records


def print_records(
    rows: list["Row"],
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    baseline: list[tuple[Path, RunRecord]],
) -> int:
    """Print the rows; return 1 if a row failed, broke parity or is worse than its baseline, else 0.

    Also returns 1 if requested results are missing: no parity check, no run in common with the baseline, or
    no traced memory.
    """
    from slm_toolkit.report.charts.panels import pictures_of
    from slm_toolkit.report.rows import labelled
    from slm_toolkit.report.tables.baseline import baseline_table, changes
    from slm_toolkit.report.tables.export import json_rows
    from slm_toolkit.report.tables.sections import failed_references, sections

    named = labelled(rows)
    found, missing = changes(rows, asked_rows(baseline, args)) if baseline else ([], [])
    unchecked = failed_references(records)
    if args.memory and all(row.memory_at_peak is None for row in rows):
        unchecked.append(
            "no memory timeline: only runs with --profile memory, or --rehearse without a GPU, have one"
        )
    parity_due = getattr(args, "parity", None) and not failed_references(records)
    if parity_due and all(row.parity_holds is None for row in rows):
        unchecked.append("no parity check: no row is ok, or no row has a reference")
    content = json_rows(rows) if args.json or exports_asked(args) else []
    if baseline:
        by_record = {change.record_now: dataclasses.asdict(change) for change in found}
        content = [{**row, "baseline": by_record.get(row["record"])} for row in content]
    if write_exports(rows, content, args):
        print("".join(f"{line}\n" for line in unchecked), end="", file=sys.stderr)
    else:
        console = console_of_stdout()
        width = console.width
        problems: list[str] = []
        pictures = pictures_of(named, problems=problems) if args.memory else {}
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        for part in sections(
            rows,
            width=width,
            most_rows=MANY_ROWS if console.is_terminal else None,
            unchecked=unchecked,
            phases=args.phases,
            pictures=pictures,
        ):
            console.print(part, crop=False)
        if baseline:
            labels = {row.record: label for label, row in named.items()}
            console.print(
                baseline_table(found, missing, named=labels, baseline=args.baseline, width=width), crop=False
            )
    well = all(row.status in ("ok", "oom", "skipped") and row.parity_holds is not False for row in rows)
    worse = any(change.is_regression for change in found) or (bool(baseline) and not found)
    return 0 if well and not worse and not unchecked else 1


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
        parity_tolerance=args.parity_tolerance,
        strict=args.strict,
        problems=problems,
    )
    return sorted_rows(rows, sort_of(args))


def sort_of(args: argparse.Namespace) -> str:
    """Return --sort, or its default: what programs read has an order that does not depend on noise."""
    return args.sort or ("strategy" if args.json or args.csv else "rank")
