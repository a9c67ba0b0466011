"""Scripts that `slm recommend` writes train, as they are."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, WARM, plans_of, record_under

from slm_toolkit.recommend.launch_files import write_launch


@pytest.mark.parametrize(("strategy", "num_gpus"), [("single", 1), ("fsdp_shard_grad_op", 2)])
def test_the_script_written_trains_on_a_dataset(strategy: str, num_gpus: int, tmp_path: Path) -> None:
    """On this machine's CPU, a step of short sequences; all else is what stands in the script."""
    write_launch(plans_of(strategy, num_gpus=num_gpus)[0], tmp_path / "plan")
    script = (tmp_path / "plan").rename(tmp_path / "copied") / "launch.sh"  # as on another machine
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
