"""`slm configs`: list or copy the accelerate YAMLs of this package."""

import argparse
import json
import sys
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given
from slm_toolkit.strategy.groups import text_for_machines
from slm_toolkit.strategy.strategy import copy_configs, find_strategy, shipped_files, shipped_strategies

_EXAMPLES = """\
  slm configs                   list them
  slm configs --copy mine       write them, to change and to launch
  slm configs --copy mine --num_machines 2 --gpus_per_node 8
"""
_PAIRS = (
    Pair("gpus_per_node", "num_machines", is_needed=True),
    Pair("num_machines", "copy", is_needed=True),
)


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm configs`."""
    parser.description = (
        "List or copy the accelerate YAMLs of this package, and the DeepSpeed JSONs they name."
    )
    parser.examples = _EXAMPLES
    parser.add_argument(
        "--copy", type=Path, metavar="DIR", help="write accel_configs/ and ds_configs/ into DIR"
    )
    parser.add_argument(
        "--num_machines",
        type=int,
        metavar="N",
        help="with --copy: write them for N machines; run `slm launch` on each",
    )
    parser.add_argument(
        "--gpus_per_node",
        type=int,
        metavar="K",
        help="with --num_machines: GPUs of each machine (default: 8)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(verb=_configs)


def _configs(args: argparse.Namespace) -> int:
    with user_errors():
        hint = "--copy DIR --num_machines 2 --gpus_per_node 8"
        check_pairs(flags_given(args), _PAIRS, hint=hint)
        for name, least in (("num_machines", 2), ("gpus_per_node", 1)):
            if (count := getattr(args, name)) is not None and count < least:
                raise ValueError(f"--{name} is {count}: at least {least}\nhint: {hint}")
        if args.copy is not None:
            paths = [str(path) for path in copy_configs(args.copy, _texts(args))]
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


def _texts(args: argparse.Namespace) -> dict[Path, str] | None:
    """Return the shipped files as changed for several machines; None to copy them unchanged.

    Files that can't run on several machines are left out, with a note.
    """
    if args.num_machines is None:
        return None
    texts = {}
    for source in shipped_files():
        try:
            texts[source] = text_for_machines(
                source, num_machines=args.num_machines, gpus_per_node=args.gpus_per_node or 8
            )
        except ValueError as error:
            print(f"left out: {str(error).splitlines()[0]}", file=sys.stderr)
    return texts
