"""The `slm` command: compare runs, estimate them, report on records, write out the configurations."""

import argparse
import json
import os
import re
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import orjson

from slm_toolkit import __version__
from slm_toolkit.compare_verb import add_compare_verb
from slm_toolkit.doctor import add_doctor_verb
from slm_toolkit.errors import user_errors
from slm_toolkit.estimate import add_estimate_verb
from slm_toolkit.export_output import check_exports, exports_asked, on_stdout
from slm_toolkit.flags import Parser, with_underscores
from slm_toolkit.garbage import no_garbage_collection
from slm_toolkit.output import print_errors, print_records, read_baseline, rows_of
from slm_toolkit.output_flags import add_output_flags
from slm_toolkit.paper_output import add_paper_flags, print_paper
from slm_toolkit.picture_output import PICTURES, add_picture_flags, print_plots, write_pictures
from slm_toolkit.recommend import add_recommend_verb
from slm_toolkit.record import RECORD_FILE, SCHEMA_FILE, RunRecord
from slm_toolkit.record_files import find_records
from slm_toolkit.strategy import STUDIED_STRATEGIES, copy_configs, find_strategy, shipped_strategies
from slm_toolkit.tracker_output import add_report_to, check_report_to

_EPILOG = """\
examples:
  slm compare                                             six strategies on this machine, then a table
  slm compare --strategy ddp ds_zero2 --per_device_train_batch_size 4 8 16
  slm estimate --model slm-2b --gpu a100-40gb             its peak memory, and does it fit; nothing runs
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb  the cheapest way to train it on what you can get
  slm doctor --model slm-500m                             what is unwise in it, on which GPU, by how much
  slm report runs --json                                  the records of earlier runs
  slm report runs --html report.html                      the table and charts as a page to send around
  slm report --paper                                      the study behind it, rebuilt beside its figures
  slm configs --copy .                                    the YAMLs, to change and to launch
one training run:
  accelerate launch --config_file accel_configs/fsdp_full_shard.yaml -m slm_toolkit.train --help
"""


def main(argv: list[str] | None = None) -> None:
    """Entry point of `slm`. Exit codes: 0 all rows ok or oom, 1 a row failed or broke parity, 2 bad input."""
    if sys.stdout is None:  # `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    args, unknown = _parser().parse_known_args(with_underscores(sys.argv[1:] if argv is None else argv))
    if unknown:
        known = [f"--{name}" for name in vars(args) if name not in ("parser", "verb")]
        close = get_close_matches(unknown[0], known, n=1)
        args.parser.error(f"unknown: {' '.join(unknown)}" + (f" (did you mean {close[0]}?)" if close else ""))
    try:
        code = args.verb(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slm",
        description="Train a small language model under every sharding strategy and compare what it costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slm_toolkit {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    add_compare_verb(verbs)
    add_estimate_verb(verbs)
    add_recommend_verb(verbs)
    add_doctor_verb(verbs)

    report = verbs.add_parser(
        "report", help="print the table of recorded runs", description="The table of records."
    )
    report.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    )
    report.add_argument(
        "--errors",
        action="store_true",
        help="instead of the table, how far `slm estimate`'s memory is from that of each record, by part",
    )
    report.add_argument(
        "--schema", action="store_true", help="print the JSON schema of record.json, and nothing else"
    )
    add_picture_flags(report)
    add_paper_flags(report)
    add_output_flags(report)
    add_report_to(report)
    report.set_defaults(verb=no_garbage_collection()(_report), parser=report)

    configs = verbs.add_parser(
        "configs",
        help="list the shipped accelerate YAMLs, or write them out",
        description="The accelerate YAMLs that this package ships, and the DeepSpeed JSONs they name.",
    )
    configs.add_argument(
        "--copy", type=Path, metavar="DIR", help="write accel_configs/ and ds_configs/ under DIR"
    )
    configs.add_argument("--json", action="store_true", help="print as JSON")
    configs.set_defaults(verb=_configs, parser=configs)
    return parser


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
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    records.sort(key=_order)
    broken = 1 if problems else 0
    if args.errors:
        return max(print_errors(records, args), broken)
    rows = rows_of(records, args)
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


def _configs(args: argparse.Namespace) -> int:
    with user_errors():
        if args.copy is not None:
            paths = [str(path) for path in copy_configs(args.copy)]
            print(json.dumps(paths) if args.json else "\n".join(paths))
            return 0
        strategies = [find_strategy(name) for name in shipped_strategies()]
    if args.json:
        names = ("name", "engine", "zero_stage", "reshard_after_forward", "path")
        print(
            json.dumps(
                [{name: getattr(strategy, name) for name in names} for strategy in strategies], indent=2
            )
        )
    else:
        print("\n".join(f"{strategy.name:20} {strategy.path}" for strategy in strategies))
    return 0


if __name__ == "__main__":
    main()
