"""Output of `slm compare` and `slm report`: flags, rows, exports, notes and the exit code."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.cli.deployment_flags import add_price_flag
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.tables.fitted import console_of_stdout

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row
    from slm_toolkit.results import Report

_ENDINGS = (".csv", ".md", ".html")


def _file_to_write(text: str) -> Path:
    """Return the path of --export, which is checked before anything runs."""
    path = Path(text)
    if path.suffix not in _ENDINGS or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no {' or '.join(_ENDINGS)} file in an existing folder")
    return path


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_price_flag(parser)
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="compare with earlier records. Exit code 1 if something became slower, larger or less accurate",
    ).basic = True
    parser.add_argument(
        "--export",
        type=_file_to_write,
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
    report: "Report", args: argparse.Namespace, *, baseline: list[tuple[Path, RunRecord]]
) -> int:
    """Print the rows; return 1 if a row failed, broke parity or is worse than its baseline, else 0.

    Also returns 1 if a record can't be shown, or requested results are missing: no parity check, or no run in
    common with the baseline.
    """
    from slm_toolkit.report.labels import labelled
    from slm_toolkit.report.tables.baseline import baseline_table, changes
    from slm_toolkit.report.tables.comparison import failed_references, sections
    from slm_toolkit.report.tables.export import csv_text, json_text

    for problem in report.problems:
        print(f"left out: {problem}", file=sys.stderr)
    rows = report.rows
    found, missing = changes(rows, asked_rows(baseline, args)) if baseline else ([], [])
    unchecked = failed_references(report.records.pairs)
    if getattr(args, "parity", None) and not unchecked and all(row.parity_holds is None for row in rows):
        unchecked.append("no parity check: no row is ok, or no row has a reference")
    content = report.to_dicts() if args.json or args.export else []
    if baseline:
        by_record = {change.record_now: change.as_json() for change in found}
        content = [{**row, "baseline": by_record.get(row["record"])} for row in content]
    text_of = {".csv": lambda: csv_text(content), ".md": report.to_markdown, ".html": report.to_html}
    for path in args.export:
        path.write_text(text_of[path.suffix](), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json_text(content))
        print("".join(f"{line}\n" for line in unchecked), end="", file=sys.stderr)
    else:
        console = console_of_stdout()
        parts = [*sections(rows, width=console.width, unchecked=unchecked)]
        if baseline:
            labels = {row.record: label for label, row in labelled(rows).items()}
            words = {"named": labels, "baseline": args.baseline, "width": console.width}
            parts.append(baseline_table(found, missing, **words))
        for part in parts:
            console.print(part, crop=False)
    well = all(row.status in ("ok", "oom") and row.parity_holds is not False for row in rows)
    worse = any(change.is_regression for change in found) or (bool(baseline) and not found)
    return 0 if well and not worse and not unchecked and not report.problems else 1


def asked_rows(
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    problems: list[str] | None = None,
) -> list["Row"]:
    """Return the rows of records, by the flags of `add_output_flags`, the fastest of each model first.

    What programs read (--json, CSV) is in the order of the records, which does not depend on noise.
    """
    from slm_toolkit.report.rows import rows_of, sorted_rows

    rows = rows_of(records, prices=args.prices, problems=problems)
    is_data = args.json or any(path.suffix == ".csv" for path in args.export)
    return rows if is_data else sorted_rows(rows)
