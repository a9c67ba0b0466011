"""The first loss of a training is compared with that of plain kernels, which replace wrong ones."""

from pathlib import Path

import pytest
from conftest import WHEN_LOADED, Finished, launch, planted, record_under

from slm_toolkit.record.step_breakdown import read_trace

WRONG = """
def plant(module):
    right = module._chunk_losses_
    def wrong(logits, targets, *others, **options):
        return right(logits, targets.roll(1), *others, **options)
    module._chunk_losses_ = wrong
when_loaded("slm_toolkit.run.kernels.loss_kernels", plant)
"""
FLAGS = ("--model", "slm-1m", "--max_steps", "3", "--seq_len", "128", "--per_device_train_batch_size", "4")


def trained(folder: Path, strategy: str, kernels: str, **options: object) -> tuple[Finished, dict]:
    flags = ("--kernels", kernels, "--output_dir", str(folder))
    done = launch(*FLAGS, *flags, config=f"accel_configs/{strategy}.yaml", **options)
    assert done.code == 0, done.err
    return done, record_under(folder)


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp_full_shard", marks=pytest.mark.full), "ds_zero3"]
)
def test_a_wrong_kernel_gives_way_to_plain_ones_and_the_run_says_so(tmp_path: Path, strategy: str) -> None:
    _, plain = trained(tmp_path / "plain", strategy, "plain")
    done, record = trained(tmp_path / "wrong", strategy, "fused", env=planted(tmp_path, WHEN_LOADED + WRONG))
    assert "WARNING: --kernels fused computed the loss" in done.err
    assert "so this run was trained with plain kernels" in record["plain_kernels"]
    assert record["losses"] == pytest.approx(plain["losses"], abs=1e-3, rel=0)
    _, right = trained(tmp_path / "right", strategy, "fused")
    assert right["plain_kernels"] is None
    assert right["losses"] == pytest.approx(plain["losses"], abs=2e-3, rel=0)


def test_a_step_reads_nothing_off_the_device(tmp_path: Path) -> None:
    """A value read in the forward or backward pass makes the host wait for the GPU, and the GPU for it."""
    flags = ("--max_steps", "2", "--profile", "--kernels", "loss+norm", "--output_dir", str(tmp_path))
    done = launch(*FLAGS, *flags, config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    [path] = tmp_path.glob("*/trace-rank0.json.gz")
    events = [event for event in read_trace(path) if "dur" in event]
    passes = [event for event in events if event["name"] in ("phase:forward", "phase:backward")]
    assert len(passes) == 2 * 3
    names = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::nonzero")
    reads = [event["ts"] for event in events if event["name"] in names]
    assert reads  # fused AdamW's own, of each parameter's step: the names are right
    assert [ts for ts in reads for span in passes if span["ts"] <= ts <= span["ts"] + span["dur"]] == []
