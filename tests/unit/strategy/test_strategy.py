"""Reading accelerate YAMLs and DeepSpeed JSONs."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import own_strategy, slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.strategy.checked_run import checked_run, contradictions
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    config_dir,
    copy_configs,
    find_strategy,
    read_strategy,
    shipped_strategies,
    write_resolved,
)


def own_json(folder: Path, content: dict) -> str:
    (folder / "mine.json").write_text(json.dumps(content))
    return str(folder / "mine.json")


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
    found = (strategy.engine, strategy.zero_stage, strategy.reshard_after_forward)
    assert found == (engine, zero_stage, reshard)
    of_two_nodes = ("fsdp_hybrid_shard", "ds_zeropp", "ds_zeropp_quantized")
    assert strategy.num_processes == (1 if name == "single" else 4 if name in of_two_nodes else 2)
    assert strategy.offloads == name.endswith(("_offload", "_nvme"))


def test_no_version_key_means_fsdp1(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    assert find_strategy(own_strategy(tmp_path, text)).engine == "fsdp1"


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
    own = own_strategy(tmp_path, "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    config = yaml.safe_load(write_resolved(find_strategy(own), tmp_path / "launch", 2).read_text())
    assert config == {"distributed_type": "MULTI_GPU", "use_cpu": True, "num_processes": 2}


JSON = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "is not YAML at line"),
        ("- a\n- b\n", "contains no settings"),
        ("distributed_type: TPU\n", "not supported"),
        ("distributed_type: MULTI_GPU\nnum_processes: 0\n", "num_processes is 0"),
        ("distributed_type: MULTI_GPU\nhub_token: hf_abcdefgh\n", "is a secret"),
        ("distributed_type: FSDP\nfsdp_config: yes please\n", "fsdp_config is"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7\n", "zero_optimization.stage"),
        (JSON.replace("mine", "nowhere"), "nowhere.json"),
        (JSON + "  zero_stage: 2\n", "zero_stage 2 contradicts mine.json, where .*stage is 3"),
        (JSON + "mixed_precision: bf16\n", "mixed_precision 'bf16' together with mine.json"),
        ("model_type: llama\n", "it describes a model"),
    ],
)
def test_a_yaml_that_makes_no_sense_is_an_error_with_a_hint(tmp_path: Path, text: str, says: str) -> None:
    own_json(tmp_path, {"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match=says) as error:
        find_strategy(own_strategy(tmp_path, text))
    assert "hint:" in str(error.value)


ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
BATCH_AND_BF16 = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (BATCH_AND_BF16, {"per_device_train_batch_size": 8}, []),
        (
            BATCH_AND_BF16,
            {"per_device_train_batch_size": 4, "numerics": "fp32"},
            ["per_gpu 8, --per_device_train_batch_size says 4", "bf16.enabled true, --numerics fp32"],
        ),
        ({"compile": {"deepcompile": True}}, {}, ["compile.deepcompile: DeepCompile"]),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, ["autotp_size: slm_toolkit does not run tensor"]),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, {}, ["zenflow: ZenFlow applies most"]),
        ({"zero_optimization": ON_HOST}, {}, ["slm_toolkit does not run SuperOffload"]),
        ({"zero_optimization": {"stage": 2, "zenflow": None, "offload_optimizer": None}}, {}, []),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, []),
        ({"optimizer": {"type": "Lamb"}}, {}, ["optimizer is Lamb: remove it"]),
        ({"optimizer": {"type": "AdamW"}}, {"numerics": "stock"}, ["remove it"]),
        ({"fp16": {"enabled": True}}, {}, ["use --numerics fp16"]),
    ],
)
def test_a_json_that_contradicts_the_flags_or_is_not_run_is_named(
    tmp_path: Path, content: dict, flags: dict, says: list[str]
) -> None:
    strategy = find_strategy(own_json(tmp_path, {"zero_optimization": {"stage": 2}, **content}))
    config = RunConfig(**{"per_device_train_batch_size": 8, **flags})
    for problem, word in zip(contradictions(strategy, config), says, strict=True):
        assert word in problem


def test_a_part_that_is_not_run_is_refused_by_estimates_too(tmp_path: Path) -> None:
    file = own_json(tmp_path, {"zero_optimization": {"stage": 2, "zenflow": {}}})
    done = slm_here("estimate", "--model", "slm-1m", "--strategy", file)
    assert (done.code, "ZenFlow" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixed_precision": False}, "write 'no' in quotes"),
        ({"mixed_precision": "half"}, "mixed_precision is half"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "use --kernels compiled"),
        ({"zero_optimization": {"stage": 3}}, "the model can't be saved"),
        ({"fsdp_config": {"fsdp_version": 2, "log_dir": "/x"}}, "log_dir is not a known key of fsdp_config"),
    ],
)
def test_what_would_fail_after_the_launch_is_refused_before(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    if "zero_optimization" in change:
        file = own_json(tmp_path, change)
    else:
        shipped = find_strategy("fsdp_full_shard").accelerate_config
        file = own_strategy(tmp_path, yaml.safe_dump({**shipped, **change}))
    config = RunConfig(save_final_model="true").with_defaults(has_gpu=True)
    with pytest.raises(ValueError, match=says):
        checked_run(config, PRESETS["slm-1m"], find_strategy(file), num_ranks=2)


def test_a_checked_run_has_no_optimizer_of_the_json_and_says_so(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}, "scheduler": {}}
    strategy = find_strategy(own_json(tmp_path, content))
    config = RunConfig().with_defaults(has_gpu=True)
    checked = checked_run(config, PRESETS["slm-1m"], strategy, num_ranks=2)
    assert checked.strategy.deepspeed_config == {"zero_optimization": {"stage": 2}}
    assert checked.taken_out.startswith("note: removed from mine.json: optimizer and scheduler")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kernels": "compiled"}, "can't be compiled"),
        ({"packing": "none"}, "needs documents"),
        ({"peft": "qlora"}, "can't be quantized"),
        ({}, "are all on the CPU"),
    ],
)
def test_a_rehearsal_without_a_gpu_has_no_tensors_for_all(flags: dict, says: str) -> None:
    offloading, config = find_strategy("ds_zero2_offload"), RunConfig(rehearse=4, **flags)
    assert any(says in problem for problem in contradictions(offloading, config, has_gpu=False))
    assert not any("rehearse" in problem for problem in contradictions(offloading, config, has_gpu=True))


def test_copy_writes_both_folders_and_overwrites_nothing(tmp_path: Path) -> None:
    paths = copy_configs(tmp_path)
    jsons = list(config_dir("ds_configs").glob("*.json"))
    assert len(paths) == len(shipped_strategies()) + len(jsons)
    assert read_strategy(tmp_path / "accel_configs" / "ds_zero1.yaml").zero_stage == 1
    with pytest.raises(ValueError, match="exists"):
        copy_configs(tmp_path)


def test_default_strategies_that_can_t_take_the_flags_are_left_out_and_named_ones_refused() -> None:
    words = ("estimate", "--model", "slm-1b", "--gpu", "rtx-4090", "--num_gpus", "2", "--peft", "qlora")
    done = slm_here(*words, "--json")
    kept = [name for name in STUDIED_STRATEGIES if name != "ds_zero3"]
    assert [row["strategy"] for row in json.loads(done.out)] == kept
    assert "left out: ds_zero3: --peft qlora: ZeRO-3 cuts weights apart" in done.err
    done = slm_here(*words, "--strategy", "ddp", "ds_zero3")
    assert (done.code, "ZeRO-3 cuts weights apart" in done.err) == (2, True)
