"""Setup: what follows from a model, a strategy and flags on certain GPUs."""

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy


def setup_of(strategy: str, *, num_gpus: int) -> Setup:
    return Setup(PRESETS["slm-100m"], find_strategy(strategy), RunConfig(), num_gpus=num_gpus)


def test_ranks_that_do_not_fill_nodes_are_the_same_number_on_each() -> None:
    twelve, twenty = setup_of("ddp", num_gpus=12), setup_of("ddp", num_gpus=20)
    assert (twelve.ranks_per_node, twelve.num_nodes) == (6, 2)
    assert (twenty.ranks_per_node, twenty.num_nodes) == (5, 4)


def test_a_launched_hybrid_shard_keeps_a_copy_per_node_or_two_on_one() -> None:
    assert setup_of("fsdp_hybrid_shard", num_gpus=16).launched.shard_ranks == 8
    assert setup_of("fsdp_hybrid_shard", num_gpus=8).launched.shard_ranks == 4
    assert setup_of("fsdp_full_shard", num_gpus=16).launched.shard_ranks == 16
