"""Hybrid shards and hpZ of our own files fitted to the ranks that run: the files name two by two."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slm_toolkit.strategy import Strategy, is_shipped

_COPIES, _SHARD = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"


def is_hybrid(strategy: Strategy) -> bool:
    """Whether FSDP2 keeps several copies of the training state, each sharded over some ranks."""
    return strategy.engine == "fsdp2" and _COPIES in _parallelism(strategy)


def fit_groups(strategy: Strategy, *, num_ranks: int, ranks_per_node: int) -> Strategy:
    """The strategy with groups of ranks that follow the nodes: a copy, or a second one, on each.

    Done for the shipped hybrid shard, which on one node keeps two copies, and for hpZ of size "auto"; a size
    in a user's own file is taken as it is. Raises ValueError for ranks that can't be divided so.
    """
    num_nodes = -(-num_ranks // ranks_per_node)
    if is_hybrid(strategy) and is_shipped(Path(strategy.path or "")):
        copies = num_nodes if num_nodes > 1 else 2
        shard, left = divmod(num_ranks, copies)
        if left or shard < 2:
            raise ValueError(
                f"{strategy.name} on {num_ranks} ranks: two copies or more, of at least two ranks each\n"
                "hint: an even number of ranks, at least 4"
            )
        sizes = {**_parallelism(strategy), _COPIES: copies, _SHARD: shard}
        config = {**strategy.accelerate_config, "parallelism_config": sizes}
        return dataclasses.replace(strategy, accelerate_config=config)
    zero = (strategy.deepspeed_config or {}).get("zero_optimization") or {}
    if zero.get("zero_hpz_partition_size") != "auto":
        return strategy
    zero = {**zero, "zero_hpz_partition_size": ranks_per_node}
    deepspeed = {**strategy.deepspeed_config, "zero_optimization": zero}
    return dataclasses.replace(strategy, deepspeed_config=deepspeed)


def group_options(strategy: Strategy) -> list[str]:
    """Words of `accelerate launch` that go before the groups of a hybrid shard's YAML; none for others."""
    return [word for name, size in group_sizes(strategy).items() for word in (f"--{name}", str(size))]


def group_sizes(strategy: Strategy) -> dict[str, int]:
    """Copies and ranks of a copy of a hybrid shard, by their names in the YAML; none of others."""
    sizes = _parallelism(strategy)
    return {name: sizes[name] for name in (_COPIES, _SHARD)} if is_hybrid(strategy) else {}


def with_group_options(strategy: Strategy, option: Callable[[str], str | bool | None]) -> Strategy:
    """The strategy with the groups that `option(name)` of its launch says, where it says any."""
    said = {name: int(size) for name in (_COPIES, _SHARD) if (size := option(name))}
    if not said:
        return strategy
    sizes = {**_parallelism(strategy), **said}
    config = {**strategy.accelerate_config, "parallelism_config": sizes}
    return dataclasses.replace(strategy, accelerate_config=config)


def _parallelism(strategy: Strategy) -> dict[str, Any]:
    return (strategy.accelerate_config or {}).get("parallelism_config") or {}
