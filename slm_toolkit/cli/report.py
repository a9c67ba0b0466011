"""`slm report`: the table of recorded runs, with charts and exports."""

import argparse
import json
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.output import add_output_flags, asked_rows, print_records, read_baseline
from slm_toolkit.record.files import schema
from slm_toolkit.results import Records, Report, read_records

_EXAMPLES = """\
  slm report                             the table of all records under runs
  slm report runs --export report.html   the table and charts as one page
  slm report runs --baseline old         what became slower or larger since the records under old?
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm report`."""
    parser.description = "Print the table of recorded runs, with charts and exports."
    parser.examples = _EXAMPLES
    parser.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    ).basic = True
    parser.add_argument(
        "--schema", action="store_true", help="print only the JSON schema of record.json"
    ).basic = True
    add_output_flags(parser)
    parser.set_defaults(verb=_report)


def report_of(records: Records, args: argparse.Namespace) -> Report:
    """Return the rows of records by the flags of a report. Raises ValueError for a user's mistake."""
    problems = list(records.problems)
    return Report(asked_rows(records.pairs, args, problems=problems), records, problems)


def _report(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(schema(), indent=2, ensure_ascii=False))
        return 0
    with user_errors():
        read = read_records(args.records)
        baseline = read_baseline(args.baseline)
    return print_records(report_of(read, args), args, baseline=baseline)
