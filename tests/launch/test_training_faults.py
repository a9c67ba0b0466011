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


def check_goes_on(faulty: Faulty, *, step: int) -> None:
    """The message names the last checkpoint, and `latest` is it."""
    path = faulty.folder / "runs" / "run" / "checkpoints" / f"step_{step}"
    assert f"--resume_from_checkpoint latest resumes from {path}" in faulty.hint
    again = launch_with_fault(faulty.folder, *SAVING, "--resume_from_checkpoint", "latest")
    assert again.code == 0, again.err
    assert f"resumed from {path}" in again.err
    assert (again.record["status"], again.record["first_step"]) == ("ok", step)


@pytest.mark.quick
def test_a_killed_rank_is_named_within_five_seconds_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, fault="kill", rank=1, step=5)
    check(faulty, "rank 1 (pid ", within_seconds=5)
    assert ") was killed or crashed at step 5 of 8" in faulty.messages[0]
    assert "[rank0]" not in faulty.err, "the survivor shows no traceback"
    check_goes_on(faulty, step=4)


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "rank"), [("ds_zero3", "crash in native code", 1), ("fsdp_full_shard", "kill", 0)]
)
def test_any_rank_is_named_under_any_engine(strategy: str, fault: str, rank: int, tmp_path: Path) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, strategy=strategy, fault=fault, rank=rank, step=5)
    check(faulty, f"rank {rank} (pid ", within_seconds=5)
    assert "was killed or crashed at step 5 of 8" in faulty.messages[0]


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


@pytest.mark.quick
def test_a_rank_that_hangs_is_named_with_its_line_after_the_timeout(tmp_path: Path) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, *LIMIT, strategy="fsdp_full_shard", fault="sleep")
    check(faulty, f"{NO_PROGRESS}: rank 1 (pid ", within_seconds=8 + 60)
    line = SITE.splitlines().index("            time.sleep(1e6)") + 1
    assert f") hung in site/sitecustomize.py:{line} in strike, called from " in faulty.messages[0]
    assert faulty.end_seconds < 8 + 60
    assert "--resume_from_checkpoint latest resumes from" in faulty.hint


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("stop", "is stopped (SIGSTOP, a debugger?), while rank 0 waited"),
        ("hold", "does not answer: it is stuck in native code that holds the GIL, while rank 0 waited"),
    ],
)
def test_a_rank_that_can_say_nothing_is_named_and_ended(fault: str, says: str, tmp_path: Path) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, *LIMIT, strategy="ds_zero3", fault=fault)
    check(faulty, f"{NO_PROGRESS}: rank 1 (pid ", within_seconds=8 + 60)
    assert faulty.messages[0].endswith(says)
    assert faulty.end_seconds < 8 + 90


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


def fill(disk: Path) -> None:
    try:
        (disk / "filler").write_bytes(b"x" * 2**25)
    except OSError:
        return
    raise AssertionError(f"{disk} took 32 MiB")


@pytest.mark.parametrize(
    ("arguments", "free_bytes", "where"),
    [
        (("--max_steps", "60"), 0, "after the last step"),
        pytest.param(
            ("--max_steps", "4", "--save_final_model", "true"), 2**20, "while saving", marks=pytest.mark.slow
        ),
        pytest.param(
            *(("--max_steps", "400", "--report_to", "tensorboard"), 0, ""),  # step 1, or before
            marks=pytest.mark.slow,
        ),
    ],
    ids=["the record", "the final model", "the tracker"],
)
def test_a_full_disk_is_named_with_rank_path_and_free_bytes(
    arguments: tuple[str, ...],
    free_bytes: int,
    where: str,
    small_disk: Path,
    tmp_path: Path,
) -> None:
    def fill_disk() -> None:
        fill(small_disk)
        if free_bytes:
            os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - free_bytes)

    faulty = launch_with_fault(tmp_path, *arguments, at_line=("a step is", fill_disk))
    assert faulty.code == 1, faulty.err
    (message,) = faulty.messages
    assert message.startswith(f"error: rank 0 {where}"), faulty.err
    assert f"no room to write under {small_disk}/run (" in message or f"{small_disk}/run/" in message
    assert " bytes free now): " in message
    assert "[rank" not in faulty.err
    assert faulty.message_seconds < 300


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_is_named_when_the_record_is_written(
    small_disk: Path, tmp_path: Path
) -> None:
    """The file for `slm compare`'s display can't be written before: training goes on without it."""

    def protect() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    faulty = launch_with_fault(tmp_path, "--max_steps", "200", at_line=("a step is", protect))
    assert faulty.code == 1, faulty.err
    (message,) = faulty.messages
    assert message.startswith(
        f"error: rank 0 after the last step: can't write {small_disk}/run/.record.json."
    )
    assert faulty.hint == f"check that {small_disk}/run still exists and its disk is writable"


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
        assert any(told.startswith(f"--ddp_timeout is {seconds:g}: 1 to 3600") for told in problems)
