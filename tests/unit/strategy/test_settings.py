"""Settings of YAMLs and DeepSpeed JSONs as values: defaults, "auto", and content that is replaced."""

import dataclasses
from pathlib import Path

import pytest

from slm_toolkit.strategy.settings import Sharding, ZeroSettings, deepspeed_settings, fsdp_settings
from slm_toolkit.strategy.strategy import find_strategy, on_nodes, read_strategy


def zero(**section: object) -> ZeroSettings:
    return deepspeed_settings({"zero_optimization": section}, stage=3).zero_optimization


def test_overlap_comm_is_on_by_default_for_stage_3_alone() -> None:
    on = [deepspeed_settings({}, stage=stage).zero_optimization.overlaps for stage in (0, 1, 2, 3)]
    assert on == [False, False, False, True]  # deepspeed 0.19, runtime/zero/config.py, overlap_comm_valid
    assert not zero(overlap_comm=False).overlaps


def test_null_in_a_json_is_deepspeeds_default() -> None:
    nothing = zero(reduce_bucket_size=None, overlap_comm=None, offload_optimizer=None, sub_group_size=None)
    assert nothing == zero()


def test_sizes_that_are_auto_follow_the_width_of_the_model() -> None:
    settings = zero(reduce_bucket_size="auto", stage3_param_persistence_threshold="auto")
    filled_in = settings.of_width(100)  # accelerate 1.15, Accelerator._prepare_deepspeed
    assert filled_in.reduce_bucket_size == 100 * 100
    assert filled_in.stage3_param_persistence_threshold == 10 * 100
    assert zero(reduce_bucket_size=5e7).of_width(100).reduce_bucket_size == 50_000_000


@pytest.mark.parametrize("value", [float("inf"), "many", [], True, "auto"])
def test_a_value_that_deepspeed_refuses_counts_as_absent(value: object) -> None:
    assert zero(sub_group_size=value) == zero()


@pytest.mark.parametrize(
    ("section", "name", "reshards"),
    [
        ({}, "FULL_SHARD", True),
        ({"fsdp_sharding_strategy": 2}, "SHARD_GRAD_OP", False),
        ({"fsdp_sharding_strategy": "hybrid_shard_zero2"}, "HYBRID_SHARD_ZERO2", False),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP", False),
    ],
)
def test_fsdp1_shards_by_torchs_name_or_number(section: dict[str, object], name: str, reshards: bool) -> None:
    settings = fsdp_settings(section)
    assert (settings.sharding_strategy, settings.reshards) == (name, reshards)


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("fsdp_full_shard_offload", Sharding(optimizer_device="cpu", parameter_device="cpu")),
        ("fsdp_hybrid_shard", Sharding(copy_ranks=2, num_copies=2)),
        ("ds_zero3_nvme", Sharding(optimizer_device="nvme", parameter_device="nvme")),
    ],
)
def test_the_sharding_of_a_shipped_yaml(name: str, sharding: Sharding) -> None:
    assert find_strategy(name).sharding == sharding


def test_zero_3_builds_the_model_in_pieces_unless_its_yaml_refuses(tmp_path: Path) -> None:
    """accelerate 1.15, DeepSpeedPlugin.__post_init__: zero3_init_flag defaults to `is_zero3()`."""
    for flag, in_pieces in (("", True), ("  zero3_init_flag: false\n", False)):
        yaml = tmp_path / "mine.yaml"
        yaml.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n{flag}")
        assert read_strategy(yaml).sharding.zero_init is in_pieces


def test_other_content_makes_other_values() -> None:
    """The values are those of the content, however a Strategy was made."""
    zero3 = find_strategy("ds_zero3")
    assert zero3.deepspeed.zero_optimization.offload_optimizer.device == "none"
    section = {**zero3.deepspeed_config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    offloading = dataclasses.replace(zero3, deepspeed_config={"zero_optimization": section})
    assert (offloading.sharding.optimizer_device, offloading.offloads) == ("cpu", True)
    assert on_nodes(zero3, 4).num_machines == 4
