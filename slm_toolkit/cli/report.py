"""`slm report`: the table of recorded runs, with charts and exports."""

import argparse
import json
import sys
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.output import (
    add_output_flags,
    asked_rows,
    check_exports,
    print_records,
    read_baseline,
)
from slm_toolkit.config.flag_pairs import flags_given
from slm_toolkit.record.files import schema
from slm_toolkit.results import Records, Report, read_records

_EXAMPLES = """\
  slm report                           the table of all records under runs
  slm report runs --html report.html   the table and charts as one page
  slm report runs --baseline old       what became slower or larger since the records under old?
"""


def write_page(report: Report, path: Path) -> None:
    """Write the page. What it leaves out goes to stderr. Raises ValueError if the file can't be written."""
    problems: list[str] = []
    panels = report.panels(problems=problems)
    try:
        report.to_html(path, panels=panels)
    except OSError as error:
        raise ValueError(f"can't write: {error}\nhint: choose a writable folder with free space") from None
    print(f"wrote {path}", file=sys.stderr)
    left_out = [f"{panel.title}: {panel.missing}" for panel in panels if panel.missing]
    for line in (*problems, *left_out):
        print(f"left out: {line}", file=sys.stderr)


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm report`."""
    parser.description = "Print the table of recorded runs, with charts and exports."
    parser.examples = _EXAMPLES
    parser.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    ).basic = True
    parser.add_argument("--schema", action="store_true", help="print only the JSON schema of record.json")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the table and all charts as one page that works offline",
    ).basic = True
    add_output_flags(parser)
    parser.set_defaults(verb=_report)


def report_of(records: Records, args: argparse.Namespace) -> Report:
    """Return the rows of records by the flags of a report. Raises ValueError for a user's mistake."""
    problems = list(records.problems)
    return Report(asked_rows(records.pairs, args, problems=problems), records, problems)


def _report(args: argparse.Namespace) -> int:
    if args.schema:
        return _print_schema(args)
    with user_errors():
        check_exports(args)
        read = read_records(args.records)
        baseline = read_baseline(args.baseline)
    report = report_of(read, args)
    for problem in report.problems:
        print(f"left out: {problem}", file=sys.stderr)
    broken = 1 if report.problems else 0
    if args.html:  # first: whoever reads the table may stop, as `| head` does
        with user_errors():
            write_page(report, args.html)
    return max(print_records(report.rows, read.pairs, args, baseline=baseline), broken)


def _print_schema(args: argparse.Namespace) -> int:
    with user_errors():
        if others := sorted({*flags_given(args)} - {"schema"}):
            raise ValueError(f"--schema with {', '.join(others)}\nhint: --schema prints only the schema")
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
