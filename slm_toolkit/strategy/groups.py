"""Fit the groups of ranks of the shipped YAMLs to a launch; the default strategies of a command."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slm_toolkit.config.flags import every_config
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.settings import PARALLEL_SIZES, PREFIX
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    Strategy,
    find_strategy,
    is_shipped,
    notes_on,
    shipped_strategies,
)

_COPIES, _SHARD = f"{PREFIX}dp_replicate_size", f"{PREFIX}dp_shard_size"


def ranks_of_each_node(num_ranks: int, most: int) -> int:
    """Return the ranks on each node, the same on all, because `accelerate launch` starts equal parts.

    Nodes have at most `most` ranks: 12 ranks on nodes of 8 are two nodes of 6. Raises ValueError if equal
    parts would leave more than half of every node idle.
    """
    if num_ranks <= most:
        return num_ranks
    ranks = next(size for size in range(most, 0, -1) if num_ranks % size == 0)
    if 2 * ranks < most:
        raise ValueError(
            f"{num_ranks} GPUs can't be the same number on each node of up to {most}: use full nodes, such "
            f"as {num_ranks // most * most} or {-(-num_ranks // most) * most}"
        )
    return ranks


def fit_groups(strategy: Strategy, *, num_ranks: int, ranks_per_node: int) -> Strategy:
    """Return the strategy with its groups of ranks fitted to the nodes: one copy per node.

    This changes the shipped hybrid shard (two copies on a single node) and hpZ with size "auto" (the second
    copy of the parameters). Sizes in a user's own file stay. Raises ValueError if the ranks can't be divided.
    """
    num_nodes = -(-num_ranks // ranks_per_node)
    if strategy.sharding.is_hybrid and is_shipped(Path(strategy.path or "")):
        copies = num_nodes if num_nodes > 1 else 2
        shard, left = divmod(num_ranks, copies)
        if left or shard < 2:
            raise ValueError(
                f"{strategy.name} on {num_ranks} ranks: two or more copies need at least two ranks each\n"
                "hint: use an even number of ranks, at least 4"
            )
        return _with_sizes(strategy, {_COPIES: copies, _SHARD: shard})
    if strategy.deepspeed is None or strategy.deepspeed.zero_optimization.zero_hpz_partition_size != "auto":
        return strategy
    zero = {**strategy.deepspeed_config["zero_optimization"], "zero_hpz_partition_size": ranks_per_node}
    deepspeed = {**strategy.deepspeed_config, "zero_optimization": zero}
    return dataclasses.replace(strategy, deepspeed_config=deepspeed)


def group_options(strategy: Strategy) -> list[str]:
    """Return the options of `accelerate launch` that override the groups of a hybrid shard's YAML."""
    return [word for name, size in group_sizes(strategy).items() for word in (f"--{name}", str(size))]


def group_sizes(strategy: Strategy) -> dict[str, int]:
    """Return a hybrid shard's number of copies and ranks per copy, by YAML key; else an empty dict."""
    sharding = strategy.sharding
    return {_COPIES: sharding.num_copies, _SHARD: sharding.copy_ranks} if sharding.is_hybrid else {}


def with_group_options(strategy: Strategy, option: Callable[[str], str | bool | None]) -> Strategy:
    """Return the strategy with the group sizes that `option(name)` returns from its launch command."""
    sizes = {PREFIX + name: int(size) for name in PARALLEL_SIZES if (size := option(PREFIX + name))}
    return _with_sizes(strategy, sizes) if sizes else strategy


def _with_sizes(strategy: Strategy, sizes: Mapping[str, int]) -> Strategy:
    """Return the strategy with these sizes in its YAML's parallelism_config."""
    section = {**((strategy.accelerate_config or {}).get("parallelism_config") or {}), **sizes}
    config = {**(strategy.accelerate_config or {}), "parallelism_config": section}
    return dataclasses.replace(strategy, accelerate_config=config)


# The default strategies of a command.


def help_of_strategies() -> str:
    """Return the help text of a `--strategy` flag that `strategies_asked` reads."""
    shipped, default = ", ".join(shipped_strategies()), ", ".join(STUDIED_STRATEGIES)
    return f"{shipped}, an accelerate YAML or a DeepSpeed JSON (default: {default})"


def strategies_asked(
    names: list[str] | None, given: dict[str, Any], *, has_gpu: bool
) -> tuple[list[Strategy], list[str]]:
    """Return the strategies that `--strategy` names (default: the six), and notes for the user.

    The notes name default strategies that the flags exclude, and DeepSpeed JSONs that get a generated YAML.
    `given` maps a field name of RunConfig to a value or a list of values. No flag
    excludes DDP.
    """
    if names is not None:
        named = [find_strategy(name) for name in dict.fromkeys(names)]
        return named, notes_on(named)
    configs = [config.with_defaults(has_gpu=has_gpu) for config in every_config(given)]
    kept, left_out = [], []
    for strategy in map(find_strategy, STUDIED_STRATEGIES):
        named = dataclasses.replace(strategy, path=None)  # the user named no file
        if problems := [problem for config in configs for problem in contradictions(named, config)]:
            left_out.append(f"left out: {problems[0]}")
        else:
            kept.append(strategy)
    return kept, left_out
