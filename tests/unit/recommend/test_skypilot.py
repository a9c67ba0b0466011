"""The SkyPilot task that `slm recommend --write` leaves beside launch.sh: it parses and runs."""

import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from conftest import plans_of, slm_here

from slm_toolkit.hardware.gpus import gpus
from slm_toolkit.recommend.launch_files import SKYPILOT_FILE, SKYPILOT_NAMES, write_launch


def task_of(folder: Path, strategy: str, *, num_gpus: int) -> dict:
    *_, path = write_launch(plans_of(strategy, num_gpus=num_gpus)[0], folder)
    assert path == folder / SKYPILOT_FILE
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(("num_gpus", "num_nodes", "of_each"), [(1, 1, 1), (2, 1, 2), (8, 1, 8), (16, 2, 8)])
def test_the_task_asks_for_the_plans_nodes_and_gpus(
    num_gpus: int, num_nodes: int, of_each: int, tmp_path: Path
) -> None:
    task = task_of(tmp_path, "ds_zero2" if num_gpus > 1 else "single", num_gpus=num_gpus)
    assert task["num_nodes"] == num_nodes
    assert task["resources"] == {"accelerators": {"A100-80GB": of_each}}
    assert task["workdir"] == str(tmp_path)
    assert task["envs"]["DATASET"] is None  # so that sky asks for it
    script = (tmp_path / "launch.sh").read_text()
    assert f"--num_processes {num_gpus}" in script
    assert ("--main_process_ip $HEAD_NODE" in script) == (num_nodes > 1)


def test_ones_own_files_are_mounted_where_the_command_looks_for_them(tmp_path: Path) -> None:
    (plan,) = plans_of("single", num_gpus=1)
    (tmp_path / "texts").mkdir()
    config = dataclasses.replace(plan.config, dataset=os.path.relpath(tmp_path / "texts"))
    *_, path = write_launch(dataclasses.replace(plan, config=config), tmp_path / "plan")
    task = yaml.safe_load(path.read_text())
    assert task["file_mounts"] == {str(tmp_path / "texts"): str(tmp_path / "texts")}
    assert task["envs"]["DATASET"] == f"{tmp_path}/texts"
    assert '--dataset "${DATASET:?' in (tmp_path / "plan" / "launch.sh").read_text()


def test_a_gpu_that_skypilot_does_not_know_gets_no_task_and_a_note(tmp_path: Path) -> None:
    unnamed = {gpu.name for gpu in gpus()} - SKYPILOT_NAMES.keys()
    assert unnamed == {"a100-80gb-pcie", "h100-80gb-pcie", "b300"}
    asked = ("recommend", "--model", "slm-100m", "--gpu", "b300:1@5", "--tokens", "1B")
    done = slm_here(*asked, "--write", str(tmp_path / "plan"))
    assert done.code == 0, done.err
    assert f"no {SKYPILOT_FILE}: SkyPilot's name for this GPU is unknown" in done.out + done.err
    assert not (tmp_path / "plan" / SKYPILOT_FILE).exists()
