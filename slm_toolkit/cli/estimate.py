"""`slm estimate`: flags, a grid, and an Estimate of each of its configurations. Nothing runs."""

import argparse
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flags, add_price_flags, deployments_of
from slm_toolkit.config.flags import add_flags, given_flags
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.predict.flag_checks import (
    NOT_OF_AN_ESTIMATE,
    add_software_flag,
    gpus_asked,
    model_to_estimate,
)
from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.setup.setup import unlike_the_model
from slm_toolkit.strategy.groups import help_of_strategies, strategies_asked
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    pass


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
        help="GPU types, such as a100-40gb or h200. Adds speed, and whether it fits",
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
        help="find the largest --per_device_train_batch_size that fits on --gpu, for each row. Also "
        "the largest that would fit with a tenth more activations",
    ).basic = True
    parser.add_argument(
        "--deepspeed",
        choices=("arithmetic", "live"),
        default="arithmetic",
        help="DeepSpeed's own estimate. arithmetic: by its formulas. live: by the installed DeepSpeed, "
        "which takes seconds",
    )
    add_software_flag(parser)
    add_price_flags(parser)
    add_network_flags(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_flags(parser, grid=True, leave_out=NOT_OF_AN_ESTIMATE)
    parser.set_defaults(verb=_estimate)


def _estimate(args: argparse.Namespace) -> int:
    with user_errors():
        given = given_flags(args)
        strategies, left_out = strategies_asked(args.strategy, given, has_gpu=True)
        gpus, num_gpus = gpus_asked(args.gpu, args.num_gpus) if args.gpu else ([None], args.num_gpus)
        rows = estimates(
            given,
            strategies,
            gpus=gpus,
            num_gpus=num_gpus or [8],
            gpus_per_node=args.gpus_per_node,
            find_largest_batch=args.largest_batch,
            live_deepspeed=args.deepspeed == "live",
            software=args.software,
            deployments=deployments_of(args),
        )
    for note in (
        *left_out,
        *_notes_on_models(given),
        *_notes(strategies, given.get("numerics") or [RunConfig.numerics]),
    ):
        print(note, file=sys.stderr)
    if args.json:
        print("[" + ",\n ".join(json.dumps(vars(row), allow_nan=False) for row in rows) + "]")
    else:
        from slm_toolkit.report.tables.estimate import estimate_table
        from slm_toolkit.report.tables.fitted import PIPE_WIDTH, console_of_stdout

        console = console_of_stdout(pipe_width=2 * PIPE_WIDTH)  # a file may be wide
        table = estimate_table(rows, width=console.width, largest_batch=args.largest_batch)
        console.print(table, crop=False)
    return 0


def _notes(strategies: list[Strategy], numerics: list[str]) -> list[str]:
    """Return notes on settings of a user's own file that the estimate ignores."""
    found = []
    for strategy in strategies:
        in_bf16 = [name for name in numerics if name != "fp32"]
        if strategy.mixed_precision == "no" and in_bf16:
            found.append(
                f"{strategy.path}: mixed_precision no: --numerics {in_bf16[0]} is estimated for bf16"
            )
        policy = strategy.fsdp.auto_wrap_policy if strategy.fsdp is not None else "TRANSFORMER_BASED_WRAP"
        if policy != "TRANSFORMER_BASED_WRAP":
            found.append(f"{strategy.path}: fsdp_auto_wrap_policy {policy}: estimated with a unit per layer")
    return found


def _notes_on_models(given: dict[str, Any]) -> list[str]:
    """Return notes on settings of a model's own configuration that the estimate ignores."""
    pairs = itertools.product(given.get("model", [None]), given.get("seq_len", [None]))
    configs = [
        RunConfig(model=model, seq_len=seq_len).with_defaults(has_gpu=True) for model, seq_len in pairs
    ]
    notes = [unlike_the_model(model_to_estimate(config.model), config.seq_len) for config in configs]
    return list(dict.fromkeys(itertools.chain.from_iterable(notes)))
