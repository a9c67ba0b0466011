"""Print the figures of Ashkboos et al. (arXiv 2410.19456) next to our predictions, or your records.

    python studies/ashkboos/compare.py [records ...] [--figures DIR]

Figures 1 to 4 of the paper, its four questions, and the best configurations for 1 to 64 nodes.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from answers import Answers, answers, paragraphs
from comparison import Comparison, comparisons, measured_cells
from images import write_images
from pictures import caption, pictures
from rich.text import Text
from tables import Best, best_configurations, best_table, figure_table

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.parser import positive_number
from slm_toolkit.record.files import find_records
from slm_toolkit.report.tables.fitted import console_of_stdout

_TEXT_WIDTH = 110
"most columns of a paragraph"


def main(argv: list[str] | None = None) -> int:
    """Print figures, answers and best configurations; return 1 if a given record can't be read."""
    args = _parser().parse_args(argv)
    with user_errors():
        records, problems = find_records(args.records) if args.records else ([], [])
        best = best_configurations(args.gpu, usd_per_gpu_hour=args.prices, inter_node_gbps=args.network)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    measured = measured_cells(records)
    if args.records:
        print(f"cells of the paper measured by {len(records)} records: {len(measured)}", file=sys.stderr)
    if args.figures:
        written = write_images(pictures(best), args.figures, caption=caption(best))
        print(f"wrote {len(written)} files to {args.figures}", file=sys.stderr)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path, help="folders or files of measured runs")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the best configurations")
    parser.add_argument("--gpu", default="h100-80gb", help="GPU of the best configurations")
    parser.add_argument("--prices", type=positive_number, metavar="USD", help="price of that GPU")
    parser.add_argument(
        "--network", type=positive_number, metavar="GBIT", help="network of one node, gigabit/s"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")
    return parser


def _print(compared: list[Comparison], found: Answers, best: list[Best]) -> None:
    console = console_of_stdout()
    for figure in dict.fromkeys(item.figure for item in compared):
        console.print(figure_table(compared, figure, width=console.width), Text(), crop=False, sep="\n")
    for heading, text in paragraphs(found):
        console.print(Text(heading, style="bold"))
        console.print(Text(text), Text(), width=min(console.width, _TEXT_WIDTH), sep="\n")
    console.print(best_table(best, width=console.width), crop=False)


if __name__ == "__main__":
    sys.exit(main())
