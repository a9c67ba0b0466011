"""Reading accelerate YAMLs and DeepSpeed JSONs."""

import json
from pathlib import Path

import pytest
import yaml

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.strategy.checked_run import checked_run, contradictions
from slm_toolkit.strategy.strategy import (
    Strategy,
    config_dir,
    copy_configs,
    find_strategy,
    read_strategy,
    shipped_strategies,
    write_resolved,
)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "engine", "zero_stage", "reshard"),
    [
        ("single", "single", None, None),
        ("ddp", "ddp", None, None),
        ("fsdp_full_shard", "fsdp2", None, True),
        ("fsdp_shard_grad_op", "fsdp2", None, False),
        ("ds_zero1", "deepspeed", 1, None),
        ("ds_zero2", "deepspeed", 2, None),
        ("ds_zero3", "deepspeed", 3, None),
        ("fsdp_full_shard_offload", "fsdp2", None, True),
        ("fsdp_hybrid_shard", "fsdp2", None, True),
        ("ds_zero2_offload", "deepspeed", 2, None),
        ("ds_zero3_offload", "deepspeed", 3, None),
        ("ds_zero3_nvme", "deepspeed", 3, None),
        ("ds_zeropp", "deepspeed", 3, None),
        ("ds_zeropp_quantized", "deepspeed", 3, None),
    ],
)
def test_a_shipped_yaml_means_what_its_name_says(
    name: str, engine: str, zero_stage: int | None, reshard: bool | None
) -> None:
    strategy = find_strategy(name)
    assert (strategy.engine, strategy.zero_stage, strategy.reshard_after_forward) == (
        engine,
        zero_stage,
        reshard,
    )
    of_two_nodes = ("fsdp_hybrid_shard", "ds_zeropp", "ds_zeropp_quantized")
    assert strategy.num_processes == (1 if name == "single" else 4 if name in of_two_nodes else 2)
    assert strategy.offloads == name.endswith(("_offload", "_nvme"))


def test_every_key_of_a_shipped_yaml_is_annotated_on_its_line() -> None:
    for path in config_dir("accel_configs").glob("*.yaml"):
        first, *lines = path.read_text().splitlines()
        assert first.startswith("# "), f"{path.name} does not say what it is"
        assert [line for line in lines if "#" not in line] == [], path.name


def test_the_jsons_leave_to_the_flags_what_the_flags_decide() -> None:
    for path in config_dir("ds_configs").glob("*.json"):
        config = json.loads(path.read_text())
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
            assert config[key] == "auto", f"{path.name}: {key}"
        assert config["bf16"]["enabled"] == "auto"


def test_no_version_key_means_fsdp1(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    assert read_strategy(write(tmp_path, text)).engine == "fsdp1"


def test_a_resolved_copy_holds_absolute_paths_and_the_number_asked_for(tmp_path: Path) -> None:
    path = write_resolved(find_strategy("ds_zero3"), tmp_path / "launch", 4)
    config = yaml.safe_load(path.read_text())
    json_path = Path(config["deepspeed_config"]["deepspeed_config_file"])
    assert config["num_processes"] == 4
    assert json_path.is_absolute()
    assert json.loads(json_path.read_text())["zero_optimization"]["stage"] == 3
    assert read_strategy(path).deepspeed_config == find_strategy("ds_zero3").deepspeed_config


def test_a_yaml_of_multi_cpu_is_launched_with_all_its_processes(tmp_path: Path) -> None:
    """For MULTI_CPU without mpirun, accelerate starts one process, whatever num_processes says."""
    own = read_strategy(write(tmp_path, "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"))
    config = yaml.safe_load(write_resolved(own, tmp_path / "launch", 2).read_text())
    assert config == {"distributed_type": "MULTI_GPU", "use_cpu": True, "num_processes": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "is not YAML at line"),
        ("- a\n- b\n", "contains no settings"),
        ("distributed_type: TPU\n", "not supported"),
        ("distributed_type: MULTI_GPU\nnum_processes: 0\n", "num_processes is 0"),
        ("distributed_type: FSDP\nfsdp_config: yes please\n", "fsdp_config is"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: nowhere.json\n",
            "nowhere.json",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7\n", "ZeRO stage is 7"),
    ],
)
def test_a_yaml_that_makes_no_sense_is_an_error_with_a_hint(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        read_strategy(write(tmp_path, text))
    assert "hint:" in str(error.value)


def test_a_setting_beside_a_json_is_refused_with_all_its_company(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"zero_optimization": {"stage": 3}}), "mine.json")
    text = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  deepspeed_config_file: mine.json\n  zero_stage: 2\n  gradient_clipping: 1.0\n"
    )
    with pytest.raises(ValueError, match="zero_stage 2 contradicts mine.json, where .*stage is 3") as error:
        read_strategy(write(tmp_path, text))
    assert "gradient_clipping" in str(error.value)
    assert "mixed_precision 'bf16'" in str(error.value)


def test_a_json_that_contradicts_the_flags_is_named_with_both_values(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
    }
    write(tmp_path, json.dumps(config), "mine.json")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
    strategy = read_strategy(write(tmp_path, text))
    assert contradictions(strategy, RunConfig(per_device_train_batch_size=8)) == []
    batch, precision = contradictions(strategy, RunConfig(per_device_train_batch_size=4, numerics="fp32"))
    assert "train_micro_batch_size_per_gpu 8" in batch
    assert "--per_device_train_batch_size says 4" in batch
    assert "bf16.enabled true" in precision


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixed_precision": False}, "mixed_precision: no is false in YAML"),
        ({"mixed_precision": "half"}, "mixed_precision is half"),
        ({"gpu_ids": 0}, "gpu_ids is no text"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "use --kernels compiled"),
        ({"zero_optimization": {"stage": 3}}, "the model can't be saved"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "without an nvme_path"),
    ],
)
def test_what_would_fail_after_the_launch_is_refused_before(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    if "zero_optimization" in change:
        strategy = find_strategy(str(write(tmp_path, json.dumps(change), "mine.json")))
    else:
        shipped = yaml.safe_load((config_dir("accel_configs") / "fsdp_full_shard.yaml").read_text())
        strategy = find_strategy(str(write(tmp_path, yaml.safe_dump(shipped | change))))
    config = RunConfig(save_final_model="true").with_defaults(has_gpu=True)
    with pytest.raises(ValueError, match=says):
        checked_run(config, PRESETS["slm-1m"], strategy, num_ranks=2)


def test_copy_writes_both_folders_and_overwrites_nothing(tmp_path: Path) -> None:
    paths = copy_configs(tmp_path)
    assert {path.parent.name for path in paths} == {"accel_configs", "ds_configs"}
    jsons = list(config_dir("ds_configs").glob("*.json"))
    assert len(paths) == len(shipped_strategies()) + len(jsons)
    assert read_strategy(tmp_path / "accel_configs" / "ds_zero1.yaml").zero_stage == 1
    with pytest.raises(ValueError, match="exists"):
        copy_configs(tmp_path)


def test_flags_exclude_strategies_by_properties_that_there_are() -> None:
    rules = [rule for flag in FLAGS.values() for rule in flag.excludes_strategies]
    assert rules
    for name in shipped_strategies():
        assert {type(getattr(find_strategy(name), rule.property)) for rule in rules} == {bool}


def test_a_reason_against_two_flags_is_given_once() -> None:
    config = RunConfig(save_steps=5, resume_from_checkpoint="auto")
    (problem,) = contradictions(Strategy("mine", "deepspeed", 2, zero_stage=0), config)
    assert problem == "mine: no checkpoints under ZeRO-0, which shards nothing: use DDP"


def test_tritons_adamw_is_the_step_where_the_engine_leaves_the_step_to_us() -> None:
    config = RunConfig(kernels="triton")
    found = {name for name in shipped_strategies() if config.has_triton_adamw(find_strategy(name))}
    # DeepSpeed casts and clips by itself, and offload's optimizer runs on the CPU
    assert found == {"single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_hybrid_shard"}
