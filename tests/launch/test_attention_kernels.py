"""Attention backends in real trainings: the one that was asked for runs, or is refused."""

from pathlib import Path

import pytest
import torch
from conftest import launch, record_under, slm

from slm_toolkit.record.step_breakdown import read_trace


@pytest.mark.parametrize(("kernel", "ran"), [("sdpa_math", "sdpa math"), ("sdpa_flash", "sdpa flash")])
def test_the_backend_asked_for_is_the_one_that_runs(kernel: str, ran: str, tmp_path: Path) -> None:
    flags = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "2", "--attn_implementation", kernel)
    done = launch(*flags, "--output_dir", str(tmp_path), config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    assert record["numerics"]["attention"] == ran
    assert record["asked"]["config"]["attn_implementation"] == kernel


def test_a_backend_of_gpus_is_refused_on_a_cpu_before_anything_starts(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has it")
    done = slm(
        "compare", "--attn_implementation", "sdpa", "sdpa_cudnn", "--output_dir", str(tmp_path / "runs")
    )
    assert done.code == 2
    assert (
        "--attn_implementation sdpa_cudnn needs a GPU\nhint: on a CPU, use sdpa_math or sdpa_flash"
        in done.err
    )
    assert not (tmp_path / "runs").exists()


def test_a_step_reads_nothing_off_the_device(tmp_path: Path) -> None:
    """A value read in the forward or backward pass makes the host wait for the GPU, and the GPU for it."""
    flags = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "2", "--profile")
    fused = ("--kernels", "loss+norm")
    done = launch(*flags, *fused, "--output_dir", str(tmp_path), config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    [path] = tmp_path.glob("*/trace-rank0.json.gz")
    events = [event for event in read_trace(path) if "dur" in event]
    passes = [event for event in events if event["name"] in ("phase:forward", "phase:backward")]
    assert len(passes) == 2 * 3
    reads = [
        event["ts"]
        for event in events
        if event["name"] in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::nonzero")
    ]
    assert reads  # fused AdamW's own, of each parameter's step: the names are right
    inside = [ts for ts in reads for span in passes if span["ts"] <= ts <= span["ts"] + span["dur"]]
    assert inside == []
