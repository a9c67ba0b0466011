"""Bytes that a rank sends in a step: the papers' 2 M and 3 M, what changes them, and where they go.

2 M and 3 M: Rajbhandari et al., arXiv 1910.02054, section 7; ZeRO++'s 0.5 M + 0 + 0.25 M: DeepSpeed's
blogs/zeropp, after Wang et al., arXiv 2306.10209.
"""

from pathlib import Path

import pytest
from conftest import FSDP2, own_strategy

from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.setup.other_trainers import trainer_named
from slm_toolkit.strategy.strategy import find_strategy

P = 130_569_920  # parameters of slm-100m, as the paper prints them
M = 2 * P  # bytes in bf16
TWICE = ("ddp", "ds_zero1", "ds_zero2", "fsdp_shard_grad_op")
TIMES_M = {**dict.fromkeys(TWICE, 2), "ds_zero3": 3, "fsdp_full_shard": 3}
FSDP1_HYBRID = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"


def traffic(strategy: str, *, num_gpus: int = 8, gpus_per_node: int = 8, **given: object) -> dict[str, float]:
    nodes = {"num_gpus": [num_gpus], "gpus_per_node": gpus_per_node}
    nodes |= {"like": trainer_named(given.pop("like", None))}
    (row,) = estimates({"model": "slm-100m", **given}, [find_strategy(strategy)], gpus=[None], **nodes)
    return row.traffic_bytes


def sent(found: dict[str, float]) -> float:
    return sum(size for name, size in found.items() if name not in ("intra_node", "inter_node"))


def hybrid(folder: Path, *, copies: int, shards: int) -> str:
    key = "parallelism_config"
    sizes = f"{key}:\n  {key}_dp_replicate_size: {copies}\n  {key}_dp_shard_size: {shards}\n"
    return own_strategy(folder, FSDP2 + sizes, name="hybrid")


def zero_3(folder: Path, **more: object) -> str:
    return own_strategy(folder, "", {"zero_optimization": {"stage": 3, **more}}, name="zero")


@pytest.mark.parametrize("num_gpus", [2, 8, 64])
@pytest.mark.parametrize(("strategy", "times"), TIMES_M.items())
def test_a_step_sends_the_papers_multiple_of_the_model(strategy: str, times: int, num_gpus: int) -> None:
    expected = times * M * (num_gpus - 1) / num_gpus
    assert sent(traffic(strategy, num_gpus=num_gpus)) == pytest.approx(expected)


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
    unit = M * 7 / 8
    assert (gathers, found["reduce_gradients"]) == pytest.approx((gathered * unit, reduced * unit))


def test_a_hybrid_gathers_inside_a_node_and_reduces_shards_between_copies(tmp_path: Path) -> None:
    # 3 M x 7/8 over the eight of a node; then M / 8 of gradients over two nodes: 2 x 1/2 of it
    found = traffic(hybrid(tmp_path, copies=2, shards=8), num_gpus=16)
    assert (found["intra_node"], found["inter_node"]) == pytest.approx((3 * M * 7 / 8, M / 8))
    assert traffic(own_strategy(tmp_path, FSDP1_HYBRID), num_gpus=16) == found


def test_each_part_of_zero_plus_plus_saves_what_its_paper_says(tmp_path: Path) -> None:
    def of(**more: object) -> tuple[float, ...]:
        found = traffic(zero_3(tmp_path, **more), num_gpus=16)
        crossing = found["inter_node"] * 8 / (15 / 16)  # one rank of eight sends out
        names = ("gather_forward", "gather_backward", "reduce_gradients")
        return (*(found[name] / M for name in names), crossing / M)

    r = 15 / 16
    assert of() == pytest.approx((r, r, r, 3))
    assert of(zero_quantized_weights=True) == pytest.approx((r / 2, r / 2, r, 2))
    assert of(zero_quantized_gradients=True) == pytest.approx((r, r, r / 4, 2.25))
    assert of(zero_hpz_partition_size=8) == pytest.approx((r, 7 / 8, r, 2))  # over the eight of a node
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert of(zero_hpz_partition_size=8, **both) == pytest.approx((r / 2, 7 / 8, r / 4, 0.75))
