"""Converted files in the hands of accelerate, transformers and DeepSpeed themselves, and trained with."""

import json
import sys
from typing import Any

import pytest
from conftest import FSDP2, ROOT, run
from conversions import converted

from slm_toolkit.convert.convert import FSDP_DEFAULTS
from slm_toolkit.strategy.passed_on import YAML_SETTINGS
from slm_toolkit.strategy.strategy import find_strategy, shipped_strategies

OF_FSDP = [name for name in shipped_strategies() if name.startswith("fsdp")]
OF_ZERO = [name for name in shipped_strategies() if name.startswith("ds_")]
SILENT = f"{FSDP2}num_processes: 2\n"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the libraries make of every file and command below, asked for once."""
    folder, inputs = tmp_path_factory.mktemp("real"), tmp_path_factory.mktemp("inputs")
    for name in OF_FSDP:
        converted(name, "deepspeed", folder=folder)
    for name in OF_ZERO:
        converted(name, "fsdp", folder=folder)
        converted(name, "deepspeed", folder=folder)
    (folder / "silent.yaml").write_text(SILENT)
    for path in folder.glob("*_as_deepspeed.json"):  # named by the YAMLs
        path.rename(inputs / path.name)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace(f"{folder}/", f"{inputs}/"))
    done = run(sys.executable, str(ROOT / "tests" / "real_configs.py"), str(folder))
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.parametrize("name", OF_ZERO)
def test_accelerate_takes_zero_as_fsdp_for_what_it_is(name: str, facts: dict[str, Any]) -> None:
    strategy, fsdp = find_strategy(name), facts[f"{name}_as_fsdp.yaml"]
    assert (fsdp["version"], fsdp["reshard"]) == (2, strategy.is_zero_3)
    assert fsdp["offload"] == ("CPUOffloadPolicy" if strategy.offloads else "OffloadPolicy")
    assert fsdp["ranks"] == strategy.num_processes


@pytest.mark.parametrize("name", [*OF_FSDP, *OF_ZERO])
def test_accelerate_takes_a_yaml_of_deepspeed_for_what_it_is(name: str, facts: dict[str, Any]) -> None:
    strategy, zero = find_strategy(name), facts[f"{name}_as_deepspeed.yaml"]
    assert zero["stage"] == (strategy.zero_stage or (3 if strategy.reshard_after_forward else 2))
    device = "nvme" if name == "ds_zero3_nvme" else "cpu" if strategy.offloads else None
    assert (zero["optimizer"], zero["param"]) == (device, device if zero["stage"] == 3 else None)
    assert zero["init"] is False
    assert zero["ranks"] == strategy.num_processes


def test_the_defaults_in_our_table_are_the_libraries_own(facts: dict[str, Any]) -> None:
    launcher = facts["silent.yaml"]
    names = {
        "reshard_after_forward": "reshard",
        "state_dict_type": "state_dict",
        "cpu_ram_efficient_loading": "ram_efficient",
        "activation_checkpointing": "checkpointing",
    }
    for key, fact in names.items():
        assert launcher[fact] == FSDP_DEFAULTS[f"fsdp_{key}"], key
    assert (launcher["wrap"], launcher["offload"]) == (None, "OffloadPolicy")
    assert set(YAML_SETTINGS) - {"dynamo_backend", "fp16"} == set(facts["ClusterConfig"])
