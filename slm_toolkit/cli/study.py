"""`slm report --paper`, from its flags to what it prints."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given
from slm_toolkit.config.parser import positive_number

if TYPE_CHECKING:
    from slm_toolkit.study.answers import Answers
    from slm_toolkit.study.best import Best
    from slm_toolkit.study.comparison import Comparison

_DEFAULT_GPU = "h100-80gb"
_TAKEN = ("records", "paper", "gpu", "json", "usd_per_gpu_hour", "inter_node_gbps")
_TEXT_WIDTH = 110
"columns of a paragraph, at most"


def add_paper_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--paper",
        action="store_true",
        help="instead of the table, figures 1 to 4 of Ashkboos et al. (arXiv 2410.19456) beside our "
        "predictions, or beside given records of the same configurations; their four questions, answered; "
        "and the best configurations of the paper's models on 1 to 64 nodes",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"with --paper, what the best configurations are for (default: {_DEFAULT_GPU})",
    )
    parser.add_argument(
        "--inter_node_gbps",
        type=positive_number,
        metavar="GBIT",
        help="with --paper, their nodes' network in gigabit per second (default: as AWS rents the GPU)",
    )


def print_paper(args: argparse.Namespace) -> int:
    """Figures, answers and best configurations to stdout; returns 1 where a given record can't be read."""
    from slm_toolkit.record.files import find_records
    from slm_toolkit.study.answers import answers
    from slm_toolkit.study.best import best_configurations
    from slm_toolkit.study.comparison import comparisons, measured_cells

    with user_errors():
        _check(args)
        given = args.records is not args.parser.get_default("records")  # that folder was not asked for
        records, problems = find_records(args.records) if given else ([], [])
        best = best_configurations(
            args.gpu or _DEFAULT_GPU,
            usd_per_gpu_hour=args.usd_per_gpu_hour,
            inter_node_gbps=args.inter_node_gbps,
        )
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    measured = measured_cells(records)
    if given:
        print(f"cells of the paper measured by {len(records)} records: {len(measured)}", file=sys.stderr)
    compared = comparisons(measured)
    found = answers(compared)
    if args.json:
        numbers = dataclasses.asdict(found)
        content = {
            "points": [dataclasses.asdict(item) for item in compared],
            "answers": {**numbers.pop("questions"), **numbers},
            "best": [dataclasses.asdict(item) for item in best],
        }
        print(json.dumps(content, indent=2, allow_nan=False))
    else:
        _print(compared, found, best)
    return 1 if problems else 0


def _check(args: argparse.Namespace) -> None:
    check_pairs(
        flags_given(args), [Pair(name, "paper", is_needed=True) for name in ("gpu", "inter_node_gbps")]
    )
    if unused := [name for name in flags_given(args) if name not in (*_TAKEN, "parser", "verb")]:
        taken = ", ".join(f"--{name}" for name in _TAKEN[2:])
        raise ValueError(
            f"--{unused[0]} with --paper, which prints the paper's figures\nhint: beside it there are {taken}"
        )


def _print(compared: list["Comparison"], found: "Answers", best: list["Best"]) -> None:
    from rich.text import Text

    from slm_toolkit.report.tables.fitted import console_of_stdout
    from slm_toolkit.study.answers import paragraphs
    from slm_toolkit.study.tables import best_table, figure_table

    console = console_of_stdout()
    for figure in dict.fromkeys(item.figure for item in compared):
        console.print(figure_table(compared, figure, width=console.width), Text(), crop=False, sep="\n")
    for heading, text in paragraphs(found):
        console.print(Text(heading, style="bold"))
        console.print(Text(text), Text(), width=min(console.width, _TEXT_WIDTH), sep="\n")
    console.print(best_table(best, width=console.width), crop=False)
