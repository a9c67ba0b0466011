"""--numerics fp16 on real processes: engines overflow in the same steps, and the loss scale moves along."""

import json
from pathlib import Path

import pytest
from conftest import WHEN_LOADED, Finished, launch, planted, record_under

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "8", "--numerics", "fp16")
SAVED = 6
OVERFLOWS = [1, 2, 3]
"steps, from a scale of 2^20 on, that two ranks skip"
SCALE = "when_loaded('slm_toolkit.run.engine.optimizer', lambda m: setattr(m, 'INITIAL_SCALE', 2.0**{}))\n"


def launched(folder: Path, strategy: str, *flags: str, power: int = 20) -> Finished:
    """Train two processes, or one, on the same four sequences per step, from a scale of 2^power."""
    num_processes = 1 if strategy == "single" else 2
    batch = ("--per_device_train_batch_size", str(4 // num_processes))
    return launch(
        *(*FEW, *batch, *flags, "--output_dir", str(folder), "--run_name", "run"),
        config=f"accel_configs/{strategy}.yaml",
        launcher=("--num_processes", str(num_processes)),
        env=planted(folder, WHEN_LOADED + SCALE.format(power)),
    )


def trained(folder: Path, strategy: str, *flags: str) -> dict:
    done = launched(folder, strategy, *flags)
    assert done.code == 0, done.err
    return record_under(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return trained(tmp_path_factory.mktemp("alone"), "single")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        "fsdp_full_shard",
        pytest.param("ds_zero1", marks=pytest.mark.slow),
        pytest.param("ds_zero2", marks=pytest.mark.quick),
    ],
)
def test_an_engine_skips_the_same_steps_with_the_same_losses(
    strategy: str, alone: dict, tmp_path: Path
) -> None:
    record = trained(tmp_path, strategy)
    assert record["skipped_steps"] == alone["skipped_steps"] == OVERFLOWS
    assert [norm is None for norm in record["grad_norms"]] == [True] * 3 + [False] * 5
    # the engines differ by 2e-5 at most; a step too many or too few changes a loss by 0.02 or more
    assert record["losses"] == pytest.approx(alone["losses"], abs=1e-4, rel=0)
    seen = record["numerics"]
    dtypes = ("parameter_dtype", "compute_dtype", "gradient_dtype", "reduction_dtype")
    assert {seen[name] for name in dtypes} == {"float16"}
    assert seen["master_weight_dtype"] == seen["optimizer_state_dtype"] == "float32"


def test_the_loss_scale_moves_to_another_engine(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "ds_zero3", "--save_steps", str(SAVED))
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / f"step_{SAVED}"
    scaler = json.loads((checkpoint / "checkpoint.json").read_text())["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (2.0**17, SAVED - len(OVERFLOWS))
    for strategy in ("ddp", "ds_zero2"):
        rest = trained(tmp_path / strategy, strategy, "--resume_from_checkpoint", str(checkpoint))
        assert rest["skipped_steps"] == []  # with the initial scale, three steps would overflow again
        assert rest["losses"] == pytest.approx(whole["losses"][SAVED:], abs=1e-4, rel=0)


def test_a_run_ends_after_twenty_overflows_in_a_row(tmp_path: Path) -> None:
    done = launched(tmp_path, "single", "--max_steps", "24", power=60)
    assert done.code == 1
    assert "step 20: the gradients of 20 steps in a row overflowed in fp16" in done.err
    assert "hint: lower --learning_rate, or compute in bf16 or fp32: --numerics" in done.err
