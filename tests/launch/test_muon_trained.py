"""--optim muon on real processes: the same losses under every engine, also after a move."""

from pathlib import Path

import pytest
from conftest import launch, record_under, slm_here, trained_in

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "6", "--optim", "muon")
STOP = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The run of one process in fp32."""
    return trained_in(tmp_path_factory.mktemp("alone"), "single", *FEW, "--numerics", "fp32")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp_full_shard", marks=pytest.mark.quick)])
def test_an_engine_has_the_losses_of_one_process(strategy: str, alone: dict, tmp_path: Path) -> None:
    record = trained_in(tmp_path, strategy, *FEW, "--numerics", "fp32")
    # the gate's limit for fp32: 1e-5
    assert record["losses"] == pytest.approx(alone["losses"], abs=1e-5, rel=0)
    assert record["numerics"]["optimizer_kernel"] == "muon"
    first, second, third = record["numerics"]["optimizer_settings"]
    assert first["momentum"] == 0.95
    assert "beta1" not in first
    assert all((group["beta1"], group["beta2"]) == (0.9, 0.95) for group in (second, third))
    assert record["losses"][-1] < record["losses"][0] - 0.05


@pytest.mark.slow
def test_odd_shards_and_micro_steps(tmp_path: Path) -> None:
    """Three ranks divide no width of the model."""
    flags = ("--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "1", "--run_name", "run")
    found = []
    for strategy in ("ddp", "fsdp_full_shard"):
        out = ("--output_dir", str(tmp_path / strategy))
        config, launcher = f"accel_configs/{strategy}.yaml", ("--num_processes", "3")
        done = launch(*FEW, *flags, *out, config=config, launcher=launcher)
        assert done.code == 0, done.err
        found.append(record_under(tmp_path / strategy)["losses"])
    assert found[0] == pytest.approx(found[1], abs=1e-3, rel=0)  # the gate's limit for bf16


def test_momentum_moves_between_engines(tmp_path: Path) -> None:
    flags = (*FEW, "--numerics", "fp32")
    whole = trained_in(tmp_path / "whole", "fsdp_full_shard", *flags, "--save_steps", str(STOP))
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / f"step_{STOP}"
    rest = trained_in(tmp_path / "rest", "ddp", *flags, "--resume_from_checkpoint", str(checkpoint))
    assert rest["losses"] == pytest.approx(whole["losses"][STOP:], abs=1e-5, rel=0)


@pytest.mark.quick
def test_muon_is_refused_under_deepspeed_before_anything_starts() -> None:
    done = slm_here("compare", "--dry_run", "--model", "slm-1m", "--optim", "muon", "--strategy", "ds_zero2")
    assert done.code == 2
    assert "--optim muon: DeepSpeed shards" in done.err
