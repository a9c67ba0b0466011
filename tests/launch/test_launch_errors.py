"""Launches that would silently do something else end with one line that says so."""

import sys
from pathlib import Path

import pytest
from conftest import launch, own_strategy, run, slm, slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.peers.launch_info import Launch, check_devices, check_environment
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import find_strategy, on_nodes, read_strategy

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


def test_the_command_of_the_readme_works_as_written_without_a_gpu(tmp_path: Path) -> None:
    # Only the model, the length and the folder are named, to be quick: flags after the command as written.
    done = launch(*QUICK, "--output_dir", str(tmp_path), config="accel_configs/fsdp_shard_grad_op.yaml")
    assert done.code == 0, done.err
    assert "record: " in done.err


def test_fewer_gpus_than_processes_is_an_error_with_the_number_that_fits(tmp_path: Path) -> None:
    script = tmp_path / "one_gpu.py"
    script.write_text(ONE_GPU)
    done = launch(
        *QUICK, "--output_dir", str(tmp_path / "runs"), config="accel_configs/ddp.yaml", script=script
    )
    assert done.code != 0
    said = "error: 2 processes but 1 GPU on this machine\nhint: launch with --num_processes 1\n"
    assert done.err.count(said) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.quick
def test_on_several_machines_the_number_counts_the_ranks_of_all() -> None:
    launched = Launch(on_nodes(find_strategy("ddp"), 2), 16, ())
    with pytest.raises(ValueError, match="8 processes but 4 GPUs.*\n.* --num_processes 8$"):
        check_devices(launched, num_gpus=4, local_processes=8)


@pytest.mark.quick
def test_machines_that_count_ranks_differently_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first said 4 and started 2 ranks, the second said 2 and started 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    launched = Launch(on_nodes(find_strategy("ddp"), 2), 4, ())
    with pytest.raises(
        ValueError, match="asks for ddp on 4 processes, .* ddp on 3: .*\nhint: give every machine the same"
    ):
        check_environment(launched)


@pytest.mark.quick
def test_enough_gpus_or_none_at_all_are_no_error() -> None:
    check_devices(Launch(find_strategy("ddp"), 2, ()), num_gpus=0, local_processes=2)
    check_devices(Launch(find_strategy("ddp"), 2, ()), num_gpus=2, local_processes=2)


def test_fsdp1_without_a_gpu_says_which_key_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "fsdp1.yaml"
    config.write_text(FSDP1)
    done = launch(*QUICK, "--output_dir", str(tmp_path / "runs"), config=config)
    assert done.code != 0
    assert done.err.count("asks for FSDP1, which needs a GPU\nhint: write `fsdp_version: 2`") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("strategy", ["fsdp_full_shard", "ds_zero2"])
def test_a_launch_with_cpu_would_not_shard_and_says_so(strategy: str, tmp_path: Path) -> None:
    config = f"accel_configs/{strategy}.yaml"
    done = launch(*QUICK, "--output_dir", str(tmp_path / "runs"), config=config, launcher=("--cpu",))
    assert done.code != 0
    assert "but the launcher started single on 1: nothing would be sharded" in done.err
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_is_not_the_one_asked_for_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "no_fsdp.py"  # what accelerate does by itself on a machine without a GPU
    script.write_text(
        "from accelerate import Accelerator\nfrom slm_toolkit import train\n"
        "from slm_toolkit.run import setup\n"
        "setup.start_accelerator = lambda launch, config, project_dir: Accelerator(cpu=True)\ntrain.main()\n"
    )
    config = "accel_configs/fsdp_full_shard.yaml"
    done = launch(*QUICK, "--output_dir", str(tmp_path / "runs"), config=config, script=script)
    assert done.code != 0
    assert "engine 'fsdp2' requested, 'ddp' running" in done.err
    assert not (tmp_path / "runs").exists()


def test_plain_python_trains_in_one_process(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "slm_toolkit.train", *QUICK, "--output_dir", str(tmp_path))
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("line", "numerics", "says"),
    [
        (
            "mixed_precision: fp16",
            "aligned",
            "mixed precision is fp16, but --numerics aligned computes in bf16",
        ),
        (
            "mixed_precision: fp16",
            "fp32",
            "--numerics fp32 computes in fp32: use --numerics fp16 for fp16, or remove",
        ),
        ("mixed_precision: fp16", "pure_bf16", "--numerics pure_bf16 computes in bf16"),
        ("fp16: true", "aligned", "mixed precision is fp16"),
        (
            "mixed_precision: bf16",
            "fp32",
            "mixed precision is bf16, but --numerics fp32 computes in fp32",
        ),
        (
            "mixed_precision: fp8",
            "stock",
            "mixed precision fp8 is not supported: remove it; --fp8 tensorwise",
        ),
        (
            "mixed_precision: fp16",
            "stock",
            "mixed precision fp16 needs a GPU: on a CPU accelerate computes",
        ),
    ],
)
def test_a_comparison_refuses_a_precision_that_would_not_run(
    tmp_path: Path, line: str, numerics: str, says: str
) -> None:
    own = own_strategy(tmp_path, Path("accel_configs/ddp.yaml").read_text() + f"{line}\n")
    done = slm("compare", "--strategy", own, "--numerics", numerics, "--model", "slm-1m", "--dry_run")
    assert done.code == 2, done.out
    (told,) = (line for line in done.err.splitlines() if line.startswith("error: "))
    assert f"{own}: " in told
    assert says in told


@pytest.mark.quick
def test_precisions_that_can_run_are_not_refused(tmp_path: Path) -> None:
    own = read_strategy(Path(own_strategy(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: fp16\n")))
    assert contradictions(own, RunConfig(numerics="stock")) == []
    zero = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "bf16": {"enabled": False}}
    in_json = read_strategy(Path(own_strategy(tmp_path, "", zero, name="zero")))
    assert contradictions(in_json, RunConfig(numerics="stock")) == []
    (problem,) = contradictions(in_json, RunConfig(numerics="aligned"))
    assert "mixed precision is fp16, but --numerics aligned computes in bf16" in problem


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


@pytest.mark.quick
def test_compare_plans_the_rest() -> None:
    done = slm_here("compare", "--kernels", "graphs", "--dry_run")
    assert done.code == 0, done.err
    assert done.out.count("accelerate launch") == 3
    left_out = [line.split(": ")[1] for line in done.err.splitlines() if line.startswith("left out")]
    assert left_out == ["fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero3"]
