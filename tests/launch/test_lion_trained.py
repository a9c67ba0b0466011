"""--optim lion and --adam_dtype int8 on real processes: the same losses under all engines, and when moved."""

from pathlib import Path

import pytest
from conftest import launch, slm, trained_in

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "6", "--learning_rate", "1e-4")
LION = ("--optim", "lion", "--numerics", "fp32")
INT8 = ("--adam_dtype", "int8")
SHARDED = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
MARKS = {"ds_zero2": pytest.mark.quick, "fsdp_shard_grad_op": pytest.mark.slow, "ds_zero1": pytest.mark.slow}
CASES = [pytest.param(name, marks=MARKS.get(name, ())) for name in SHARDED]
STOP = 3


@pytest.fixture(scope="module")
def lion_alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return trained_in(tmp_path_factory.mktemp("lion"), "single", *FEW, *LION)


@pytest.fixture(scope="module")
def int8_alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return trained_in(tmp_path_factory.mktemp("int8"), "single", *FEW, *INT8)


@pytest.mark.parametrize("strategy", CASES)
def test_lion_has_the_losses_of_one_process(strategy: str, lion_alone: dict, tmp_path: Path) -> None:
    record = trained_in(tmp_path, strategy, *FEW, *LION)
    # the gate's limit for fp32: 1e-5
    assert record["losses"] == pytest.approx(lion_alone["losses"], abs=1e-5, rel=0)
    assert record["numerics"]["optimizer_kernel"] == "lion"
    assert "eps" not in record["numerics"]["optimizer_settings"]
    assert record["losses"][-1] < record["losses"][0] - 0.05


@pytest.mark.parametrize("strategy", CASES)
def test_moments_in_8_bits_lose_no_more_than_bf16_does(
    strategy: str, int8_alone: dict, tmp_path: Path
) -> None:
    record = trained_in(tmp_path, strategy, *FEW, *INT8)
    # the gate's limit for bf16: 1e-3
    assert record["losses"] == pytest.approx(int8_alone["losses"], abs=1e-3, rel=0)
    assert record["numerics"]["optimizer_state_dtype"] == "float32+uint8"  # scales, and bytes
    assert record["numerics"]["master_weight_dtype"] == "float32"


@pytest.mark.parametrize(
    ("written", "resumed", "flags", "limit"),
    [
        ("ds_zero3", "fsdp_full_shard", LION, 1e-5),
        # bytes and scales are those before the stop, and so are the losses
        ("ds_zero2", "ds_zero2", INT8, 0),
        pytest.param("fsdp_full_shard", "fsdp_full_shard", INT8, 0, marks=pytest.mark.slow),
        pytest.param("ds_zero3", "ds_zero3", INT8, 0, marks=pytest.mark.slow),
        pytest.param("ddp", "ds_zero1", INT8, 1e-3, marks=pytest.mark.slow),
        pytest.param("ds_zero1", "single", LION, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_moments_move_between_engines(
    written: str, resumed: str, flags: tuple[str, ...], limit: float, tmp_path: Path
) -> None:
    whole = trained_in(tmp_path / "whole", written, *FEW, *flags, "--save_steps", str(STOP))
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / f"step_{STOP}"
    rest = trained_in(tmp_path / "rest", resumed, *FEW, *flags, "--resume_from_checkpoint", str(checkpoint))
    assert rest["losses"] == pytest.approx(whole["losses"][STOP:], abs=limit, rel=0)


def test_what_only_adamws_moments_can_be_written_as_is_refused(tmp_path: Path) -> None:
    trained_in(tmp_path, "single", *FEW, *LION, "--save_steps", str(STOP))
    checkpoint = tmp_path / "run" / "checkpoints" / f"step_{STOP}"
    refused = slm("convert", str(checkpoint), "--to", "ds_universal", "--output", str(tmp_path / "out"))
    assert refused.code == 2
    assert "was trained with --optim lion; what is written here has AdamW's two moments" in refused.err
    words = (*FEW, "--numerics", "fp32", "--resume_from_checkpoint", str(checkpoint))
    other = launch(*words, "--output_dir", str(tmp_path / "other"), config="accel_configs/single.yaml")
    assert other.code != 0
    assert "optim" in other.err
