"""`slm estimate`: the flags, the grid, and one Estimate for each of its configurations; nothing runs."""

import argparse
import json
import sys

from slm_toolkit import api
from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flags, add_price_flags, deployment_flags
from slm_toolkit.config.flags import add_flags, given_flags
from slm_toolkit.predict.flag_checks import NOT_OF_AN_ESTIMATE, add_software_flag
from slm_toolkit.strategy.groups import help_of_strategies


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm estimate`, and what it does."""
    parser.description = (
        "Peak memory per GPU and per node's host and, with --gpu, tokens per second, what binds "
        "them and what they cost: by closed forms, no GPU, no torch, no network. Flags that change none of "
        "it (learning rate, steps, data) are taken as in `slm compare`."
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help=help_of_strategies(),
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        metavar="NAME",
        help="say whether it fits, and how fast it is, on a100-40gb, h200, ...",
    )
    parser.add_argument(
        "--num_gpus",
        nargs="+",
        type=int,
        metavar="N",
        help="GPUs, whatever a YAML says (default: 8); --gpu a100-40gb:8 says it, too",
    )
    parser.add_argument(
        "--gpus_per_node", type=int, default=8, metavar="K", help="at most so many in a node (default: 8)"
    )
    parser.add_argument(
        "--largest_batch",
        action="store_true",
        help="the largest --per_device_train_batch_size that fits on --gpu, for each row, and the largest "
        "that is not even tight (a tenth more activations would fit too)",
    )
    parser.add_argument(
        "--deepspeed",
        choices=("arithmetic", "live"),
        default="arithmetic",
        help="DeepSpeed's own estimate: by its arithmetic, or live: by the installed DeepSpeed (seconds)",
    )
    add_software_flag(parser)
    add_price_flags(parser)
    add_network_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a list of rows, unknown is null")
    add_flags(parser, grid=True, leave_out=NOT_OF_AN_ESTIMATE)
    parser.set_defaults(verb=_estimate)


def _estimate(args: argparse.Namespace) -> int:
    with user_errors():
        found = api.estimate(
            strategy=args.strategy,
            gpu=args.gpu,
            num_gpus=args.num_gpus,
            gpus_per_node=args.gpus_per_node,
            find_largest_batch=args.largest_batch,
            live_deepspeed=args.deepspeed == "live",
            software=args.software,
            flags=given_flags(args),
            **deployment_flags(args),
        )
    for note in found.notes:
        print(note, file=sys.stderr)
    if args.json:
        print("[" + ",\n ".join(json.dumps(row, allow_nan=False) for row in found.to_dicts()) + "]")
    else:
        from slm_toolkit.report.tables.fitted import PIPE_WIDTH, console_of_stdout

        console = console_of_stdout(pipe_width=2 * PIPE_WIDTH)  # a file may be wide
        console.print(found.table(width=console.width), crop=False)
    return 0
