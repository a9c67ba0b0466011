"""A rank that is killed or hangs, a full disk, a clock that is set: each a message with rank and cause."""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from conftest import ENV, left_over, record_under
from training_faults import SITE, Faulty, launch_with_fault, ranks_of

from slm_toolkit.config.run_config import RunConfig

SAVING = ("--max_steps", "8", "--save_steps", "2")
LIMIT = ("--ddp_timeout", "8")
NO_PROGRESS = "no progress for 8 s (--ddp_timeout) at step 3 of 8"


def check(faulty: Faulty, cause: str, *, within_seconds: float) -> None:
    """One message that begins with `cause` on stderr and in the record, in time; nothing is left behind."""
    assert faulty.code == 1, faulty.err
    (message,) = faulty.messages
    assert message.startswith(f"error: {cause}"), faulty.err
    assert faulty.message_seconds < within_seconds
    assert (faulty.record["status"], faulty.record["reason"]) == ("failed", message.removeprefix("error: "))
    assert left_over(faulty.folder) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "fault", "rank"),
    [
        ("ddp", "kill", 1),
        pytest.param("ds_zero3", "crash in native code", 1, marks=pytest.mark.slow),
        pytest.param("fsdp_full_shard", "kill", 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_within_five_seconds_and_the_run_goes_on_from_its_checkpoint(
    strategy: str, fault: str, rank: int, tmp_path: Path
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, strategy=strategy, fault=fault, rank=rank, step=5)
    check(faulty, f"rank {rank} (pid ", within_seconds=5)
    assert ") was killed or crashed at step 5 of 8" in faulty.messages[0]
    assert f"[rank{1 - rank}]" not in faulty.err, "the survivor shows no traceback"
    path = faulty.folder / "runs" / "run" / "checkpoints" / "step_4"
    assert f"--resume_from_checkpoint latest resumes from {path}" in faulty.hint
    if strategy == "ddp":
        again = launch_with_fault(faulty.folder, *SAVING, "--resume_from_checkpoint", "latest")
        assert again.code == 0, again.err
        assert f"resumed from {path}" in again.err
        assert (again.record["status"], again.record["first_step"]) == ("ok", 4)


@pytest.mark.quick
@pytest.mark.slow
def test_a_rank_that_fails_keeps_its_traceback_and_the_other_only_names_it(tmp_path: Path) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, fault="raise")
    (message,) = faulty.messages
    assert message.endswith(" failed at step 3 of 8: KeyError: 'the sky is falling'")
    assert "[rank1]: KeyError: 'the sky is falling'" in faulty.err
    assert "[rank0]" not in faulty.err
    assert faulty.message_seconds < 15
    assert faulty.record["reason"] == "'the sky is falling'"  # rank 1's own


LINE = SITE.splitlines().index("            time.sleep(1e6)") + 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "fault", "says"),
    [
        ("fsdp_full_shard", "sleep", f"hung in site/sitecustomize.py:{LINE} in strike, called from .*"),
        pytest.param("ds_zero3", "stop", r"is stopped \(SIGSTOP, a debugger\?\)", marks=pytest.mark.slow),
        pytest.param("ds_zero3", "hold", "does not answer: .* holds the GIL", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_after_the_timeout_and_ended(
    strategy: str, fault: str, says: str, tmp_path: Path
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, *LIMIT, strategy=strategy, fault=fault)
    check(faulty, f"{NO_PROGRESS}: rank 1 (pid ", within_seconds=8 + 60)
    assert re.search(rf"\) {says}, while rank 0 waited$", faulty.messages[0])
    assert faulty.end_seconds < 8 + 90
    assert "--resume_from_checkpoint latest resumes from" in faulty.hint


@pytest.mark.quick
@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    def suspend() -> None:
        ranks = [pid for pid in ranks_of(tmp_path) if "slm_toolkit.train" in psutil.Process(pid).cmdline()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, number)
            time.sleep(20)  # longer than the limit of 8 s

    faulty = launch_with_fault(
        *(tmp_path, "--max_steps", "40", *LIMIT), fault="pause", at_line=("a step is", suspend)
    )
    assert (faulty.code, faulty.messages) == (0, []), faulty.err


@pytest.mark.quick
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    def kill_launcher() -> None:
        (launcher,) = (pid for pid in ranks_of(tmp_path) if "launch" in psutil.Process(pid).cmdline())
        os.kill(launcher, signal.SIGKILL)

    at_line = ("a step is", kill_launcher)
    faulty = launch_with_fault(tmp_path, "--max_steps", "100000", at_line=at_line, cold=True)
    (message,) = faulty.messages
    assert "the launcher (pid " in message
    assert re.search(r"was killed or crashed (at step \d+ of 100000|before its first step)$", message)
    deadline = time.monotonic() + 30
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left_over(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of their own, as a full disk is made by root only."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("can't mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("steps", "is_full"), [("60", True), pytest.param("200", False, marks=pytest.mark.slow)]
)
def test_a_disk_that_is_full_or_read_only_is_named_with_rank_and_path(
    steps: str, is_full: bool, small_disk: Path, tmp_path: Path
) -> None:
    """The file for `slm compare`'s display can't be written before: training goes on without it."""

    def strike() -> None:
        if is_full:
            with suppress(OSError):
                (small_disk / "filler").write_bytes(b"x" * 2**25)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    faulty = launch_with_fault(tmp_path, "--max_steps", steps, at_line=("a step is", strike))
    assert faulty.code == 1, faulty.err
    (message,) = faulty.messages
    says = "No space left on device" if is_full else "Read-only file system"
    assert re.match(rf"error: rank 0 after the last step: can't use {small_disk}/run\S*: {says}", message)
    assert "its disk" in faulty.hint
    assert "[rank" not in faulty.err
    if not is_full:
        warned = f"warning: can't write {small_disk}/run/progress.json: {says}; training continues"
        assert faulty.err.count(warned) == 1


@pytest.mark.slow
def test_a_log_on_a_full_disk_leaves_the_cause_in_the_record(tmp_path: Path) -> None:
    words = ("--model", "slm-1m", "--max_steps", "3", "--output_dir", str(tmp_path))
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "slm_toolkit.train", *words], env=ENV, stderr=full)
    assert done.returncode == 1
    record = record_under(tmp_path)
    assert record["status"] == "failed"
    assert record["reason"].endswith("No space left on device")


@pytest.fixture(scope="session")
def set_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that adds to the date what a file says; preloaded by a launch."""
    library = tmp_path_factory.mktemp("clock") / "set_clock.so"
    source = Path(__file__).with_name("set_clock.c")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().machine != "x86_64":
        pytest.skip("needs a C compiler, and x86-64's glibc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("jump_hours", [-2, 24])
def test_a_clock_that_is_set_while_a_run_trains_changes_nothing(
    jump_hours: int, set_clock: Path, tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(bytes(8))

    def set_it() -> None:
        with offset.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", jump_hours * 3600))

    began, began_at = datetime.now(UTC), time.monotonic()
    faulty = launch_with_fault(
        *(tmp_path, "--max_steps", "12", "--save_steps", "4", *LIMIT),
        fault="pause",  # rank 1 waits a second in each step from the third on
        env={"LD_PRELOAD": str(set_clock), "SET_CLOCK": str(offset)},
        at_line=("checkpoints/step_4", set_it),
    )
    seconds = time.monotonic() - began_at
    assert (faulty.code, faulty.messages) == (0, []), faulty.err
    record = faulty.record
    assert record["status"] == "ok"
    last_pause = float((tmp_path / "struck").read_text()) - time.time()
    assert abs(last_pause - jump_hours * 3600) < seconds, "the clock was set"
    assert 10 < record["seconds_total"] < seconds  # 10 paused steps
    # psutil's date of a process is whole seconds off at most
    assert -2 < (datetime.fromisoformat(record["started_at"]) - began).total_seconds() < seconds
    assert all(0 < step < seconds for rank in record["step_seconds"] for step in rank)
    assert 10 < sum(record["step_seconds"][0]) < seconds
    checkpoints = sorted(path.name for path in (tmp_path / "runs/run/checkpoints").iterdir())
    assert checkpoints == ["step_12", "step_8"]


@pytest.mark.quick
def test_the_timeout_is_a_time() -> None:
    for seconds in (0.0, float("nan"), 4000.0):
        problems = RunConfig(ddp_timeout=seconds).problems()
        assert any(told.startswith(f"--ddp_timeout is {seconds:g}: at ") for told in problems)
