"""Converted files in the hands of accelerate, transformers and DeepSpeed themselves, and trained with."""

import json
import shlex
import sys
from typing import Any

import pytest
from conftest import FSDP2, ROOT, run
from conversions import converted

from slm_toolkit.convert.read import FSDP_DEFAULTS
from slm_toolkit.strategy.passed_on import YAML_SETTINGS
from slm_toolkit.strategy.strategy import find_strategy, shipped_strategies

YAML_OF = {"fsdp2": "accelerate_fsdp", "deepspeed": "accelerate_deepspeed"}
_OF_TWO_NODES = ("fsdp_hybrid_shard", "ds_zeropp", "ds_zeropp_quantized")
OF_FSDP = [name for name in shipped_strategies() if name.startswith("fsdp")]
OF_ZERO = [name for name in shipped_strategies() if name.startswith("ds_")]
SILENT = f"{FSDP2}num_processes: 2\n"
FLIPPED = (  # every setting of FSDP2 that has a default, at its other value
    f"{FSDP2}  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n"
    "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Other\n"
    "  fsdp_cpu_ram_efficient_loading: false\n  fsdp_activation_checkpointing: true\n"
    "  fsdp_activation_checkpointing_offload: true\nnum_processes: 2\n"
)
BY_SIZE = f"{FSDP2}  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 1000\nnum_processes: 2\n"
FSDP1 = (
    "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n"
    "  fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: false\n"
    "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n"
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the libraries make of every file and command below, asked for once."""
    folder, inputs = tmp_path_factory.mktemp("real"), tmp_path_factory.mktemp("inputs")
    for name in shipped_strategies():
        engine = find_strategy(name).engine
        forms = ["accelerate_ddp"] if engine in ("single", "ddp") else list(YAML_OF.values())
        for form in forms:
            converted(name, to=form, folder=folder, gpus_per_node=2)
        if name in OF_ZERO:
            alone = converted(name, to="deepspeed_json", folder=inputs, gpus_per_node=2)
            (folder / f"{name}_command.sh").write_text(shlex.join(alone.command))
    for name, text in {"silent": SILENT, "flipped": FLIPPED, "by_size": BY_SIZE, "fsdp1": FSDP1}.items():
        (folder / f"{name}.yaml").write_text(text)
        converted(str(folder / f"{name}.yaml"), to="accelerate_fsdp", folder=folder)
    for path in folder.glob("*_as_deepspeed.json"):  # named by the YAMLs
        path.rename(inputs / path.name)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace(f"{folder}/", f"{inputs}/"))
    done = run(sys.executable, str(ROOT / "tests" / "real_configs.py"), str(folder))
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.parametrize("name", [*OF_FSDP, *OF_ZERO])
def test_accelerate_takes_a_converted_yaml_for_what_it_is(name: str, facts: dict[str, Any]) -> None:
    strategy = find_strategy(name)
    fsdp, zero = facts[f"{name}_as_fsdp.yaml"], facts[f"{name}_as_deepspeed.yaml"]
    reshards = strategy.zero_stage in (None, 3) and strategy.reshard_after_forward is not False
    assert (fsdp["version"], fsdp["reshard"]) == (2, reshards)
    assert fsdp["offload"] == ("CPUOffloadPolicy" if strategy.offloads else "OffloadPolicy")
    assert fsdp.get("groups") == ([2, 2] if name in _OF_TWO_NODES else None)
    assert zero["stage"] == (strategy.zero_stage or (3 if reshards else 2))
    device = "nvme" if name == "ds_zero3_nvme" else "cpu" if strategy.offloads else None
    assert (zero["optimizer"], zero["param"]) == (device, device if zero["stage"] == 3 else None)
    assert zero["hpz"] == (2 if name == "fsdp_hybrid_shard" else 1)  # ds_zeropp's auto is left for our script
    assert zero["init"] is False
    assert fsdp["ranks"] == zero["ranks"] == strategy.num_processes


@pytest.mark.parametrize("name", OF_ZERO)
def test_the_trainer_takes_a_json_for_what_accelerate_takes_the_yaml(
    name: str, facts: dict[str, Any]
) -> None:
    trainers, ours = facts[f"{name}_command.sh"], facts[f"{name}_as_deepspeed.yaml"]
    for key in ("stage", "optimizer", "param", "gathers"):
        assert trainers[key] == ours[key], key
    assert trainers["init"] is (ours["stage"] == 3)  # it builds in pieces whatever the YAML says
    assert trainers["hpz"] == (2 if name.startswith("ds_zeropp") else 1)


@pytest.mark.parametrize("name", ["silent", "flipped", "by_size"])
def test_a_yaml_written_out_means_what_it_meant_silently(name: str, facts: dict[str, Any]) -> None:
    assert facts[f"{name}_as_fsdp.yaml"] == facts[f"{name}.yaml"]


def test_the_defaults_in_our_table_are_the_libraries_own(facts: dict[str, Any]) -> None:
    launcher = facts["silent.yaml"]
    names = {
        "reshard_after_forward": "reshard",
        "state_dict_type": "state_dict",
        "cpu_ram_efficient_loading": "ram_efficient",
        "activation_checkpointing": "checkpointing",
        "activation_checkpointing_offload": "checkpointing_offload",
        "transformer_layer_cls_to_wrap": "layers",
    }
    for key, fact in names.items():
        assert launcher[fact] == FSDP_DEFAULTS[f"fsdp_{key}"], key
    assert (launcher["wrap"], launcher["offload"]) == (None, "OffloadPolicy")
    assert set(YAML_SETTINGS) - {"dynamo_backend", "fp16"} == set(facts["ClusterConfig"])


def test_what_we_say_of_others_is_so(facts: dict[str, Any]) -> None:
    assert facts["fsdp1.yaml"]["fsdp1"] == "FULL_SHARD"  # whatever fsdp_reshard_after_forward says
    assert facts["fsdp1_as_fsdp.yaml"]["reshard"] is False  # what was meant
