"""Groups of ranks: the sizes of accelerate's ParallelismConfig, and those of our own files for a launch."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slm_toolkit.strategy.strategy import Strategy, is_shipped

PREFIX = "parallelism_config_"
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
"of accelerate 1.15's ParallelismConfig, which multiplies them: the product is the number of ranks"
_COPIES, _SHARD = f"{PREFIX}dp_replicate_size", f"{PREFIX}dp_shard_size"
_NOT_YET = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
}


def parallel_sizes(section: Mapping[str, Any]) -> dict[str, int]:
    """The five sizes of a `parallelism_config`; 1, accelerate's default, where it names none."""
    return {name: section.get(PREFIX + name) or 1 for name in PARALLEL_SIZES}


def product_problem(sizes: Mapping[str, int], num_ranks: int) -> str | None:
    """Where sizes don't multiply to the number of ranks: `dp_shard_size 4 x tp_size 2 with 6 ranks`.

    accelerate 1.15 takes sizes of 1 for no groups, and leaves the count to DeepSpeed for sp_size above 1.
    """
    if math.prod(sizes.values()) in (1, num_ranks) or sizes.get("sp_size", 1) > 1:
        return None
    return f"{shown_sizes(sizes)} with {num_ranks} ranks"


def shown_sizes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def parallel_problems(strategy: Strategy, *, num_ranks: int | None = None) -> list[str]:
    """Why slm_toolkit can't run a strategy's `parallelism_config`; `num_ranks` checks the product."""
    section = _parallelism(strategy)
    where = f"{strategy.path or strategy.name}: parallelism_config"
    found = [
        f"{where}.{name}: accelerate does not read it: write {PREFIX}{name}"
        for name in section
        if not name.startswith(PREFIX)
    ]
    sizes = parallel_sizes(section)
    found += [f"{where}: {sentence}" for sentence in not_run_yet(sizes)]
    own = strategy.path is not None and not is_shipped(Path(strategy.path))  # ours are fitted to the ranks
    if num_ranks is not None and own and strategy.engine == "fsdp2":
        problem = product_problem(sizes, num_ranks)
        found += [f"{where}: {problem}: the product must be the number of ranks"] if problem else []
    return found


def check_groups(strategy: Strategy, *, num_ranks: int | None = None) -> None:
    """Raises ValueError with all `parallel_problems`."""
    if problems := parallel_problems(strategy, num_ranks=num_ranks):
        raise ValueError("\n".join(problems) + "\nhint: dp_replicate_size and dp_shard_size only")


def not_run_yet(sizes: Mapping[str, int]) -> list[str]:
    """Sizes of ways to parallelize that slm_toolkit neither trains nor estimates."""
    return [
        f"{name} {sizes[name]}: slm_toolkit does not run {kind} yet"
        for name, kind in _NOT_YET.items()
        if sizes.get(name, 1) > 1
    ]


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
    said = {PREFIX + name: int(size) for name in PARALLEL_SIZES if (size := option(PREFIX + name))}
    if not said:
        return strategy
    sizes = {**_parallelism(strategy), **said}
    config = {**strategy.accelerate_config, "parallelism_config": sizes}
    return dataclasses.replace(strategy, accelerate_config=config)


def _parallelism(strategy: Strategy) -> dict[str, Any]:
    return (strategy.accelerate_config or {}).get("parallelism_config") or {}
