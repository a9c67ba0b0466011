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


@pytest.mark.parametrize("name", [name for name in shipped_strategies() if "_" in name])
def test_every_key_of_a_shipped_strategy_is_accounted_for(name: str) -> None:
    strategy = find_strategy(name)
    keys = {".".join(path) for path, _ in flat(strategy.accelerate_config)}
    if strategy.is_deepspeed:
        keys |= {".".join(path) for path, _ in flat(strategy.deepspeed_config)}
    rows = converted(name, "deepspeed" if strategy.is_fsdp else "fsdp").rows
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
    ({f"{_F}cpu_ram_efficient_loading": True}, "nearest", "zero3_init_flag: true"),
    ({"mixed_precision": "fp16"}, "carried", "bf16.enabled: false, fp16.enabled: true"),
    ({f"{_Z}stage": 1}, "nearest", "fsdp_reshard_after_forward: false"),
    ({f"{_Z}overlap_comm": True}, "default", ""),
    ({f"{_Z}offload_param.device": "cpu"}, "nearest", "fsdp_offload_params: true"),
    (
        {f"{_Z}stage3_gather_16bit_weights_on_model_save": True},
        "carried",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    ({"bf16.enabled": True}, "carried", "mixed_precision: bf16"),
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


def test_settings_in_a_yaml_of_deepspeed_are_converted(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"{DEEPSPEED}  zero_stage: 3\n  offload_optimizer_device: nvme\n"
        "  offload_optimizer_nvme_path: /disk\n  offload_param_device: none\n"
        "  gradient_clipping: 1.0\n  zero3_init_flag: 'true'\nmixed_precision: bf16\nnum_processes: 4\n"
    )
    written = converted(str(tmp_path / "mine.yaml"), "fsdp", folder=tmp_path / "new")
    config = strategy_of(written, tmp_path / "new").accelerate_config
    section = config["fsdp_config"]
    assert (section["fsdp_reshard_after_forward"], section["fsdp_offload_params"]) == (True, True)
    assert (section["fsdp_cpu_ram_efficient_loading"], config["mixed_precision"]) == (True, "bf16")
    assert row(written, "deepspeed_config.gradient_clipping").fate == "no counterpart"


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
    ("", "ds_zero2", "accelerate_deepspeed", "is for deepspeed already"),
    ("a.yaml", "distributed_type: FSDP\n", "accelerate_fsdp", "a.yaml is for FSDP1"),
    ("a.yaml", f"fsdp_confg: 2\n{FSDP2}", "accelerate_deepspeed", "refuses the key fsdp_confg"),
    ("", "nowhere", "hf_model", "takes a new folder as --output"),
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
    words = ("convert", "fsdp_full_shard", "--to", "accelerate_deepspeed", "--output", "new")
    done = slm_here(*words, cwd=tmp_path)
    assert done.code == 1, done.err  # ZeRO has no units
    names = [f"new/fsdp_full_shard_as_deepspeed.{kind}" for kind in ("yaml", "json")]
    assert done.out.splitlines() == names
    assert names[1] in (tmp_path / names[0]).read_text()
    assert f"launch: accelerate launch --config_file {names[0]} train.py" in done.err
    again = slm_here(*words, cwd=tmp_path)
    assert again.code == 2
    assert f"{names[0]} exists: nothing was written" in again.err
