"""Offload, hybrid shard and ZeRO++ run for real on CPU processes, and lose what DDP loses."""

import json
from pathlib import Path

import pytest
import torch
from conftest import COMPILING_SECONDS, ROOT, launch, record_under, slm

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "5", "--json")
NEW = {
    2: ("fsdp_full_shard_offload", "ds_zero2_offload", "ds_zero3_offload"),
    4: ("fsdp_hybrid_shard", "ds_zeropp"),
}


@pytest.mark.parametrize("num_processes", [2, 4])
def test_each_trains_as_ddp_does(num_processes: int, tmp_path: Path) -> None:
    done = slm(
        *("compare", "--strategy", "ddp", *NEW[num_processes], *FEW, "--numerics", "fp32"),
        *("--num_processes", str(num_processes), "--output_dir", str(tmp_path)),
    )
    assert done.code == 0, done.err
    rows = {row["strategy"]: row for row in json.loads(done.out)}
    assert rows.keys() == {"ddp", *NEW[num_processes]}
    for row in rows.values():
        assert (row["status"], row["world_size"]) == ("ok", num_processes)
        assert row["losses"] == pytest.approx(rows["ddp"]["losses"], abs=1e-4)


def test_the_launchers_sizes_of_a_hybrid_shard_are_those_recorded(tmp_path: Path) -> None:
    sizes = ("--parallelism_config_dp_replicate_size", "3", "--parallelism_config_dp_shard_size", "2")
    done = launch(
        *(*FEW[:-1], "--output_dir", str(tmp_path)),
        config="accel_configs/fsdp_hybrid_shard.yaml",
        launcher=("--num_processes", "6", *sizes),
    )
    assert done.code == 0, done.err
    asked = record_under(tmp_path)["asked"]["accelerate_config"]["parallelism_config"]
    assert list(asked.values()) == [3, 2]


@pytest.mark.nvme
def test_nvme_trains_as_ddp_does(tmp_path: Path) -> None:
    """The first use compiles async_io, some minutes."""
    names = ("--strategy", "ddp", "ds_zero3_nvme")
    done = slm("compare", *names, *FEW, "--output_dir", str(tmp_path), timeout=COMPILING_SECONDS)
    assert done.code == 0, done.err
    ddp, nvme = json.loads(done.out)
    assert nvme["losses"] == pytest.approx(ddp["losses"], abs=0.01)


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do it")
def test_quantized_zeropp_is_refused_without_a_gpu(tmp_path: Path) -> None:
    yaml = ROOT / "accel_configs" / "ds_zeropp_quantized.yaml"
    for flags in ((), ("--rehearse", "8")):
        launcher = ("--num_processes", "1" if flags else "2")
        done = launch(*FEW[:-1], *flags, "--output_dir", str(tmp_path), config=yaml, launcher=launcher)
        assert done.code != 0
        assert "zero_quantized_weights and zero_quantized_gradients need a GPU" in done.err
        assert "ds_zeropp is the same without them" in done.err
