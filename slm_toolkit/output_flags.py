"""What `slm compare` and `slm report` are told of their output, and the numbers that flags take."""

import argparse
from pathlib import Path

from slm_toolkit.export_output import add_export_flags
from slm_toolkit.parser import positive_number, price_per_hour


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
