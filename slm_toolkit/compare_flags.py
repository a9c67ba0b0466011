"""The flags of `slm compare` that say what is launched, how often, and how many at once."""

import argparse

from slm_toolkit.parser import count, positive_number, whole_number
from slm_toolkit.strategy import STUDIED_STRATEGIES, shipped_strategies


def add_grid_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help=f"of {', '.join(shipped_strategies())}, or an accelerate YAML or a DeepSpeed JSON (default:"
        f" {', '.join(STUDIED_STRATEGIES)})",
    )
    parser.add_argument(
        "--num_processes", type=int, help="ranks (default: all GPUs; without a GPU two processes)"
    )
    parser.add_argument(
        "--timeout", type=positive_number, default=3600, metavar="SECONDS", help="per run (default: 3600)"
    )
    parser.add_argument(
        "--retry", type=whole_number, default=0, metavar="N", help="try a failed run again up to N times"
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="launch each run N times; with 3 or more, intervals are those of the launches (default: 1)",
    )
    parser.add_argument(
        "--parity",
        type=count,
        metavar="K",
        help="do K steps of a task that shows faults, in one process too (in fp32, and in the numerics "
        "asked), and of each strategy the first five in fp32; compare losses and gradient norms: exit code 1 "
        "where they differ",
    )
    parser.add_argument(
        "--largest_batch",
        action="store_true",
        help="find the largest --per_device_train_batch_size that runs, by short runs from the estimate on",
    )
    parser.add_argument(
        "--max_batch", type=count, metavar="N", help="try none above N; needed without a GPU, which says when"
    )
    parser.add_argument(
        "--gpus_per_run",
        type=count,
        metavar="K",
        help="run several side by side, each on K GPUs of its own (default: one at a time, on all)",
    )
    parser.add_argument(
        "--runs_at_once",
        type=count,
        metavar="N",
        help="without a GPU: run N side by side on shares of the cores, which slow each other down",
    )
    parser.add_argument(
        "--skip_oom",
        action="store_true",
        help="launch no run that will not fit this GPU by the estimate: its row says so, and by how much",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="launch nothing: print the commands of the runs to do, one per line (with --json as a list)",
    )
    parser.add_argument("--force", action="store_true", help="run all again, earlier records are replaced")
