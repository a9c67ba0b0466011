"""`slm estimate`: the flags, the grid, and one Estimate for each of its configurations; nothing runs."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slm_toolkit.config import RunConfig
from slm_toolkit.default_strategies import strategies_asked
from slm_toolkit.errors import user_errors
from slm_toolkit.estimate_checks import (
    CHANGES_NOTHING,
    NOT_OF_AN_ESTIMATE,
    add_software_flag,
    all_of,
    flag_problems,
    gpus_asked,
    largest_batch_problems,
    model_to_estimate,
    placement_problems,
)
from slm_toolkit.flags import add_flags
from slm_toolkit.garbage import no_garbage_collection
from slm_toolkit.gpt_configs import position_problem
from slm_toolkit.groups import fit_groups
from slm_toolkit.predict.unknown import unlike_the_model
from slm_toolkit.site_flags import add_network_flags, add_price_flags, sites_of
from slm_toolkit.strategy import (
    STUDIED_STRATEGIES,
    Strategy,
    contradictions,
    precision_asked,
    shipped_strategies,
)

if TYPE_CHECKING:
    from slm_toolkit.hardware import Gpu
    from slm_toolkit.predict.estimate import Estimate
    from slm_toolkit.predict.site import Site


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
        help=f"of {', '.join(shipped_strategies())}, or an accelerate YAML or a DeepSpeed JSON (default:"
        f" {', '.join(STUDIED_STRATEGIES)})",
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
    parser.set_defaults(verb=no_garbage_collection()(_estimate))


def _estimate(args: argparse.Namespace) -> int:
    with user_errors():
        names = {f.name for f in dataclasses.fields(RunConfig)}
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
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
            sites=sites_of(args),
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
        from rich.console import Console

        from slm_toolkit.report.estimate_table import estimate_table
        from slm_toolkit.report.widths import PIPE_WIDTH

        console = Console(markup=False, emoji=False)
        console.width = console.width if console.is_terminal else 2 * PIPE_WIDTH  # a file may be wide
        table = estimate_table(rows, width=console.width, largest_batch=args.largest_batch)
        console.print(table, crop=False)
    return 0


def estimates(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    gpus: list[str | None],
    num_gpus: list[int],
    gpus_per_node: int = 8,
    find_largest_batch: bool = False,
    live_deepspeed: bool = False,
    software: str = "2026",
    sites: "Callable[[Gpu | None], Site] | None" = None,
) -> list["Estimate"]:
    """All combinations of `given` (field name to a value or a list of values) with all else, equal ones once.

    A strategy of one process counts one GPU. Raises one ValueError with every problem of the flags.
    """
    from slm_toolkit.hardware import gpu_of_name
    from slm_toolkit.predict.as_launched import config_as_launched, strategy_as_launched
    from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION, deepspeed_needs
    from slm_toolkit.predict.estimate import estimate, largest_batch
    from slm_toolkit.predict.host_memory import placement_of

    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in given.items()
    }
    several |= {name: several[name][:1] for name in CHANGES_NOTHING if name in several}
    if find_largest_batch:
        several["per_device_train_batch_size"] = [1]
    found_gpus = [None if name is None else gpu_of_name(name) for name in dict.fromkeys(gpus)]
    problems = flag_problems(several, num_gpus, gpus_per_node)
    if find_largest_batch:
        problems += largest_batch_problems(given, strategies, found_gpus)
    if problems:
        raise all_of(problems)
    configs = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=True)
        for values in itertools.product(*several.values())
    ]
    specs = {name: model_to_estimate(name) for name in dict.fromkeys(config.model for config in configs)}
    problems = [
        problem
        for strategy in map(strategy_as_launched, strategies)
        for config in configs
        for problem in contradictions(strategy, config)
    ]
    problems += placement_problems(strategies, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    positions = [position_problem(specs[config.model], config.seq_len) for config in configs]
    problems += [problem for problem in positions if problem is not None]
    if problems:
        raise all_of(problems)

    needs, version = deepspeed_needs, ESTIMATOR_VERSION
    if live_deepspeed:
        needs, version = _live_deepspeed()
    placed = {
        count: [
            (strategy_as_launched(fitted), placement_of(fitted))
            for strategy in strategies
            for fitted in [fit_groups(strategy, num_ranks=count, ranks_per_node=min(count, gpus_per_node))]
        ]
        for count in num_gpus
    }
    rows: dict[tuple, Estimate] = {}
    for number, config in enumerate(configs):
        for gpu, count, index in itertools.product(found_gpus, num_gpus, range(len(strategies))):
            strategy, placement = placed[count][index]
            count = 1 if strategy.engine == "single" else count
            key = (number, gpu and gpu.name, count, index)
            if key in rows:
                continue
            estimate_of = partial(
                estimate,
                specs[config.model],
                strategy,
                placement,
                num_gpus=count,
                gpus_per_node=min(count, gpus_per_node),
                gpu=gpu,
                deepspeed_needs=needs,
                deepspeed_version=version,
                software=software,
                site=sites(gpu) if sites else None,
            )
            launched = config_as_launched(config, strategy)
            rows[key] = largest_batch(estimate_of, launched) if find_largest_batch else estimate_of(launched)
    return list(rows.values())


def _notes(strategies: list[Strategy], numerics: list[str]) -> list[str]:
    """Where a user's own file asks for something that the estimate does not follow."""
    found = []
    for strategy in strategies:
        in_bf16 = [name for name in numerics if name != "fp32"]
        if precision_asked(strategy) == "no" and in_bf16:
            found.append(
                f"{strategy.path}: mixed_precision no: --numerics {in_bf16[0]} is estimated for bf16"
            )
        fsdp = (strategy.accelerate_config or {}).get("fsdp_config") or {}
        policy = fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")  # accelerate's default
        if strategy.engine in ("fsdp1", "fsdp2") and policy != "TRANSFORMER_BASED_WRAP":
            found.append(f"{strategy.path}: fsdp_auto_wrap_policy {policy}: estimated with a unit per layer")
    return found


def _notes_on_models(given: dict[str, Any]) -> list[str]:
    """Where a model's own configuration has something that the estimate does not follow."""
    pairs = itertools.product(given.get("model", [None]), given.get("seq_len", [None]))
    configs = [
        RunConfig(model=model, seq_len=seq_len).with_defaults(has_gpu=True) for model, seq_len in pairs
    ]
    notes = [unlike_the_model(model_to_estimate(config.model), config.seq_len) for config in configs]
    return list(dict.fromkeys(itertools.chain.from_iterable(notes)))


def _live_deepspeed() -> tuple[Callable[..., Any], str]:
    from slm_toolkit.predict.deepspeed_estimator import deepspeed_version, live_deepspeed_needs

    version = deepspeed_version()
    if version is None:
        raise ValueError("--deepspeed live: DeepSpeed is not installed here\nhint: leave --deepspeed out")
    with redirect_stdout(sys.stderr):  # it greets on stdout, which is for results
        import_module("deepspeed.runtime.zero.stage3")
    return lru_cache(maxsize=None)(live_deepspeed_needs), version
