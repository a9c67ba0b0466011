"""Bytes that a rank sends in a step: the papers' 2 M and 3 M, what changes them, and where they go.

2 M and 3 M: Rajbhandari et al., arXiv 1910.02054, section 7; ZeRO++'s 0.5 M + 0 + 0.25 M: DeepSpeed's
blogs/zeropp, after Wang et al., arXiv 2306.10209.
"""

from pathlib import Path

import pytest
from conftest import FSDP2, own_strategy

from slm_toolkit.predict.grid import estimates
from slm_toolkit.strategy.strategy import find_strategy

P = 130_569_920  # parameters of slm-100m, as the paper prints them
M = 2 * P  # bytes in bf16
TWICE = ("ddp", "ds_zero1", "ds_zero2", "fsdp_shard_grad_op")
TIMES_M = {**dict.fromkeys(TWICE, 2), "ds_zero3": 3, "fsdp_full_shard": 3}
FSDP1_HYBRID = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"


def traffic(strategy: str, *, num_gpus: int = 8, **given: object) -> dict[str, float]:
    given = {"model": "slm-100m", **given}
    (row,) = estimates(given, [find_strategy(strategy)], gpus=[None], num_gpus=[num_gpus])
    return row.traffic_bytes


@pytest.mark.parametrize("num_gpus", [2, 8, 64])
@pytest.mark.parametrize(("strategy", "times"), TIMES_M.items())
def test_a_step_sends_the_papers_multiple_of_the_model(strategy: str, times: int, num_gpus: int) -> None:
    found = traffic(strategy, num_gpus=num_gpus)
    sent = sum(size for name, size in found.items() if not name.endswith("_node"))
    assert sent == pytest.approx(times * M * (num_gpus - 1) / num_gpus)


HIDDEN = 77_306_112  # slm-100m: 9 layers of 4 x 832 x 832 and 3 x 832 x 2332


@pytest.mark.parametrize(
    ("strategy", "exchanged"),
    [
        ("ddp", 2 * HIDDEN * 7 / 8),  # every update to every rank, in bf16
        # each rank's eighth to the owners, and back
        ("fsdp_full_shard", 2 * 2 * HIDDEN / 8 * 7 / 8),
    ],
)
def test_muon_sends_updates_to_where_matrices_are_whole(strategy: str, exchanged: float) -> None:
    plain, found = traffic(strategy), traffic(strategy, optim="muon")
    assert found.pop("exchange_updates") == pytest.approx(exchanged)
    assert {**plain, "intra_node": 0} == {**found, "intra_node": 0}


@pytest.mark.parametrize(
    ("strategy", "gathered", "reduced"),  # in M x 7/8; all_reduce counts twice; one micro-step: TIMES_M
    [
        *[("ddp", 0, 2), ("ds_zero1", 1, 1), ("ds_zero2", 1, 4), ("ds_zero3", 8, 4)],
        *[("fsdp_full_shard", 8, 1), ("fsdp_shard_grad_op", 4, 1)],
    ],
)
def test_four_micro_steps_repeat_only_what_the_engine_does_in_each(
    strategy: str, gathered: int, reduced: int
) -> None:
    found = traffic(strategy, gradient_accumulation_steps=4)
    gathers = sum(size for name, size in found.items() if name.startswith("gather"))
    assert gathers == pytest.approx(gathered * M * 7 / 8)
    assert found["reduce_gradients"] == pytest.approx(reduced * M * 7 / 8)


def test_a_hybrid_gathers_inside_a_node_and_reduces_shards_between_copies(tmp_path: Path) -> None:
    # 3 M x 7/8 over the eight of a node; then M / 8 of gradients over two nodes: 2 x 1/2 of it
    key = "parallelism_config"
    sizes = f"{key}:\n  {key}_dp_replicate_size: 2\n  {key}_dp_shard_size: 8\n"
    found = traffic(own_strategy(tmp_path, FSDP2 + sizes), num_gpus=16)
    assert (found["intra_node"], found["inter_node"]) == pytest.approx((3 * M * 7 / 8, M / 8))
    assert traffic(own_strategy(tmp_path, FSDP1_HYBRID), num_gpus=16) == found


R = 15 / 16
GRADIENTS, WEIGHTS, SECONDARY = (
    {"zero_quantized_gradients": True},
    {"zero_quantized_weights": True},
    {"zero_hpz_partition_size": 8},
)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (R, R, R, 3)),
        (WEIGHTS, (R / 2, R / 2, R, 2)),
        (GRADIENTS, (R, R, R / 4, 2.25)),
        (SECONDARY, (R, 7 / 8, R, 2)),  # over the eight of a node
        (WEIGHTS | GRADIENTS | SECONDARY, (R / 2, 7 / 8, R / 4, 0.75)),
    ],
)
def test_each_part_of_zero_plus_plus_saves_what_its_paper_says(
    more: dict, expected: tuple[float, ...], tmp_path: Path
) -> None:
    own = own_strategy(tmp_path, "", {"zero_optimization": {"stage": 3, **more}})
    found = traffic(own, num_gpus=16)
    parts = [found[name] for name in ("gather_forward", "gather_backward", "reduce_gradients")]
    crossing = found["inter_node"] * 8 / R  # one rank of eight sends out
    assert [*parts, crossing] == pytest.approx([M * times for times in expected])
