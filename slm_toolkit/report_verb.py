"""`slm report`: the table of recorded runs, its pictures and exports, and the study's pages."""

import argparse
import re
import sys
from functools import cache
from pathlib import Path

import orjson

from slm_toolkit.errors import user_errors
from slm_toolkit.export_output import check_exports, exports_asked, on_stdout
from slm_toolkit.garbage import no_garbage_collection
from slm_toolkit.output import print_errors, print_records, read_baseline, rows_of
from slm_toolkit.output_flags import add_output_flags
from slm_toolkit.paper_output import add_paper_flags, print_paper
from slm_toolkit.picture_output import PICTURES, add_picture_flags, print_plots, write_pictures
from slm_toolkit.record import RECORD_FILE, SCHEMA_FILE, RunRecord
from slm_toolkit.record_files import find_records
from slm_toolkit.strategy import STUDIED_STRATEGIES
from slm_toolkit.tracker_output import add_report_to, check_report_to


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm report`, and what it does."""
    parser.description = "The table of records."
    parser.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    )
    parser.add_argument(
        "--errors",
        action="store_true",
        help="instead of the table, how far `slm estimate`'s memory is from that of each record, by part",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of record.json, and nothing else"
    )
    add_picture_flags(parser)
    add_paper_flags(parser)
    add_output_flags(parser)
    add_report_to(parser)
    parser.set_defaults(verb=no_garbage_collection()(_report))


def _report(args: argparse.Namespace) -> int:
    if args.schema:
        return _print_schema(args)
    if args.paper or args.gpu or args.inter_node_gbps:
        return print_paper(args)
    with user_errors():
        others = [
            name for name in ("baseline", "memory", "phases", "strict", *PICTURES) if getattr(args, name)
        ]
        others += [*exports_asked(args), *(["report_to"] if args.report_to else [])]
        if args.errors and others:
            raise ValueError(f"--{others[0]} with --errors, which prints errors alone\nhint: give one")
        if args.plot and (taken := on_stdout(args)):
            raise ValueError(f"--plot with --{taken[0]}, of which stdout holds nothing else\nhint: give one")
        check_exports(args)
        check_report_to(args)
        records, problems = find_records(args.records)
        if not records:
            nothing = f"no {RECORD_FILE} under {args.records[0]}\nhint: `slm compare` writes records"
            raise ValueError(problems[0] if problems else nothing)
        baseline = read_baseline(args.baseline)
    records.sort(key=_order)
    rows = [] if args.errors else rows_of(records, args, problems=problems)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    broken = 1 if problems else 0
    if args.errors:
        return max(print_errors(records, args), broken)
    if args.html or args.figures:  # first: whoever reads the table may stop, as `| head` does
        write_pictures(rows, records, args, left_out=[f"left out: {problem}" for problem in problems])
    code = print_records(rows, records, args, baseline=baseline)
    if args.plot:
        print_plots(rows)
    return max(code, broken)


def _print_schema(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if value != args.parser.get_default(name)}
    with user_errors():
        if others := sorted(given.keys() - {"schema"}):
            raise ValueError(f"--schema with {', '.join(others)}\nhint: it prints the schema alone")
    print(SCHEMA_FILE.read_text(encoding="utf-8"), end="")
    return 0


def _order(found: tuple[Path, RunRecord]) -> tuple:
    """Models by size, then what was asked, rehearsals by ranks, then strategies as the study lists them."""
    record = found[1]
    known = [*STUDIED_STRATEGIES, record.strategy]
    asked = {**record.asked["config"]}
    num_rehearsed = asked.pop("rehearse", None)
    return (
        record.model["num_params"],
        not record.is_parity_reference,
        _sortable(orjson.dumps(asked)),  # text, for settings of several types have no order
        num_rehearsed or 0,
        known.index(record.strategy),
        str(found[0]),
    )


@cache
def _sortable(asked: bytes) -> bytes:
    """JSON with its whole numbers equally long, so that it sorts as they do."""
    return re.sub(rb":(\d+)(?=[,}])", lambda number: number[1].rjust(16), asked)
