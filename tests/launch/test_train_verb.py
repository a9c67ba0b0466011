"""`slm train`: the launch of a strategy from any folder, and what is found wrong before torch is imported."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, own_strategy, record_under, run, slm, slm_here

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.cli.main import _parser
from slm_toolkit.cli.train import launch_words
from slm_toolkit.config.flags import config_from_args
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.launch.command_line import check_training, option
from slm_toolkit.strategy.strategy import find_strategy

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


def words_to(entry: str) -> list[str]:
    program, *arguments = ENTRIES[entry]
    return [str(Path(sys.executable).parent / program), *arguments]


def words_of(*typed: str) -> list[str]:
    """What `slm train` would launch."""
    args = _parser("train").parse_args(["train", *typed])
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


def test_help_shows_every_flag_without_torch(without_torch: dict[str, str]) -> None:
    done = slm("train", "--help", "all", env=without_torch)
    assert done.code == 0, done.err
    assert all(re.search(rf"--{name}\b", done.out) for name in FLAGS.keys() - {"parity"})


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_environment_that_cannot_work_is_told_before_torch_is_imported(
    entry: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    """torch's ranks would wait an hour for each other without a word, with too few open files."""
    (tmp_path / "transformers-5.9.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 5.9.0\n"
    (tmp_path / "transformers-5.9.0.dist-info" / "METADATA").write_text(metadata)
    older = {"PYTHONPATH": os.pathsep.join((str(tmp_path), without_torch["PYTHONPATH"]))}
    words = words_to(entry)
    few = ("sh", "-c", 'ulimit -n 16; exec "$@"', "sh")
    for command, env, says in (
        ([*few, *words], without_torch, "error: this shell allows only 16 open files at a time\nhint: "),
        (words, older, "error: slm_toolkit needs transformers>=5.10.1, not 5.9.0\nhint: "),
        ([*words, "--seq_len", "1"], older | {"SLM_ANY_VERSION": "1"}, "error: --seq_len is 1"),
        (words, without_torch | {"OMP_NUM_THREADS": "abc"}, "error: OMP_NUM_THREADS is 'abc'\nhint: "),
    ):
        done = run(*command, env=env)
        assert done.code == 2
        assert says in done.err


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dataset nowhere.txt", "no such file: nowhere.txt\nhint: paths are relative to"),
        ("--dataset here.txt --eval_steps 5 --eval_dataset gone/*.jsonl", "no such file: gone/*.jsonl"),
        ("--dataset here.txt --tokenizer_name ./gone", "no such tokenizer folder: ./gone"),
        ("--model slm1m", "unknown model 'slm1m'\nhint: did you mean slm-1m?"),
        ("--seq_len 100000000", "--seq_len is 100000000: at most 16,777,216"),
        ("--batch_size 4", "unknown: --batch_size 4\nhint: --per_device_train_batch_size N"),
    ],
)
def test_what_is_wrong_is_told_before_torch_is_imported(
    entry: str, flags: str, says: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    (tmp_path / "here.txt").write_text("text")
    done = run(*words_to(entry), *flags.split(), cwd=tmp_path, env=without_torch)
    assert done.code == 2, done.err
    assert done.err.startswith("error: ")
    assert says in done.err
    assert done.err.count("error:") == done.err.count("hint:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here.txt"]


@pytest.mark.quick
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_an_unknown_or_unfit_strategy_is_told(verb: str) -> None:
    for flags, says in (
        (("ddpp",), "error: unknown strategy 'ddpp'\nhint: did you mean ddp?"),
        (("ds_zero3", "--kernels", "graphs"), "CUDA graphs need every parameter to stay"),
    ):
        done = slm_here(verb, "--strategy", *flags)
        assert (done.code, says in done.err) == (2, True)


@pytest.mark.quick
def test_what_only_the_hub_or_a_cluster_can_know_passes() -> None:
    hub = RunConfig(dataset="HuggingFaceFW/fineweb-edu", model="org/nowhere", tokenizer_name="gpt2")
    check_training([hub, RunConfig(dataset="imdb")])
    check_training([RunConfig(rehearse=8, dataset="/cluster/data/*.jsonl")])
    with pytest.raises(ValueError, match="no such file"):
        check_training([RunConfig(dataset="/cluster/data/*.jsonl")])


def test_under_accelerate_launch_it_is_said_once(tmp_path: Path) -> None:
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = (accelerate, "launch", "--main_process_port", "0", "--config_file", DDP, "-m")
    done = run(*command, "slm_toolkit.train", "--batch_size", "4", cwd=tmp_path)
    assert done.code == 1  # accelerate's own
    assert done.err.count("error: unknown: --batch_size 4") == 1
