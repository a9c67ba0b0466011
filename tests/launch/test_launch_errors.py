"""Launches that would silently do something else end with one line that says so."""

import re
import sys
from pathlib import Path

import pytest
from conftest import launch, own_strategy, run, slm_here

from slm_toolkit.run.peers.launch_info import Launch, check_devices
from slm_toolkit.strategy.strategy import (
    find_strategy,
    on_nodes,
)

QUICK = ("--model", "slm-1m", "--max_steps", "2")
ONE_GPU = """
import torch
from slm_toolkit.train import main  # under 2.15 transformers asks the GPU while it is imported
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
main()
"""
FSDP1 = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: false
"""


def test_fewer_gpus_than_processes_is_an_error_with_the_number_that_fits(tmp_path: Path) -> None:
    script = tmp_path / "one_gpu.py"
    script.write_text(ONE_GPU)
    done = launch(
        *QUICK, "--output_dir", str(tmp_path / "runs"), config="accel_configs/ddp.yaml", script=script
    )
    assert done.code != 0
    said = "error: 2 processes, but this machine has 1 GPU\nhint: launch with --num_processes 1\n"
    assert done.err.count(said) == 1
    assert not (tmp_path / "runs").exists()


def test_fsdp1_without_a_gpu_says_which_key_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "fsdp1.yaml"
    config.write_text(FSDP1)
    done = launch(*QUICK, "--output_dir", str(tmp_path / "runs"), config=config)
    assert done.code != 0
    assert done.err.count("asks for FSDP1, which needs a GPU\nhint: write `fsdp_version: 2`") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.quick
def test_ranks_count_on_all_machines_and_gpus_on_one() -> None:
    ddp = find_strategy("ddp")
    for num_gpus in (0, 2):
        check_devices(Launch(ddp, 2, ()), num_gpus=num_gpus, local_processes=2)
    with pytest.raises(ValueError, match="8 processes, but this machine has 4 GPUs.*\n.* --num_processes 8$"):
        check_devices(Launch(on_nodes(ddp, 2), 16, ()), num_gpus=4, local_processes=8)


def test_a_launch_with_cpu_would_not_shard_and_says_so(tmp_path: Path) -> None:
    words = (*QUICK, "--output_dir", str(tmp_path / "runs"))
    done = launch(*words, config="accel_configs/fsdp_full_shard.yaml", launcher=("--cpu",))
    assert done.code != 0
    assert "asks for fsdp2 on 2 processes, but the launcher started single on 1" in done.err
    assert not (tmp_path / "runs").exists()


def test_a_comparison_refuses_a_precision_that_would_not_run(tmp_path: Path) -> None:
    for line, numerics, says in (
        (
            "mixed_precision: fp16",
            "aligned",
            "mixed precision is fp16, but --numerics aligned computes in bf16",
        ),
        ("mixed_precision: fp16", "fp32", "use --numerics fp16 for fp16, or remove"),
        ("fp16: true", "aligned", "mixed precision is fp16"),
        ("mixed_precision: fp8", "stock", "mixed precision fp8 is not supported: remove it"),
        ("mixed_precision: fp16", "stock", "mixed precision fp16 needs a GPU: on a CPU accelerate computes"),
    ):
        own = own_strategy(tmp_path, Path("accel_configs/ddp.yaml").read_text() + f"{line}\n")
        done = slm_here(
            "compare", "--strategy", own, "--numerics", numerics, "--model", "slm-1m", "--dry_run"
        )
        assert done.code == 2, line
        assert re.search(f"error: .*{re.escape(own)}: .*{re.escape(says)}", done.err), line


def test_the_launchers_own_precision_counts_as_the_yamls_does(tmp_path: Path) -> None:
    words = ("--output_dir", str(tmp_path / "runs"), *QUICK)
    ddp = "accel_configs/ddp.yaml"
    done = launch(*words, config=ddp, launcher=("--mixed_precision", "fp16"))
    assert done.code != 0
    assert "accelerate's --mixed_precision: mixed precision is fp16" in done.err
    in_variable = {
        "ACCELERATE_MIXED_PRECISION": "fp16"
    }  # of torchrun and plain python: the launcher sets its own
    done = run(sys.executable, "-m", "slm_toolkit.train", *words, env=in_variable)
    assert (done.code, "--numerics aligned computes in bf16" in done.err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_a_yaml_without_mixed_precision_computes_in_bf16_and_a_note_says_so(tmp_path: Path) -> None:
    config = tmp_path / "mixed.yaml"
    config.write_text(Path("accel_configs/ddp.yaml").read_text() + "mixed_precision: 'no'\n")
    done = launch(*QUICK, "--output_dir", str(tmp_path / "runs"), config=config)
    assert done.code == 0, done.err
    assert done.err.count("note: mixed_precision no has no effect: --numerics aligned computes in bf16") == 1
