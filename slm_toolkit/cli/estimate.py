"""`slm estimate`: flags, a grid, and an Estimate of each of its configurations. Nothing runs."""

import argparse
import json
import sys

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flag, add_price_flag, deployments
from slm_toolkit.config.flags import add_flags, given_flags
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.predict.flag_checks import NOT_OF_AN_ESTIMATE, add_like_flag
from slm_toolkit.results import Estimates
from slm_toolkit.strategy.groups import help_of_strategies

_DESCRIPTION = """\
Estimate peak memory per GPU and per host by closed forms: nothing runs. With --gpu also the speed, the
bottleneck and the cost. Flags that change none of these (learning rate, steps, data) are accepted too."""
_EXAMPLES = """\
  slm estimate --model slm-2b --gpu a100-40gb             does it fit, how fast, for how much?
  slm estimate --model slm-500m slm-1b --gpu h100-80gb --per_device_train_batch_size 8 16
  slm estimate --model slm-2b --gpu a100-40gb --largest_batch
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm estimate`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help=help_of_strategies(),
    ).basic = True
    parser.add_argument(
        "--gpu",
        nargs="+",
        metavar="NAME",
        help="GPU types, such as a100-40gb or h200; A100 is every A100. Adds speed, and whether it fits",
    ).basic = True
    parser.add_argument(
        "--num_gpus",
        nargs="+",
        type=int,
        metavar="N",
        help="GPUs, whatever a YAML has (default: 8). --gpu a100-40gb:8 means the same",
    ).basic = True
    parser.add_argument(
        "--gpus_per_node", type=int, default=8, metavar="K", help="most GPUs in one node (default: 8)"
    )
    parser.add_argument(
        "--largest_batch",
        action="store_true",
        help="find the largest --per_device_train_batch_size that fits on --gpu, for each row, "
        "with the other flags as given. Also the largest that would fit with a tenth more activations",
    ).basic = True
    add_like_flag(parser)
    add_price_flag(parser)
    add_network_flag(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_flags(parser, grid=True, leave_out=NOT_OF_AN_ESTIMATE)
    parser.set_defaults(verb=_estimate)


def estimates(args: argparse.Namespace) -> Estimates:
    """Return the estimates that the flags ask for. Raises ValueError with all problems."""
    from slm_toolkit.predict import grid
    from slm_toolkit.predict.flag_checks import gpus_asked
    from slm_toolkit.predict.setup.other_trainers import as_liked, notes_like, trainer_named
    from slm_toolkit.predict.setup.setup import unlike_the_model
    from slm_toolkit.strategy.groups import strategies_asked

    own_flags, trainer = given_flags(args), trainer_named(args.like)
    notes = notes_like(trainer, own_flags)
    given = as_liked(trainer, own_flags)
    names = args.strategy or (list(trainer.strategies) if trainer else None)
    strategies, left_out = strategies_asked(names, given, has_gpu=True)
    gpus, counts = gpus_asked(args.gpu, args.num_gpus) if args.gpu else ([None], args.num_gpus)
    rows = grid.estimates(
        given,
        strategies,
        gpus=gpus,
        num_gpus=counts or [8],
        gpus_per_node=args.gpus_per_node,
        find_largest_batch=args.largest_batch,
        search_changes=True,
        like=trainer,
        deployments=deployments(args),
        notes=notes,
    )
    notes += [
        *left_out,
        *(note for row in rows for note in unlike_the_model(row.setup.spec, row.config.seq_len)),
        *grid.notes_on_strategies(strategies, given.get("numerics") or [RunConfig.numerics]),
    ]
    return Estimates(rows, list(dict.fromkeys(notes)), found_largest_batch=args.largest_batch)


def _estimate(args: argparse.Namespace) -> int:
    with user_errors():
        found = estimates(args)
    for note in found.notes:
        print(note, file=sys.stderr)
    if args.json:
        print("[" + ",\n ".join(json.dumps(row, allow_nan=False) for row in found.to_dicts()) + "]")
    else:
        from slm_toolkit.report.tables.fitted import PIPE_WIDTH, console_of_stdout

        console = console_of_stdout(pipe_width=2 * PIPE_WIDTH)  # a file may be wide
        console.print(found.table(width=console.width), crop=False)
    return 0
