"""Converted files in the hands of accelerate and DeepSpeed themselves."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FSDP2, run
from conversions import converted

from slm_toolkit.convert.convert import FSDP_DEFAULTS
from slm_toolkit.strategy.strategy import find_strategy, shipped_strategies

OF_FSDP = [name for name in shipped_strategies() if name.startswith("fsdp")]
OF_ZERO = [name for name in shipped_strategies() if name.startswith("ds_")]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What accelerate's plugins make of every converted file, and of a YAML of FSDP2 without settings."""
    folder = tmp_path_factory.mktemp("real")
    for name in OF_FSDP:
        converted(name, "deepspeed", folder=folder)
    for name in OF_ZERO:
        converted(name, "fsdp", folder=folder)
    (folder / "silent.yaml").write_text(f"{FSDP2}num_processes: 2\n")
    paths = [str(path) for path in folder.glob("*.yaml")]
    done = run(sys.executable, str(Path(__file__).with_name("launcher_says.py")), *paths)
    assert done.code == 0, done.err
    answers = json.loads(done.out.splitlines()[-1])
    assert {path: said["refused"] for path, said in answers.items() if said["refused"]} == {}
    return {Path(path).stem: said["plugin"] for path, said in answers.items()}


def test_accelerate_takes_zero_as_fsdp_for_what_it_is(plugins: dict[str, dict[str, Any]]) -> None:
    for name in OF_ZERO:
        strategy, fsdp = find_strategy(name), plugins[f"{name}_as_fsdp"]
        reshards = str(strategy.is_zero_3)
        assert (fsdp["fsdp_version"], fsdp["reshard_after_forward"]) == ("2", reshards), name
        assert ("CPUOffloadPolicy" in fsdp["cpu_offload"]) == strategy.offloads, name


def test_deepspeed_takes_fsdp_for_what_it_is(plugins: dict[str, dict[str, Any]]) -> None:
    for name in OF_FSDP:
        strategy, zero = find_strategy(name), plugins[f"{name}_as_deepspeed"]
        settings = zero["config"]["zero_optimization"]
        device = {"device": "cpu", "pin_memory": True} if strategy.offloads else None
        assert settings["stage"] == (3 if strategy.reshard_after_forward else 2), name
        assert (settings.get("offload_optimizer"), settings.get("offload_param")) == (device, device), name
        assert zero["zero3_init_flag"] is False


def test_the_defaults_in_our_table_are_the_libraries_own(plugins: dict[str, dict[str, Any]]) -> None:
    silent = plugins["silent"]
    for key in ("reshard_after_forward", "cpu_ram_efficient_loading", "activation_checkpointing"):
        assert silent[key] == str(FSDP_DEFAULTS[f"fsdp_{key}"]), key
    assert FSDP_DEFAULTS["fsdp_state_dict_type"] in silent["state_dict_type"]
    assert "CPU" not in silent["cpu_offload"]
