"""What a run and a comparison write in their folder: never through a link, and one training at a time."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ENV, ROOT, record_under, run, slm

from slm_toolkit.base.safe_files import hold

TINY = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "1", "--output_dir", "runs")
COMPARE = ("compare", "--strategy", "ddp", *TINY)
TRAIN = (sys.executable, "-m", "slm_toolkit.train", "--run_name", "run", *TINY)
PATH = {"PYTHONPATH": str(ROOT)}


def test_links_in_the_folders_of_a_comparison_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victims = [outside / name for name in ("log.txt", "progress.new", "ddp.yaml")]
    for victim in victims:
        victim.write_text("precious")
    assert slm(*COMPARE, cwd=tmp_path).code == 0
    (folder,) = [path.parent for path in tmp_path.glob("runs/*/record.json")]
    shutil.rmtree(folder / "launch")
    (folder / "log.txt").unlink()
    (folder / "log.txt").symlink_to(outside / "log.txt")
    (folder / "progress.new").symlink_to(outside / "progress.new")
    (folder / "launch").symlink_to(outside)
    done = slm(*COMPARE, "--force", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {victim.read_text() for victim in victims} == {"precious"}
    assert sorted(outside.iterdir()) == sorted(victims)
    assert not (folder / "launch").is_symlink()
    assert (folder / "launch" / "ddp.yaml").is_file()


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_linked_lock_is_refused(command: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock = tmp_path / "runs" / (".compare.lock" if command == "compare" else "run/.train.lock")
    lock.parent.mkdir(parents=True)
    lock.symlink_to(victim)
    done = slm(*COMPARE, cwd=tmp_path) if command == "compare" else run(*TRAIN, cwd=tmp_path)
    assert done.code == 2
    assert re.search(rf"error: can't write \S*{lock.name}: ", done.err)
    assert victim.read_text() == "precious"


def test_a_second_training_in_a_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """As of a job that is queued again while the old one still lives."""
    long = (*TRAIN, "--kernels", "fused", "--max_steps", "100000")
    long += ("--save_steps", "10", "--resume_from_checkpoint", "auto")
    first = subprocess.Popen(long, cwd=tmp_path, env={**ENV, **PATH}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs/run/checkpoints/step_10").exists():
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.1)
    second = run(*long, cwd=tmp_path)
    assert second.code == 2
    assert f"error: process {first.pid} on {os.uname().nodename} is training in " in second.err
    assert first.poll() is None
    first.kill()
    first.wait()
    step = max(int(path.name[5:]) for path in (tmp_path / "runs/run/checkpoints").glob("step_*"))
    again = (*TRAIN, "--max_steps", str(step + 1), "--resume_from_checkpoint", "auto")
    third = run(*again, cwd=tmp_path)
    assert third.code == 0, third.err
    assert record_under(tmp_path)["first_step"] == step


def test_a_lock_ends_with_its_process_though_a_child_of_it_lives_on(tmp_path: Path) -> None:
    """A data loader's worker is a fork, and outlives a killed rank by seconds."""
    program = (
        "import os, sys, time; from pathlib import Path; from slm_toolkit.base.safe_files import hold\n"
        "held = hold(Path(sys.argv[1])); child = os.fork()\n"
        "print(os.getpid(), flush=True) if child == 0 else None\n"  # by then it has closed the lock
        "time.sleep(60)"
    )
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", program, str(lock)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, env={**ENV, **PATH})
    child = int(holder.stdout.readline())
    with pytest.raises(BlockingIOError, match=f"process {holder.pid} on "):
        hold(lock)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert psutil.pid_exists(child)
    hold(lock).close()
    os.kill(child, signal.SIGKILL)
