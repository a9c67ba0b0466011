"""`slm train`: the launch of a strategy from any folder, and what is found wrong before torch is imported."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, own_strategy, record_under, run, slm

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.cli.main import _parser
from slm_toolkit.cli.train import launch_words, yaml_to_launch
from slm_toolkit.config.flags import config_from_args
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.launch.command_line import check_training, option
from slm_toolkit.strategy.strategy import find_strategy, read_strategy

DDP = str(ROOT / "accel_configs" / "ddp.yaml")
ENTRIES = {
    "slm train": ("slm", "train"),
    "slm compare": ("slm", "compare"),
    "slm launch": ("slm", "launch", "--config_file", DDP, "-m", "slm_toolkit.train"),
    "the script": (sys.executable, "-m", "slm_toolkit.train"),
}


@pytest.fixture
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which whoever imports torch ends with exit code 99."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("import os\nos.write(2, b'torch was imported')\nos._exit(99)\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def words_of(*typed: str) -> list[str]:
    """What `slm train` would launch."""
    args: argparse.Namespace = _parser("train").parse_args(["train", *typed])
    return launch_words(find_strategy(args.strategy), config_from_args(args), args)


def test_a_deepspeed_strategy_trains_from_any_folder_and_shows_its_command(tmp_path: Path) -> None:
    flags = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "2")
    done = slm("train", "--strategy", "ds_zero2", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    command = (
        f"accelerate launch --config_file {ROOT}/accel_configs/ds_zero2.yaml --num_processes 2 "
        f"-m slm_toolkit.train {' '.join(flags)}"
    )
    assert done.err.startswith(command + "\n")
    record = record_under(tmp_path)
    assert record["command"] == command
    assert (record["strategy"], record["zero_stage"], record["world_size"]) == ("ds_zero2", 2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_exit_code_is_that_of_the_rank_that_ended_first(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n")  # which only a rank finds out: accelerate's own code is 1
    done = slm("train", "--strategy", strategy, "--model", "slm-1m", "--dataset", "blank.txt", cwd=tmp_path)
    assert done.code == 2
    assert "error: blank.txt contains no text" in done.err
    assert done.err.splitlines()[-1].startswith("hint: lower --seq_len")


@pytest.mark.quick
def test_without_a_gpu_each_strategy_gets_the_ranks_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slm_toolkit.cli.train.gpus_here", tuple)  # also on a machine with GPUs
    mine = own_strategy(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 3\n")
    for strategy, count in {"ddp": "2", "single": "1", "fsdp_hybrid_shard": "4", mine: "3"}.items():
        words = words_of("--strategy", strategy)
        assert words[words.index("--num_processes") + 1] == count
    assert "--parallelism_config_dp_shard_size 2" in " ".join(words_of("--strategy", "fsdp_hybrid_shard"))
    rehearsed = words_of("--strategy", "ds_zero3", "--rehearse", "64")
    assert rehearsed[rehearsed.index("--num_processes") + 1] == "1"
    assert words_of()[:2] == ["--config_file", DDP]


@pytest.mark.quick
def test_with_gpus_there_is_a_rank_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_toolkit.cli.train.gpus_here", lambda: ("NVIDIA H200",) * 8)
    assert words_of("--strategy", "ddp")[2:4] == ["--num_processes", "8"]
    assert words_of("--strategy", "single")[2:4] == ["--num_processes", "1"]
    several = words_of("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")
    assert several[2:4] == ["--num_processes", "16"]
    planned = plan_launch(several)  # which reads them as `slm launch` does
    names = ("machine_rank", "num_machines", "main_process_ip")
    assert [option(planned.words, name) for name in names] == ["1", "2", "10.0.0.1"]


@pytest.mark.quick
def test_a_deepspeed_json_is_launched_by_a_yaml_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    path = yaml_to_launch(find_strategy(str(file)), tmp_path / "runs", 2)
    assert path == tmp_path / "runs" / "launch-mine" / "mine.yaml"
    launched = read_strategy(path)
    assert (launched.name, launched.zero_stage, launched.num_processes) == ("mine", 2, 2)
    assert launched.deepspeed_config == find_strategy(str(file)).deepspeed_config


def test_help_shows_every_flag_without_torch(without_torch: dict[str, str]) -> None:
    done = slm("train", "--help", "all", env=without_torch)
    assert done.code == 0, done.err
    assert all(re.search(rf"--{name}\b", done.out) for name in FLAGS.keys() - {"parity"})
    assert "examples:\n  slm train --model slm-1m --max_steps 20" in done.out
    of_script = run(sys.executable, "-m", "slm_toolkit.train", "--help", env=without_torch)
    assert of_script.code == 0, of_script.err
    assert "--per_device_train_batch_size" in of_script.out


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_shell_that_allows_too_few_open_files_is_told(entry: str, without_torch: dict[str, str]) -> None:
    """torch's ranks would wait an hour for each other without a word."""
    program, *arguments = ENTRIES[entry]
    words = [str(Path(sys.executable).parent / program), *arguments]
    done = run("sh", "-c", 'ulimit -n 16; exec "$@"', "sh", *words, env=without_torch)
    assert done.code == 2
    error = (
        "error: this shell allows only 16 open files at a time\nhint: raise the limit with `ulimit -n 1024`\n"
    )
    assert done.err.endswith(error)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_unsupported_version_or_an_odd_number_of_threads_is_told(
    entry: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "transformers-5.9.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 5.9.0\n"
    (tmp_path / "transformers-5.9.0.dist-info" / "METADATA").write_text(metadata)
    older = {"PYTHONPATH": os.pathsep.join((str(tmp_path), without_torch["PYTHONPATH"]))}
    program, *arguments = ENTRIES[entry]
    words = [str(Path(sys.executable).parent / program), *arguments]
    done = run(*words, env=older)
    assert (done.code, done.err) == (
        2,
        "error: slm_toolkit needs transformers>=5.10.1, not 5.9.0\n"
        "hint: install what is needed; SLM_ANY_VERSION=1 tries what is installed\n",
    )
    done = run(*words, "--seq_len", "1", env=older | {"SLM_ANY_VERSION": "1"})
    assert done.err.startswith("error: --seq_len is 1"), done.err
    done = run(*words, env=without_torch | {"OMP_NUM_THREADS": "abc"})
    assert (done.code, done.err) == (
        2,
        "error: OMP_NUM_THREADS is 'abc'\nhint: set it to a whole number, or unset it\n",
    )


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dataset nowhere.txt", "no such file: nowhere.txt\nhint: paths are relative to"),
        ("--dataset data/2026/clean", "no such file: data/2026/clean"),
        ("--dataset here.txt --eval_steps 5 --eval_dataset gone/*.jsonl", "no such file: gone/*.jsonl"),
        ("--dataset here.txt --tokenizer_name ./gone", "no such tokenizer folder: ./gone"),
        ("--model slm1m", "unknown model 'slm1m'\nhint: did you mean slm-1m?"),
        ("--model gone/config.json", "gone/config.json"),
        ("--seq_len 0", "--seq_len is 0: 2 to 16777216"),
        ("--seq_len 100000000", "--seq_len is 100000000: 2 to 16777216"),
        ("--batch_size 4", "unknown: --batch_size 4\nhint: --per_device_train_batch_size N"),
    ],
)
def test_what_is_wrong_is_told_before_torch_is_imported(
    entry: str, flags: str, says: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    (tmp_path / "here.txt").write_text("text")
    words = ENTRIES[entry]
    if words[0] == "slm":
        done = slm(*words[1:], *flags.split(), cwd=tmp_path, env=without_torch)
    else:
        done = run(*words, *flags.split(), cwd=tmp_path, env=without_torch)
    assert done.code == 2, done.err
    assert done.err.startswith("error: ")
    assert says in done.err
    assert done.err.count("error:") == done.err.count("hint:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here.txt"]


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_an_unknown_strategy_is_told_before_torch_is_imported(
    verb: str, without_torch: dict[str, str]
) -> None:
    done = slm(verb, "--strategy", "ddpp", env=without_torch)
    assert done.code == 2, done.err
    assert done.err.startswith("error: unknown strategy 'ddpp'\nhint: did you mean ddp?")
    done = slm(verb, "--strategy", "ds_zero3", "--kernels", "graphs", env=without_torch)
    assert "--kernels graphs records CUDA graphs, which need every parameter to stay" in done.err


@pytest.mark.quick
def test_what_only_the_hub_can_know_passes() -> None:
    hub = RunConfig(dataset="HuggingFaceFW/fineweb-edu", model="org/nowhere", tokenizer_name="gpt2")
    check_training([hub])
    check_training([RunConfig(dataset="imdb")])


@pytest.mark.quick
def test_a_rehearsal_may_name_the_clusters_files() -> None:
    check_training([RunConfig(rehearse=8, dataset="/cluster/data/*.jsonl")])
    with pytest.raises(ValueError, match="no such file"):
        check_training([RunConfig(dataset="/cluster/data/*.jsonl")])


def test_under_accelerate_launch_it_is_said_once(tmp_path: Path) -> None:
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = (accelerate, "launch", "--main_process_port", "0", "--config_file", DDP, "-m")
    done = run(*command, "slm_toolkit.train", "--batch_size", "4", cwd=tmp_path)
    assert done.code == 1  # accelerate's own
    assert done.err.count("error: unknown: --batch_size 4") == 1
