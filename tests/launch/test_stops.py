"""A run that is stopped, or stops itself: what it says, with which exit code, and how it goes on."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import ENV, ROOT, launch, left_over, planted, record_under
from training_faults import launch_with_fault

from slm_toolkit.compare.local import last_step_of


def words(folder: Path, *more: str) -> tuple[str, ...]:
    flags = ("--model", "slm-1m", "--seq_len", "32", "--kernels", "fused", "--run_name", "run")
    return (*flags, "--output_dir", str(folder), *more)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.quick), "ds_zero3"])
def test_sigterm_saves_and_exits_with_143_and_the_run_goes_on(strategy: str, tmp_path: Path) -> None:
    """As Slurm sends it, to every process, data loaders, too; `slm launch` hands the ranks' code on."""
    config, folder = str(ROOT / f"accel_configs/{strategy}.yaml"), tmp_path / "run" / "checkpoints"
    slm = [str(Path(sys.executable).with_name("slm")), "launch", "--main_process_port", "0"]
    flags = words(tmp_path, "--save_steps", "5", "--max_steps", "100000", "--dataloader_num_workers", "1")
    command = [*slm, "--config_file", config, "-m", "slm_toolkit.train", *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (folder / "step_5").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 4, "two ranks, each with one that loads data"
    for each in (process, *others):
        each.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + 15
    found = re.search(r"error: SIGTERM after step (\d+) of 100000\nhint: (.*)\n", err)
    step = int(found[1])
    assert found[2] == f"--resume_from_checkpoint latest resumes from {folder}/step_{step}"
    assert "Traceback" not in err
    assert left_over(tmp_path) == []
    reason = json.loads((tmp_path / "run" / "record.json").read_text())["reason"]
    assert reason == f"SIGTERM after step {step} of 100000"
    resume = ("--resume_from_checkpoint", "latest", "--max_steps", str(step + 1))
    done = launch(*words(tmp_path, *resume), config=config)
    assert done.code == 0, done.err
    assert record_under(tmp_path)["first_step"] == step


def start(*command: str, terminal: int | None = None) -> subprocess.Popen[str]:
    """A session of its own, as a shell makes one for a command, where Ctrl-C is not ignored; with `terminal`
    that is where it reads from, and what sends it a Ctrl-C."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's background jobs, as tests may be, ignore it
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENV,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
    )


def launched(strategy: str, *flags: str, terminal: int | None = None) -> subprocess.Popen[str]:
    slm = [str(Path(sys.executable).with_name("slm")), "launch", "--main_process_port", "0"]
    config = ("--config_file", str(ROOT / f"accel_configs/{strategy}.yaml"))
    return start(*slm, *config, "-m", "slm_toolkit.train", *flags, terminal=terminal)


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_in_a_terminal_saves_and_exits_with_130(tmp_path: Path) -> None:
    """To the launcher alone, which passes it on to ranks in sessions of their own, and their data loaders."""
    folder = tmp_path / "run" / "checkpoints"
    flags = words(tmp_path, "--save_steps", "5", "--max_steps", "100000", "--dataloader_num_workers", "1")
    ours, terminal = os.openpty()
    process = launched("ddp", *flags, terminal=terminal)
    wait_for((folder / "step_5").exists, process)
    os.write(ours, b"\x03")
    said, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(terminal)
    assert process.returncode == 128 + 2, said
    step = int(re.search(r"error: Ctrl-C \(SIGINT\) after step (\d+) of 100000\n", said)[1])
    lines = [line for line in said.splitlines() if not line.startswith(("checkpoint: ", "step "))]
    assert lines[-1] == f"hint: --resume_from_checkpoint latest resumes from {folder}/step_{step}"
    assert len(lines) == 5, "the command, weights and tokenizer, what a step is, error and hint"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_of_one_process_ends_after_the_step_whoever_gets_it(to_all: bool, tmp_path: Path) -> None:
    """A terminal sends it to launcher and rank, who then gets it twice; `kill -INT` to the launcher alone."""
    more = ("--save_steps", "5") if to_all else ()
    process = launched("single", *words(tmp_path, "--max_steps", "100000", *more))
    wait_for(lambda: last_step_of(tmp_path / "run"), process)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + 2
    step = int(re.search(r"\nerror: Ctrl-C \(SIGINT\) after step (\d+) of 100000\nhint: ", said)[1])
    if to_all:
        assert said.endswith(f"latest resumes from {tmp_path}/run/checkpoints/step_{step}\n")
    else:
        hint = "nothing was saved; with --save_steps N, a stopped run saves a checkpoint"
        assert said.endswith(f"hint: {hint}\n")
    assert "Traceback" not in said


def test_a_second_ctrl_c_ends_a_run_that_hangs(tmp_path: Path) -> None:
    """A stopped rank hears nothing, and torch's launcher would wait 30 s for it."""
    process = launched("ddp", *words(tmp_path, "--save_steps", "5", "--max_steps", "100000"))
    wait_for((tmp_path / "run" / "checkpoints" / "step_5").exists, process)
    psutil.Process(process.pid).children()[-1].suspend()
    began = time.monotonic()
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.5)
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 128 + 2
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard", "ds_zero1"])
def test_a_step_without_numbers_is_left_out_if_so_asked(strategy: str, tmp_path: Path) -> None:
    flags = ("--on_bad_step", "skip", "--max_steps", "5", "--save_steps", "2")
    skipping = launch_with_fault(tmp_path, *flags, strategy=strategy, fault="nan", step=3)
    assert skipping.code == 0, skipping.err
    assert skipping.record["skipped_steps"] == [3]
    assert [loss is None for loss in skipping.record["losses"]] == [False, False, True, False, False]
    folder = tmp_path / "runs" / "run" / "checkpoints"
    manifests = [json.loads((folder / f"step_{step}" / "checkpoint.json").read_text()) for step in (2, 4)]
    assert [manifest["optimizer_steps"] for manifest in manifests] == [2, 3]


def test_a_step_without_numbers_ends_the_run_and_names_its_sequences(tmp_path: Path) -> None:
    stopping = launch_with_fault(tmp_path, "--max_steps", "5", "--save_steps", "2", fault="nan", step=3)
    assert stopping.code == 1
    run = tmp_path / "runs" / "run"
    cause = f"step 3: the loss is nan on rank 1; its sequences: {run}/bad-step-3.json"
    assert stopping.messages == [f"error: {cause}"]
    assert stopping.record["reason"] == cause
    assert stopping.hint.startswith(
        f"--resume_from_checkpoint latest resumes from {run}/checkpoints/step_2; lower --learning_rate"
    )
    assert stopping.message_seconds < 60
    ranks = json.loads((run / "bad-step-3.json").read_text())["ranks"]
    tokens = [tuple(sequence) for rank in ranks for sequence in rank["sequences"]]
    assert len(set(tokens)) == 2 * 4
    assert [(rank["is_bad"], rank["loss"] is None) for rank in ranks] == [(False, False), (True, True)]
    assert left_over(tmp_path) == []


def test_gradients_without_numbers_end_the_run_although_the_losses_are_fine(tmp_path: Path) -> None:
    """On a stream of text, which is read once: the file has the words of its sequences."""
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(400)))
    flags = ("--dataset", str(text), "--streaming", "true")
    flags += ("--on_bad_step", "skip", "--max_steps", "20")
    done = launch_with_fault(tmp_path, *flags, fault="infinite gradient", step=2)
    assert done.code == 1
    (message,) = done.messages
    assert re.fullmatch(
        r"error: step 11: 10 steps in a row were bad: the norm of the gradients is (inf|nan), the loss "
        r"\d\.\d+ on rank 0 and \d\.\d+ on rank 1; or the loss of a micro-step is above 11\.9"
        r"; its sequences: .*/bad-step-11\.json",  # 11.9 = 2 ln(384)
        message,
    )
    ranks = json.loads((tmp_path / "runs/run/bad-step-11.json").read_text())["ranks"]
    sequences = [sequence for rank in ranks for sequence in rank["sequences"]]
    assert len(set(sequences)) == 2 * 4
    assert all(re.search(r"line \d+|of a text", sequence) for sequence in sequences), sequences


def test_a_full_disk_keeps_the_last_checkpoint_and_names_rank_and_place(tmp_path: Path) -> None:
    """A limit on the size of files that rank 1's share, and only that, exceeds: errno 27."""
    first = words(tmp_path, "--save_steps", "2", "--max_steps", "2")
    assert launch(*first, config="accel_configs/ddp.yaml").code == 0
    limited = "import os, resource\nif os.environ.get('RANK') == '1':\n"
    limited += "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    more = words(tmp_path, "--save_steps", "2", "--max_steps", "6", "--resume_from_checkpoint", "latest")
    done = launch(*more, config="accel_configs/ddp.yaml", env=planted(tmp_path, limited))
    assert done.code == 1
    folder = tmp_path / "run" / "checkpoints"
    (told,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert told.startswith("error: the checkpoint could not be written: rank 1: ")
    assert "File too large (os error 27)" in told
    assert re.search(rf"{folder}/\.step_4\.\w+\.unfinished/rank_1\.safetensors", told)
    assert [path.name for path in folder.iterdir()] == ["step_2"]
    done = launch(*more, config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    assert record_under(tmp_path)["first_step"] == 2


@pytest.mark.parametrize(
    ("launcher", "strategy", "moments"),
    [
        pytest.param("accelerate", "single", (0.0, 2.0), marks=pytest.mark.quick),
        ("slm", "ddp", (0.7, 3.5)),
        pytest.param("accelerate", "ddp", (0.0, 0.7, 2.0, 3.5), marks=pytest.mark.slow),
        pytest.param("slm", "single", (0.0, 0.7, 2.0, 3.5), marks=pytest.mark.slow),
    ],
)
def test_a_launcher_that_is_killed_while_its_ranks_start_leaves_none(
    launcher: str, strategy: str, moments: tuple[float, ...], tmp_path: Path
) -> None:
    """At moments of the three seconds in which they import torch, and of those after."""
    command = [str(Path(sys.executable).with_name(launcher)), "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / f"accel_configs/{strategy}.yaml"), "-m", "slm_toolkit.train"]
    command += words(tmp_path, "--max_steps", "100000")
    for seconds in moments:
        process = start(*command)
        deadline = time.monotonic() + 120
        while len(left_over(tmp_path)) < (2 if strategy == "single" else 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(seconds)
        process.kill()
        deadline = time.monotonic() + 40
        while (left := left_over(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for rank in left:
            rank.kill()
        process.communicate()
        assert left == [], f"killed {seconds} s after the ranks began"


@pytest.mark.quick
def test_a_rank_that_starts_when_its_launcher_is_gone_ends_at_once(tmp_path: Path) -> None:
    train = (sys.executable, "-m", "slm_toolkit.train", *words(tmp_path, "--max_steps", "100000"))
    late = ("sh", "-c", 'export ACCELERATE_DYNAMO_MODE=default; (sleep 0.5; exec "$@") & exit', "sh", *train)
    said, _ = start(*late).communicate(timeout=60)
    assert said == "error: the launcher ended while this process started\n"
    script = ("env", "ACCELERATE_DYNAMO_MODE=default", "sh", "-c", '"$@"; exit $?', "sh", *train[:-1], "1")
    of_a_script = start(*script)
    said, _ = of_a_script.communicate(timeout=120)
    assert of_a_script.returncode == 0, said
