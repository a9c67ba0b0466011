"""CUDA branches run on a pretended GPU (bench/gpu/pretend.py)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, record_under, run, slm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
TINY = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "3", "--kernels", "plain")


@pytest.mark.parametrize(("strategy", "num_gpus"), [("ddp", 2), ("ds_zero2", 1)])
def test_a_strategy_trains_on_pretended_gpus_as_on_a_cpu(
    strategy: str, num_gpus: int, tmp_path: Path
) -> None:
    words = ("train", "--strategy", strategy, "--num_processes", str(num_gpus), *TINY)
    done = slm(*words, "--output_dir", str(tmp_path / "cpu"))
    assert done.code == 0, done.err
    pretend = (sys.executable, str(ROOT / "bench" / "gpu" / "pretend.py"), "--gpus", str(num_gpus))
    flags = ("--profile", "--save_steps", "2", "--attn_implementation", "sdpa")
    on_gpu = ("-m", "slm_toolkit.cli.main", *words, "--output_dir", str(tmp_path / "gpu"), *flags)
    done = run(*pretend, *on_gpu)
    assert done.code == 0, done.err
    on_cpu, on_gpu = (record_under(tmp_path / device) for device in ("cpu", "gpu"))
    assert (on_cpu["gpu"], on_gpu["gpu"]) == (None, "NVIDIA H200")
    assert on_gpu["losses"] == pytest.approx(on_cpu["losses"], abs=1e-3)
    (row,) = json.loads(slm("report", str(tmp_path / "gpu"), "--json").out)
    assert row["peak_allocated_bytes"] == 2**30  # pretended
