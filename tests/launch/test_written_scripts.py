"""Scripts that `slm recommend` writes train, as they are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, WARM, plans_of, record_under

from slm_toolkit.recommend.launch_files import SKYPILOT_FILE, write_launch


@pytest.mark.parametrize(("strategy", "num_gpus"), [("single", 1), ("fsdp_shard_grad_op", 2)])
def test_the_script_written_trains_on_a_dataset(strategy: str, num_gpus: int, tmp_path: Path) -> None:
    """On this machine's CPU, a step of short sequences; all else is what stands in the script."""
    _, script, _ = write_launch(plans_of(strategy, num_gpus=num_gpus)[0], tmp_path / "plan")
    _short(script)
    env = WARM.env()
    without = subprocess.run(["sh", str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert without.returncode != 0
    assert "a hub id, file or folder" in without.stderr
    env["DATASET"] = str(ROOT / "README.md")
    done = subprocess.run(["sh", str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = record_under(tmp_path / "runs")
    assert record["world_size"] == num_gpus
    assert record["asked"]["config"]["kernels"] == "norm"
    assert record["asked"]["config"]["per_device_train_batch_size"] == 8
    assert [path.name for path in tmp_path.glob("runs/*/checkpoints/*")] == ["step_1"]
    assert record["eval_losses"]


def _short(script: Path) -> None:
    """One step of short sequences."""
    text = re.sub(r"--(max|save|eval)_steps \d+", r"--\1_steps 1", script.read_text())
    script.write_text(text.replace("1024", "32").replace("slm train", "slm train --main_process_port 0"))


def task_of(folder: Path, strategy: str, *, num_gpus: int) -> dict:
    *_, path = write_launch(plans_of(strategy, num_gpus=num_gpus)[0], folder)
    assert path == folder / SKYPILOT_FILE
    return yaml.safe_load(path.read_text())


def test_the_run_section_trains_in_a_copy_of_the_folder(tmp_path: Path) -> None:
    """As SkyPilot does it: in the workdir's copy, with its variables set; on this CPU, one step."""
    run = task_of(tmp_path / "plan", "ds_zero2", num_gpus=2)["run"]
    _short(tmp_path / "plan" / "launch.sh")
    shutil.copytree(tmp_path / "plan", tmp_path / "sky_workdir")
    shutil.rmtree(tmp_path / "plan")
    sky = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "1"}
    done = subprocess.run(
        ["sh", "-c", run],
        cwd=tmp_path / "sky_workdir",
        env={**WARM.env(), **sky, "DATASET": str(ROOT / "README.md")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "node 0 of 1, the first node is 127.0.0.1\n" in done.stdout
    assert record_under(tmp_path / "sky_workdir")["zero_stage"] == 2
