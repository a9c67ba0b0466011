"""--optim muon on real processes: the same losses under every engine, also after a move."""

from pathlib import Path

import pytest
from conftest import launch, record_under, slm, trained_in

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "6", "--optim", "muon")
SHARDED = ("ddp", "fsdp_full_shard")
MARKS = {"fsdp_full_shard": pytest.mark.quick}
STOP = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The run of one process in fp32."""
    return trained_in(tmp_path_factory.mktemp("alone"), "single", *FEW, "--numerics", "fp32")


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in SHARDED],
)
def test_an_engine_has_the_losses_of_one_process(strategy: str, alone: dict, tmp_path: Path) -> None:
    record = trained_in(tmp_path, strategy, *FEW, "--numerics", "fp32")
    # the gate's limit for fp32: 1e-5
    assert record["losses"] == pytest.approx(alone["losses"], abs=1e-5, rel=0)
    assert record["numerics"]["optimizer_kernel"] == "muon"
    first, second, third = record["numerics"]["optimizer_settings"].split("; ")
    assert "momentum 0.95" in first
    assert "betas" not in first
    assert all("betas 0.9 0.95" in group for group in (second, third))
    assert record["losses"][-1] < record["losses"][0] - 0.05


@pytest.mark.slow
def test_odd_shards_and_micro_steps(tmp_path: Path) -> None:
    """Three ranks divide no width of the model."""
    flags = ("--gradient_accumulation_steps", "2")
    batch = ("--per_device_train_batch_size", "1")
    found = {}
    for strategy in ("ddp", "fsdp_full_shard"):
        words = (*FEW, *flags, *batch, "--output_dir", str(tmp_path / strategy), "--run_name", "run")
        launcher = ("--num_processes", "3")
        done = launch(*words, config=f"accel_configs/{strategy}.yaml", launcher=launcher)
        assert done.code == 0, done.err
        found[strategy] = record_under(tmp_path / strategy)["losses"]
    for losses in found.values():
        assert losses == pytest.approx(found["ddp"], abs=1e-3, rel=0)  # the gate's limit for bf16


@pytest.mark.parametrize(
    ("written", "resumed"),
    [("fsdp_full_shard", "ddp")],
)
def test_momentum_moves_between_engines(written: str, resumed: str, tmp_path: Path) -> None:
    flags = ("--numerics", "fp32")
    whole = trained_in(tmp_path / "whole", written, *FEW, *flags, "--save_steps", str(STOP))
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / f"step_{STOP}"
    rest = trained_in(tmp_path / "rest", resumed, *FEW, *flags, "--resume_from_checkpoint", str(checkpoint))
    assert rest["losses"] == pytest.approx(whole["losses"][STOP:], abs=1e-5, rel=0)
    refused = slm("convert", str(checkpoint), "--to", "ds_universal", "--output", str(tmp_path / "out"))
    assert refused.code == 2
    assert "was trained with --optim muon" in refused.err
    assert "hint: --to hf_model" in refused.err
    assert not (tmp_path / "out").exists()
