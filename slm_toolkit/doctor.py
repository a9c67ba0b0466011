"""`slm doctor`: what is wrong or unwise in a model and its configuration on the GPUs meant for it."""

import argparse
import dataclasses
import json

from slm_toolkit.config import RunConfig
from slm_toolkit.errors import user_errors
from slm_toolkit.estimate_checks import (
    NOT_OF_AN_ESTIMATE,
    add_software_flag,
    check_grid,
    model_to_estimate,
    placement_problems,
)
from slm_toolkit.flags import add_flags, config_from_args
from slm_toolkit.output_flags import count
from slm_toolkit.site_flags import add_network_flags, sites_of
from slm_toolkit.strategy import STUDIED_STRATEGIES, contradictions, find_strategy

_GPUS = ("a100-40gb", "a100-80gb", "h100-80gb")
_STYLE = {"wrong": "red", "unwise": "yellow", "could be faster": "green"}


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm doctor`, and what it does."""
    parser.description = (
        "Widths that tensor cores don't like and what they cost on each GPU type, memory that "
        "does not fit, networks too slow to hide communication, kernels and strategies that would be faster. "
        "By closed forms: nothing runs."
    )
    parser.add_argument(
        "--gpu", nargs="+", default=list(_GPUS), metavar="NAME", help=f"(default: {' '.join(_GPUS)})"
    )
    parser.add_argument("--num_gpus", type=count, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--gpus_per_node", type=count, default=8, metavar="K", help="at most (default: 8)")
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=list(STUDIED_STRATEGIES),
        metavar="NAME|YAML",
        help="(default: the six)",
    )
    parser.add_argument("--json", action="store_true", help="print a list of findings")
    add_software_flag(parser)
    add_network_flags(parser)
    add_flags(parser, grid=False, leave_out=NOT_OF_AN_ESTIMATE)
    parser.set_defaults(verb=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    """Exit code 0: nothing wrong, 1: something is."""
    from slm_toolkit.hardware import gpu_of_name
    from slm_toolkit.predict.advice import Setting, findings

    with user_errors():
        asked = config_from_args(args)
        check_grid(dataclasses.asdict(asked), num_gpus=[args.num_gpus], gpus_per_node=args.gpus_per_node)
        config = asked.with_defaults(has_gpu=True)
        spec, site_of = model_to_estimate(config.model), sites_of(args)
        strategies = [find_strategy(name) for name in dict.fromkeys(args.strategy)]
        problems = [problem for strategy in strategies for problem in contradictions(strategy, config)]
        problems += placement_problems(
            [strategy for strategy in strategies if strategy.engine != "single"],
            num_gpus=[args.num_gpus],
            gpus_per_node=args.gpus_per_node,
        )
        if problems:
            raise ValueError("\n".join(problems) + "\nhint: leave out the strategy, or the flag")
        settings = [
            Setting(
                spec,
                config,
                strategy,
                gpu,
                1 if strategy.engine == "single" else args.num_gpus,
                args.gpus_per_node,
                site_of(gpu),
                args.software,
            )
            for gpu in map(gpu_of_name, dict.fromkeys(args.gpu))
            for strategy in strategies
        ]
        found = findings(settings)
    if args.json:
        print(json.dumps([vars(finding) for finding in found], indent=2))
    else:
        _print(found, config)
    return 1 if any(finding.severity == "wrong" for finding in found) else 0


def _print(found: list, config: RunConfig) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not found:
        console.print(f"{config.model}: nothing to say against it")
    for finding in found:
        line = Text.assemble((f"{finding.severity}: ", _STYLE[finding.severity]), finding.sentence)
        console.print(line, soft_wrap=True)
