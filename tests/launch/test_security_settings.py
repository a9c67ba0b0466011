"""What somebody else's accelerate YAML or DeepSpeed JSON may not do: run, import, contact, overwrite."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, own_strategy, run, slm

from slm_toolkit.strategy.passed_on import JSON_SETTINGS, refused_of_json, refused_of_yaml

FLAGS = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "2", "--output_dir", "runs")
SMALL = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1},
}
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))


def evil_json(folder: Path) -> dict:
    """A DeepSpeed JSON that overwrites a file, writes outside of the run's folder, and runs a module."""
    (folder / "precious").write_text("precious")
    (folder / "evilmod.py").write_text(f"open({str(folder / 'imported')!r}, 'w')\nX = object\n")
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(folder / "precious")}
    return {
        **SMALL,
        "flops_profiler": profiler,
        "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "../outside"},
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["evilmod.X"],
        },
    }


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            (
                *(ACCELERATE, "launch", "--num_processes", "1", "--use_deepspeed"),
                *("--deepspeed_config_file", "mine.json", "-m", "slm_toolkit.train"),
            ),
            id="json",
        ),
        pytest.param(("slm", "compare", "--strategy", "mine.json", "--num_processes", "1"), id="compare"),
        pytest.param(("slm", "launch", "--config_file", "mine.yaml", "-m", "slm_toolkit.train"), id="launch"),
    ],
)
def test_a_deepspeed_json_overwrites_writes_and_imports_nothing(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    own_strategy(tmp_path, "num_processes: 1\n", evil_json(tmp_path))
    words = (ACCELERATE.replace("accelerate", "slm"), *command[1:]) if command[0] == "slm" else command
    done = run(*words, *FLAGS, cwd=tmp_path)
    assert done.code != 0
    assert (tmp_path / "precious").read_text() == "precious"
    for made in ("imported", "logs", "outside"):
        assert not (tmp_path / made).exists()
    for key, value in (
        ("flops_profiler.output_file", str(tmp_path)[:12]),  # a long value is cut short
        ("csv_monitor.enabled", "true"),
        ("torch_autocast.lower_precision_safe_modules", '["evilmod.X"]'),
    ):
        (line,) = [line for line in done.err.splitlines() if f"{key} is " in line]
        assert "mine.json: " in line
        assert value in line
        assert "Change: remove " in line
    assert "nothing is launched" in done.err
    assert "`slm doctor --strategy " in done.err


@pytest.mark.skipif(shutil.which("ssh") is None, reason="DeepSpeed's launcher asks ssh first")
def test_a_hostfile_runs_no_command(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("-oProxyCommand=touch${IFS}pwned slots=1\n")
    text = (
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
        "  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: pdsh\n"
    )
    own_strategy(tmp_path, text)
    done = slm("compare", "--strategy", "mine.yaml", *FLAGS, cwd=tmp_path)
    assert not (tmp_path / "pwned").exists()
    assert done.code == 2
    assert 'deepspeed_config.deepspeed_hostfile is "hosts"' in done.err
    assert 'deepspeed_config.deepspeed_multinode_launcher is "pdsh"' in done.err


@pytest.mark.parametrize("verb", ["compare", "launch"])
def test_mpirun_is_not_started_by_a_yaml(verb: str, tmp_path: Path) -> None:
    """By an `mpirun` that touches a file."""
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) 5'\ntouch {tmp_path}/pwned\n")
    (tmp_path / "mpirun").chmod(0o755)
    text = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"
    own_strategy(tmp_path, f"{text}mpirun_config: {{mpirun_hostfile: hosts}}\n")
    words = {
        "compare": ("--strategy", "mine.yaml"),
        "launch": ("--config_file", "mine.yaml", "-m", "slm_toolkit.train"),
    }
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = slm(verb, *words[verb], *FLAGS, cwd=tmp_path, env={"PATH": path})
    assert not (tmp_path / "pwned").exists()
    assert done.code == 2
    assert 'mpirun_config.mpirun_hostfile is "hosts"' in done.err
    assert "it would run commands on other hosts" in done.err


@pytest.mark.parametrize(
    "text",
    [
        "megatron_lm_config: {log_dir: elsewhere, redirects: '3'}",
        "main_training_function: {log_dir: elsewhere, redirects: '3'}",
    ],
)
def test_a_section_sets_no_option_of_torchrun(text: str, tmp_path: Path) -> None:
    """accelerate copies each key of a section to the option of that name: here torchrun's folder of logs."""
    own_strategy(tmp_path, f"distributed_type: MULTI_GPU\nnum_processes: 2\n{text}\n")
    done = slm("compare", "--strategy", "mine.yaml", *FLAGS, cwd=tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    assert done.code == 2
    assert f"mine.yaml: {text.partition(':')[0]}" in done.err


def test_no_file_chooses_the_host_that_a_launch_connects_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        where = f"main_process_ip: 127.0.0.1\nmain_process_port: {server.getsockname()[1]}\n"
        own_strategy(tmp_path, f"distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\n{where}")
        words = ("launch", "--config_file", "mine.yaml", "--machine_rank", "1", "-m", "slm_toolkit.train")
        done = slm(*words, *FLAGS, cwd=tmp_path, env={"SLM_PATIENCE_SECONDS": "2"}, timeout=60)
        with pytest.raises(TimeoutError):  # nobody came
            server.accept()
    assert done.code == 2
    assert "error: no --main_process_ip on the command line" in done.err


def test_compare_on_one_machine_starts_no_other(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\nmain_process_ip: 192.0.2.1\n"
    own_strategy(tmp_path, text)
    done = slm("compare", "--strategy", "mine.yaml", "--dry_run", *FLAGS, cwd=tmp_path)
    assert done.code == 2
    assert "mine.yaml: num_machines is 2, but a comparison without Slurm uses one machine" in done.err


# what must still be passed on


@pytest.mark.quick
def test_the_usual_examples_are_passed_on() -> None:
    """Examples of transformers' documentation in one JSON, and what `accelerate config` writes."""
    usual = ROOT / "tests" / "usual_configs"
    assert refused_of_json(json.loads((usual / "transformers.json").read_text())) == []
    assert refused_of_yaml(yaml.safe_load((usual / "accelerate_config.yaml").read_text())) == []


EVIL = ("/etc/passwd", "evilmod.X", "10.0.0.1", ["evilmod.X"], {"enabled": True, "output_path": "/x"})


@pytest.mark.quick
@pytest.mark.parametrize("value", EVIL, ids=str)
def test_keys_that_name_a_path_a_module_or_a_host_take_no_such_value(value: object) -> None:
    for key in ("tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "data_efficiency"):
        content = {key: value if isinstance(value, dict) else {"enabled": True, "output_path": value}}
        assert refused_of_json(content), key
    for key in ("a_key_of_a_later_version", "nebula", "datastates_ckpt", "hooks"):
        assert refused_of_json({key: value}), key
        assert refused_of_json({"zero_optimization": {key: value}}), key
        for section in ("aio", "checkpoint", "compile", "tensor_parallel"):  # unlisted: numbers and switches
            assert refused_of_json({section: {key: value}}), (section, key)
    assert key not in JSON_SETTINGS
    for key in (
        "tpu_name",
        "commands",
        "command_file",
        "rdzv_backend",
        "dynamo_backend",
        "megatron_lm_config",
    ):
        assert refused_of_yaml({key: value}), key
    for section in (
        "fsdp_config",
        "deepspeed_config",
        "parallelism_config",
        "mpirun_config",
        "dynamo_config",
    ):
        for key in ("rdzv_endpoint", "run_path", "training_script", "master_addr"):
            assert refused_of_yaml({section: {key: value}}), (section, key)
