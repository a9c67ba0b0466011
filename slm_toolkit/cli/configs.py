"""`slm configs`: list or copy the accelerate YAMLs of this package."""

import argparse
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
    parser.set_defaults(verb=_configs)


def _configs(args: argparse.Namespace) -> int:
    with user_errors():
        if args.copy is not None:
            print(*copy_configs(args.copy), sep="\n")
            return 0
        for strategy in map(find_strategy, shipped_strategies()):
            print(f"{strategy.name:20} {strategy.path}")
    return 0
