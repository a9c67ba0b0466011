"""Which shardings an estimate covers: all but ZeRO-0, FSDP1 without shards, and copies without shards.

Offload, hybrid shards and hpZ are hypotheses: read off the engines' code, not measured.
"""

from slm_toolkit.strategy.groups import check_groups
from slm_toolkit.strategy.settings import FSDP1_SHARDING_STRATEGIES
from slm_toolkit.strategy.sharding import Sharding
from slm_toolkit.strategy.strategy import Strategy


def placement_of(strategy: Strategy) -> Sharding:
    """The strategy's sharding. Raises ValueError for one that no estimate covers."""
    if strategy.zero_stage == 0:
        raise ValueError(
            f"{strategy.path}: no estimate of ZeRO stage 0\nhint: stages 1 to 3; ddp shards nothing"
        )
    if strategy.is_fsdp1:
        supported = [name for name in FSDP1_SHARDING_STRATEGIES if name != "NO_SHARD"]
        if (name := strategy.fsdp.sharding_strategy) not in supported:
            raise ValueError(
                f"{strategy.path}: fsdp_sharding_strategy is {name!r}\n"
                f"hint: one of {', '.join(supported)}; without shards it is MULTI_GPU"
            )
    if strategy.is_fsdp2:
        check_groups(strategy)
        copies = strategy.parallel_sizes["dp_replicate_size"]
        if copies > 1 and strategy.sharding.copy_ranks is None:
            raise ValueError(
                f"{strategy.path}: parallelism_config: dp_replicate_size {copies} without shards\n"
                "hint: that is MULTI_GPU"
            )
    return strategy.sharding
