"""`slm report`: the table of recorded runs, with charts and exports."""

import argparse
import json
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
        return _print_schema(args)
    with user_errors():
        check_exports(args.export)
        read = read_records(args.records)
        baseline = read_baseline(args.baseline)
    return print_records(report_of(read, args), args, baseline=baseline)


def _print_schema(args: argparse.Namespace) -> int:
    with user_errors():
        if others := sorted({*flags_given(args)} - {"schema"}):
            raise ValueError(f"--schema with {', '.join(others)}\nhint: --schema prints only the schema")
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
