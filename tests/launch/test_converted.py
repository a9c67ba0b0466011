"""A converted strategy really trains, as the one that it came from."""

from pathlib import Path

import pytest
from conftest import launch, record_under
from conversions import converted

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "2")


@pytest.mark.parametrize(
    ("source", "engine", "ours"),
    [
        ("fsdp_full_shard", "deepspeed", "ds_zero3"),
        pytest.param("ds_zero2_offload", "fsdp", "fsdp_shard_grad_op", marks=pytest.mark.slow),
    ],
)
def test_a_converted_strategy_trains_as_ours_does(
    source: str, engine: str, ours: str, tmp_path: Path
) -> None:
    written = converted(source, engine, folder=tmp_path / "new")
    losses = {}
    for name, config in (
        ("new", tmp_path / "new" / next(iter(written.files))),
        ("ours", f"accel_configs/{ours}.yaml"),
    ):
        words = (*FEW, "--numerics", "fp32", "--output_dir", str(tmp_path / name))
        done = launch(*words, config=config)
        assert done.code == 0, done.err
        losses[name] = record_under(tmp_path / name)["losses"]
    assert len(losses["new"]) == 2
    assert losses["new"] == pytest.approx(losses["ours"], abs=1e-6)
