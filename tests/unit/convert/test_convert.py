"""Accelerate YAMLs and DeepSpeed JSONs turned into one another, key by key."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import DEEPSPEED, FSDP2, slm_here
from conversions import converted, meaning, row, strategy_of

from slm_toolkit.convert.convert import FATES, flat
from slm_toolkit.strategy.strategy import find_strategy, shipped_strategies

SAME_SHARDING = {  # ours, and ours of the other engine that shards alike
    "fsdp_full_shard": "ds_zero3",
    "fsdp_shard_grad_op": "ds_zero2",
    "fsdp_full_shard_offload": "ds_zero3_offload",
}


@pytest.mark.parametrize(("fsdp", "zero"), SAME_SHARDING.items())
def test_shipped_strategies_that_shard_alike_become_one_another(fsdp: str, zero: str, tmp_path: Path) -> None:
    as_zero = strategy_of(converted(fsdp, "deepspeed", folder=tmp_path), tmp_path)
    assert meaning(as_zero) == meaning(find_strategy(zero))
    as_fsdp = strategy_of(converted(zero, "fsdp", folder=tmp_path), tmp_path)
    assert meaning(as_fsdp) == meaning(find_strategy(fsdp))


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", [name for name in shipped_strategies() if "_" in name])
def test_every_key_of_a_shipped_strategy_is_accounted_for(name: str, engine: str) -> None:
    strategy = find_strategy(name)
    if strategy.is_fsdp and engine == "fsdp":
        return
    keys = {".".join(path) for path, _ in flat(strategy.accelerate_config)}
    if engine == "fsdp":
        keys |= {".".join(path) for path, _ in flat(strategy.deepspeed_config)}
    rows = converted(name, engine).rows
    assert keys <= {row.key for row in rows}
    assert {row.fate for row in rows} <= FATES.keys()
    assert all(row.to for row in rows if row.fate in ("carried", "nearest", "added"))
    assert all(row.why for row in rows if row.fate in ("no counterpart", "nearest"))


_F, _Z = "fsdp_config.fsdp_", "zero_optimization."
CASES = [  # what the source sets; the key asked about; what becomes of it; where
    ({f"{_F}offload_params": True}, "nearest", "zero_optimization.offload_param.device: cpu"),
    (
        {f"{_F}offload_params": "True", f"{_F}reshard_after_forward": False},
        "nearest",
        "zero_optimization.offload_optimizer.device: cpu",
    ),
    ({f"{_F}reshard_after_forward": False}, "nearest", "zero_optimization.stage: 2"),
    ({f"{_F}activation_checkpointing": True}, "no counterpart", ""),
    ({f"{_F}cpu_ram_efficient_loading": True}, "nearest", "zero3_init_flag: true"),
    (
        {f"{_F}cpu_ram_efficient_loading": True, f"{_F}reshard_after_forward": False},
        "no counterpart",
        "",
    ),
    ({f"{_F}state_dict_type": "FULL_STATE_DICT"}, "nearest", "on_model_save: true"),
    ({f"{_F}ignored_modules": "lm_head"}, "no counterpart", ""),
    ({f"{_F}use_orig_params": True}, "default", ""),
    ({f"{_F}offload": True}, "no counterpart", ""),  # misspelt
    ({"parallelism_config.parallelism_config_dp_replicate_size": 2}, "no counterpart", ""),
    ({"mixed_precision": "fp16"}, "carried", "bf16.enabled: false, fp16.enabled: true"),
    ({"mixed_precision": "fp8"}, "no counterpart", ""),
    ({f"{_Z}stage": 1}, "nearest", "fsdp_reshard_after_forward: false"),
    ({f"{_Z}zero_quantized_weights": True}, "no counterpart", ""),
    ({f"{_Z}zero_quantized_weights": False}, "default", ""),
    ({f"{_Z}overlap_comm": True}, "default", ""),
    ({f"{_Z}overlap_comm": False}, "no counterpart", ""),
    ({f"{_Z}stage3_max_reuse_distance": 10**9}, "no counterpart", ""),
    ({f"{_Z}zero_hpz_partition_size": 1}, "default", ""),
    ({f"{_Z}zero_hpz_partition_size": 8}, "no counterpart", ""),
    ({f"{_Z}offload_param.device": "cpu"}, "nearest", "fsdp_offload_params: true"),
    ({f"{_Z}offload_optimizer.device": "nvme"}, "nearest", "fsdp_offload_params: true"),
    ({f"{_Z}offload_optimizer.device": "none"}, "default", ""),
    ({f"{_Z}offload_optimizer.nvme_path": "/d"}, "no counterpart", ""),
    (
        {f"{_Z}stage3_gather_16bit_weights_on_model_save": True},
        "carried",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    ({"bf16.enabled": True}, "carried", "mixed_precision: bf16"),
    ({"gradient_clipping": 0.5}, "no counterpart", ""),
    ({"gradient_accumulation_steps": 1}, "default", ""),
    ({"optimizer.params.lr": 1e-4}, "no counterpart", ""),
    ({"activation_checkpointing.cpu_checkpointing": True}, "no counterpart", ""),
    ({"nobodys_key": 1}, "no counterpart", ""),
]


@pytest.mark.parametrize(("source", "fate", "to"), CASES, ids=str)
def test_what_becomes_of_a_key(source: dict[str, object], fate: str, to: str, tmp_path: Path) -> None:
    is_fsdp = next(iter(source)).startswith(("fsdp", "parallelism", "mixed_precision"))
    path = tmp_path / ("mine.yaml" if is_fsdp else "mine.json")
    content: dict = yaml.safe_load(FSDP2) if is_fsdp else {"zero_optimization": {"stage": 3}}
    for key, value in source.items():
        *above, last = key.split(".")
        section = content
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    path.write_text(json.dumps(content))
    written = converted(str(path), "deepspeed" if is_fsdp else "fsdp", num_processes=8)
    found = row(written, next(iter(source)))
    assert (found.fate, bool(found.to)) == (fate, bool(to))
    assert to in found.text


def test_a_yaml_that_holds_deepspeeds_settings_gets_a_json(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"{DEEPSPEED}  zero_stage: 3\n  offload_optimizer_device: nvme\n"
        "  offload_optimizer_nvme_path: /disk\n  offload_param_device: none\n"
        "  gradient_clipping: 1.0\n  zero3_init_flag: 'true'\nmixed_precision: bf16\nnum_processes: 4\n"
    )
    written = converted(str(tmp_path / "mine.yaml"), "deepspeed", folder=tmp_path / "new")
    config = strategy_of(written, tmp_path / "new").deepspeed_config  # refuses mixed_precision in the YAML
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
        "offload_param": {"device": "none"},
    }
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert (config["gradient_clipping"], config["train_micro_batch_size_per_gpu"]) == (1.0, "auto")


def test_a_json_gets_a_yaml_that_points_to_it(tmp_path: Path) -> None:
    source = tmp_path / "mine.json"
    source.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    written = converted(str(source), "deepspeed", folder=tmp_path, num_processes=8)
    assert list(written.files) == ["mine_as_deepspeed.yaml"]
    strategy = strategy_of(written, tmp_path)
    assert strategy.accelerate_config["deepspeed_config"] == {
        "deepspeed_config_file": str(source),
        "zero3_init_flag": True,  # what accelerate does where nobody says it
    }
    assert (strategy.zero_stage, strategy.num_processes) == (3, 8)


def test_a_section_of_the_other_engine_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"{FSDP2}deepspeed_config: {{deepspeed_config_file: gone.json}}\nfp8_config: null\n"
    )
    written = converted(str(tmp_path / "mine.yaml"), "deepspeed", folder=tmp_path, num_processes=2)
    assert row(written, "deepspeed_config").fate == "ignored"
    assert strategy_of(written, tmp_path).zero_stage == 3


def test_two_machines_keep_their_meeting_point(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"{FSDP2}num_processes: 16\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29500\n"
    )
    written = converted(str(tmp_path / "mine.yaml"), "deepspeed", folder=tmp_path)
    config = strategy_of(written, tmp_path).accelerate_config
    assert (config["main_process_ip"], config["main_process_port"]) == ("10.0.0.1", 29500)
    # the default would start the others by pdsh
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


BAD = [  # name and text of the source, the form, the error
    ("", "ddp", "accelerate_fsdp", "ddp shards nothing: there is nothing to convert"),
    ("", "fsdp_full_shard", "accelerate_fsdp", "is for FSDP2 already"),
    ("", "nowhere.json", "accelerate_fsdp", "no such file: nowhere.json"),
    ("", "ds_zero3", "deepspeed_json", "invalid choice: 'deepspeed_json'"),
    ("a.yaml", "distributed_type: FSDP\n", "accelerate_fsdp", "a.yaml is for FSDP1"),
    ("a.json", '{"model": 1}', "accelerate_fsdp", "has no distributed_type"),
    ("a.json", '{"zero_optimization": {"stage": 7}}', "accelerate_fsdp", "zero_optimization.stage"),
    (
        "a.yaml",
        f"fsdp_confg:\n  fsdp_version: 2\n{FSDP2}",
        "accelerate_deepspeed",
        "refuses the key fsdp_confg",
    ),
]


@pytest.mark.parametrize(("name", "text", "form", "says"), BAD)
def test_what_cannot_be_converted_is_an_error_with_a_hint(
    name: str, text: str, form: str, says: str, tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_text(text)
    done = slm_here("convert", name or text, "--to", form, cwd=tmp_path)
    assert done.code == 2
    assert says in done.err
    assert "hint: " in done.err


def test_output_writes_into_a_folder_and_never_over_a_file(tmp_path: Path) -> None:
    words = ("convert", "ds_zero3", "--to", "accelerate_deepspeed", "--output", "new", "--json")
    done = slm_here(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    written = json.loads(done.out)
    assert written["written"] == ["new/ds_zero3_as_deepspeed.yaml"]
    assert (tmp_path / "new" / "ds_zero3_as_deepspeed.yaml").read_text() in written["files"].values()
    again = slm_here(*words, cwd=tmp_path)
    assert again.code == 2
    assert "new/ds_zero3_as_deepspeed.yaml exists: nothing was written" in again.err
