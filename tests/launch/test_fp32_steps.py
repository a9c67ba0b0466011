"""--parity: each rank's first steps in fp32, in a process of its own, before the run itself."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ROOT, launch, own_strategy, record_under, slm

FLAGS = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "6")


@pytest.mark.parametrize("strategy", ["ddp", "ds_zero3"])
def test_the_fp32_steps_are_the_first_steps_of_an_fp32_run(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ROOT / "accel_configs" / f"{strategy}.yaml"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = launch(*FLAGS, "--parity", "3", "--output_dir", str(tmp_path / "a"), config=config)
    assert done.code == 0, done.err
    assert list(temporary.glob("slm-fp32-*")) == []
    alone = ("--numerics", "fp32", "--parity", "3", "--run_name", "parity-reference-fp32")
    fp32 = launch(*FLAGS, *alone, "--output_dir", str(tmp_path / "b"), config=config)
    assert fp32.code == 0, fp32.err
    record, whole = record_under(tmp_path / "a"), record_under(tmp_path / "b")
    steps = record["fp32_pass"]
    assert whole["fp32_pass"] is None
    assert (steps["status"], len(steps["losses"]), len(record["losses"])) == ("ok", 3, 6)
    assert steps["losses"] == pytest.approx(whole["losses"][:3], abs=2e-6)
    assert steps["grad_norms"] == pytest.approx(whole["grad_norms"][:3], rel=2e-6)
    assert steps["parameter_grad_norms"] == pytest.approx(whole["parameter_grad_norms"], rel=1e-4)
    assert steps["numerics"]["compute_dtype"] == "float32"
    assert record["numerics"]["compute_dtype"] == "bfloat16"
    assert record["losses"][:3] != steps["losses"]
    assert done.err.count("record: ") == 1  # nothing of the other processes is printed


def test_a_yaml_that_forbids_fp32_leaves_the_run_as_it_is_and_says_why(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accel_configs" / "ddp.yaml").read_text()) | {"mixed_precision": "bf16"}
    mine = own_strategy(tmp_path, yaml.safe_dump(config))
    done = launch(*FLAGS, "--parity", "2", "--output_dir", str(tmp_path / "runs"), config=mine)
    assert done.code == 0, done.err
    record = record_under(tmp_path / "runs")
    assert (record["status"], record["fp32_pass"]["status"]) == ("ok", "failed")
    assert "mixed precision is bf16" in record["fp32_pass"]["reason"]
    assert "note: the fp32 steps failed: " in done.err


def test_the_fp32_process_ends_with_its_rank(tmp_path: Path) -> None:
    words = ["python", "-m", "slm_toolkit.train", *FLAGS[:4], "--kernels", "fused"]
    words += ["--max_steps", "100000", "--parity", "100000", "--output_dir", str(tmp_path)]
    rank = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (children := psutil.Process(rank.pid).children()):
        assert time.monotonic() < until
        assert rank.poll() is None
        time.sleep(0.1)
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_weights_that_compute_in_bf16_have_no_parity(tmp_path: Path) -> None:
    words = ("--model", "slm-1m", "--parity", "2", "--peft", "qlora", "--output_dir", str(tmp_path))
    done = slm("compare", *words)
    assert (done.code, "--parity 2 with --peft qlora: its weights compute in bf16" in done.err) == (2, True)
