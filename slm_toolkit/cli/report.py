"""`slm report`: the table of recorded runs, with charts and exports."""

import argparse
import json
import sys
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.output import (
    EXPORTS,
    add_output_flags,
    asked_rows,
    check_exports,
    print_errors,
    print_records,
    read_baseline,
)
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given
from slm_toolkit.record.files import schema
from slm_toolkit.results import Records, Report, read_records

_EXAMPLES = """\
  slm report                           the table of all records under runs
  slm report runs --html report.html   the table and charts as one page
  slm report runs --baseline old       what became slower or larger since the records under old?
"""
PICTURES = ("html", "figures")
_ERRORS_ALONE = tuple(
    Pair(name, "errors", ", which prints only errors")
    for name in ("baseline", "memory", "phases", "strict", *PICTURES, *EXPORTS)
)


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the table and all charts as one page that works offline",
    ).basic = True
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="write each chart as PNG and SVG. Needs kaleido and Chrome (see CHROME_PATH)",
    ).basic = True


def write_pictures(report: Report, args: argparse.Namespace) -> None:
    """The files that flags ask for; their names go to stderr."""
    from slm_toolkit.report.charts.files import write_images

    problems: list[str] = []
    panels = report.panels(problems=problems)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    with user_errors():
        try:
            if args.html:
                report.to_html(args.html, panels=panels)
                print(f"wrote {args.html}", file=sys.stderr)
            if args.figures:
                written = write_images(panels, args.figures, caption=report.caption())
                print(f"wrote {len(written)} files to {args.figures}", file=sys.stderr)
        except OSError as error:
            raise ValueError(
                f"can't write: {error}\nhint: choose a writable folder with free space"
            ) from None
    for panel in panels:
        if panel.missing:
            print(f"left out: {panel.title}: {panel.missing}", file=sys.stderr)


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm report`."""
    parser.description = "Print the table of recorded runs, with charts and exports."
    parser.examples = _EXAMPLES
    parser.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    ).basic = True
    parser.add_argument(
        "--errors",
        action="store_true",
        help="instead of the table: the error of `slm estimate`'s memory for each record, by part",
    ).basic = True
    parser.add_argument("--schema", action="store_true", help="print only the JSON schema of record.json")
    add_picture_flags(parser)
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
        check_pairs(flags_given(args), _ERRORS_ALONE)
        check_exports(args)
        read = read_records(args.records)
        baseline = read_baseline(args.baseline)
    report = Report([], read, read.problems) if args.errors else report_of(read, args)
    for problem in report.problems:
        print(f"left out: {problem}", file=sys.stderr)
    broken = 1 if report.problems else 0
    if args.errors:
        return max(print_errors(read.pairs, args), broken)
    if args.html or args.figures:  # first: whoever reads the table may stop, as `| head` does
        write_pictures(report, args)
    return max(print_records(report.rows, read.pairs, args, baseline=baseline), broken)


def _print_schema(args: argparse.Namespace) -> int:
    with user_errors():
        if others := sorted({*flags_given(args)} - {"schema"}):
            raise ValueError(f"--schema with {', '.join(others)}\nhint: --schema prints only the schema")
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
