"""`slm configs`: list or copy the accelerate YAMLs of this package."""

import argparse
import json
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.strategy.strategy import copy_configs, find_strategy, shipped_strategies

_EXAMPLES = """\
  slm configs                   list them
  slm configs --copy mine       write them, to change and to launch
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm configs`."""
    parser.description = (
        "List or copy the accelerate YAMLs of this package, and the DeepSpeed JSONs they name."
    )
    parser.examples = _EXAMPLES
    parser.add_argument(
        "--copy", type=Path, metavar="DIR", help="write accel_configs/ and ds_configs/ into DIR"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(verb=_configs)


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
