"""Setup: what follows from a model, a strategy and flags on certain GPUs."""

import pytest

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.memory.machine import PROCESS_BYTES, host_bytes
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

P = 130_569_920  # of slm-100m, whose vocabulary matrices have 32,000 x 832 parameters


def setup_of(strategy: str, *, num_gpus: int, **flags: object) -> Setup:
    config = RunConfig(**{"per_device_train_batch_size": 4, "seq_len": 1024, **flags})
    return Setup(PRESETS["slm-100m"], find_strategy(strategy), config, num_gpus=num_gpus)


def test_ranks_that_do_not_fill_nodes_are_the_same_number_on_each() -> None:
    twelve, twenty = setup_of("ddp", num_gpus=12), setup_of("ddp", num_gpus=20)
    assert (twelve.ranks_per_node, twelve.num_nodes) == (6, 2)
    assert (twenty.ranks_per_node, twenty.num_nodes) == (5, 4)
    with pytest.raises(ValueError, match="use full nodes, such as 8 or 16"):
        _ = setup_of("ddp", num_gpus=13).ranks_per_node


def test_a_launched_hybrid_shard_keeps_a_copy_per_node_or_two_on_one() -> None:
    assert setup_of("fsdp_hybrid_shard", num_gpus=16).launched.shard_ranks == 8
    assert setup_of("fsdp_hybrid_shard", num_gpus=8).launched.shard_ranks == 4
    assert setup_of("fsdp_full_shard", num_gpus=16).launched.shard_ranks == 16


def test_host_bytes_can_assume_zero_init() -> None:
    setup = setup_of("ddp", num_gpus=8)
    # every rank builds all of it in fp32; in pieces of the largest layer, but for rank 0, which draws it
    assert host_bytes(setup) == 8 * (PROCESS_BYTES + 4 * P)
    assert host_bytes(setup, zero_init=True) == 8 * (PROCESS_BYTES + 4 * 32_000 * 832) + 4 * P
