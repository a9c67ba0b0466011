"""What `slm compare` and `slm report` are told of their output, and the numbers that flags take."""

import argparse
from pathlib import Path

from slm_toolkit.export_output import add_export_flags


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of rows, unknown is null")
    parser.add_argument(
        "--usd_per_gpu_hour", type=price_per_hour, metavar="USD", help="your price, instead of the table's"
    )
    parser.add_argument(
        "--strict", action="store_true", help="give no rank to rows that were computed with other numerics"
    )
    parser.add_argument(
        "--parity_tolerance",
        type=positive_number,
        metavar="X",
        help="largest difference of a loss that passes (default by numerics: fp32 1e-5, aligned 0.01, stock "
        "and pure_bf16 0.05; more where one process of the same numerics differs by more from fp32)",
    )
    parser.add_argument(
        "--phases", action="store_true", help="print data, forward, backward and optimizer of a step too"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print where the memory peak is, which modules own it, and the step as a chart, of runs with "
        "--trace_memory or --rehearse",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="earlier records: what got slower, bigger or less accurate since? exit code 1 if something did",
    )
    add_export_flags(parser)


def positive_number(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def price_per_hour(text: str) -> float:
    """A price that a report can show: no less than a millionth, no more than a million."""
    if not 1e-6 <= float(text) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no price per GPU-hour: 0.000001 to 1000000")
    return float(text)


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def whole_number(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return int(text)
