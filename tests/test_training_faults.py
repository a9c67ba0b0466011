"""A rank that is killed or hangs, a full disk, a clock that is set: one message with rank and cause, and a way on."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from conftest import left_over
from training_faults import SITE, Faulty, launch_with_fault, ranks_of

from slm_toolkit.run.stalled import Stall, explain

SAVING = ("--max_steps", "8", "--save_steps", "2")
LIMIT = ("--ddp_timeout", "8")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

Report = Callable[[str, object], None]


def check(faulty: Faulty, cause: str, record_property: Report, *, within_seconds: float) -> None:
    """One message that begins with `cause` on stderr and in the record, in time; nothing is left behind."""
    assert faulty.code == 1, faulty.err
    (message,) = faulty.messages
    assert message.startswith(f"error: {cause}"), faulty.err
    assert faulty.message_seconds < within_seconds
    assert (faulty.record["status"], faulty.record["reason"]) == ("failed", message.removeprefix("error: "))
    assert left_over(faulty.folder) == []
    record_property("seconds to the message", round(faulty.message_seconds, 1))


def check_goes_on(faulty: Faulty, *, step: int) -> None:
    """The message names the last checkpoint, and `latest` is it."""
    path = faulty.folder / "runs" / "run" / "checkpoints" / f"step_{step}"
    assert f"--resume_from_checkpoint latest goes on from {path}" in faulty.hint
    again = launch_with_fault(faulty.folder, *SAVING, "--resume_from_checkpoint", "latest")
    assert again.code == 0, again.err
    assert f"resumed from {path}" in again.err
    assert (again.record["status"], again.record["first_step"]) == ("ok", step)


def test_a_killed_rank_is_named_within_five_seconds_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, record_property: Report
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, fault="kill", rank=1, step=5)
    check(faulty, "rank 1 (pid ", record_property, within_seconds=5)
    assert ") was killed or crashed at step 5 of 8" in faulty.messages[0]
    assert "[rank0]" not in faulty.err, "the survivor shows no traceback"
    check_goes_on(faulty, step=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "rank"), [("ds_zero3", "crash in C", 1), ("fsdp_full_shard", "kill", 0)]
)
def test_any_rank_is_named_under_any_engine(
    strategy: str, fault: str, rank: int, tmp_path: Path, record_property: Report
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, strategy=strategy, fault=fault, rank=rank, step=5)
    check(faulty, f"rank {rank} (pid ", record_property, within_seconds=5)
    assert "was killed or crashed at step 5 of 8" in faulty.messages[0]


@pytest.mark.slow
def test_a_rank_that_fails_keeps_its_traceback_and_the_other_only_names_it(
    tmp_path: Path, record_property: Report
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, fault="raise")
    (message,) = faulty.messages
    assert message.endswith(" failed at step 3 of 8: KeyError: 'the sky is falling'")
    assert "[rank1]: KeyError: 'the sky is falling'" in faulty.err
    assert "[rank0]" not in faulty.err
    assert faulty.message_seconds < 15
    assert faulty.record["reason"] == "'the sky is falling'"  # rank 1's own
    record_property("seconds to the message", round(faulty.message_seconds, 1))


def test_a_rank_that_hangs_is_named_with_its_line_after_the_timeout(
    tmp_path: Path, record_property: Report
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, *LIMIT, strategy="fsdp_full_shard", fault="sleep")
    check(
        *(faulty, "no progress for 8 s (--ddp_timeout) at step 3 of 8: rank 1 (pid ", record_property),
        within_seconds=8 + 60,
    )
    line = SITE.splitlines().index("            time.sleep(1e6)") + 1
    assert f") hung in site/sitecustomize.py:{line} in strike, while rank 0 waited" in faulty.messages[0]
    assert faulty.end_seconds < 8 + 60
    assert "--resume_from_checkpoint latest goes on from" in faulty.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("stop", "is stopped (SIGSTOP, a debugger?), while rank 0 waited"),
        ("hold", "does not answer: it is in a call that never gives Python the word, while rank 0 waited"),
    ],
)
def test_a_rank_that_can_say_nothing_is_named_and_ended(
    fault: str, says: str, tmp_path: Path, record_property: Report
) -> None:
    faulty = launch_with_fault(tmp_path, *SAVING, *LIMIT, strategy="ds_zero3", fault=fault)
    check(
        *(faulty, "no progress for 8 s (--ddp_timeout) at step 3 of 8: rank 1 (pid ", record_property),
        within_seconds=8 + 60,
    )
    assert faulty.messages[0].endswith(says)
    assert faulty.end_seconds < 8 + 90


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


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    def kill_launcher() -> None:
        (launcher,) = (pid for pid in ranks_of(tmp_path) if "launch" in psutil.Process(pid).cmdline())
        os.kill(launcher, signal.SIGKILL)

    faulty = launch_with_fault(tmp_path, "--max_steps", "100000", at_line=("a step is", kill_launcher))
    (message,) = faulty.messages
    assert "the launcher (pid " in message
    assert "was killed or crashed at step " in message
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
        (("--max_steps", "400"), 0, "at step "),
        pytest.param(
            ("--max_steps", "4", "--save_final_model", "true"), 2**20, "in saving", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--max_steps", "400", "--report_to", "tensorboard"), 0, "at step ", marks=pytest.mark.slow
        ),
    ],
    ids=["the progress file", "the final model", "the tracker"],
)
def test_a_full_disk_is_named_with_rank_path_and_free_bytes(
    arguments: tuple[str, ...],
    free_bytes: int,
    where: str,
    small_disk: Path,
    tmp_path: Path,
    record_property: Report,
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
    assert faulty.message_seconds < 60
    record_property("seconds to the message", round(faulty.message_seconds, 1))


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs Debian's faketime")
@pytest.mark.parametrize("jump", ["-2h", pytest.param("+1d", marks=pytest.mark.slow)])
def test_a_clock_that_is_set_while_a_run_trains_changes_nothing(jump: str, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0")
    env = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    began = datetime.now(UTC)
    at = time.monotonic()
    faulty = launch_with_fault(
        *(tmp_path, *SAVING, *LIMIT),
        env=env,
        at_line=("checkpoints/step_2", lambda: offset.write_text(jump)),
    )
    assert (faulty.code, faulty.messages) == (0, []), faulty.err
    record = faulty.record
    assert record["status"] == "ok"
    assert 0 < record["seconds_total"] < time.monotonic() - at
    assert 0 <= (datetime.fromisoformat(record["started_at"]) - began).total_seconds() + 1 < 120
    assert all(0 < seconds < 60 for rank in record["step_seconds"] for seconds in rank)
    checkpoints = sorted(path.name for path in (tmp_path / "runs/run/checkpoints").iterdir())
    assert checkpoints == ["step_6", "step_8"]


def test_the_rank_that_holds_the_others_up_is_told_from_them() -> None:
    waits = Stall(0, 10, is_waiting=True, has_moved=False, place="torch/x.py:1 in wait")
    hangs = Stall(1, 11, is_waiting=False, has_moved=False, place="a/b.py:2 in read")
    works = Stall(2, 12, is_waiting=False, has_moved=True, place="a/b.py:3 in pack")
    assert explain([waits, hangs], []) == "rank 1 (pid 11) hung in a/b.py:2 in read, while rank 0 waited"
    assert explain([waits, works], []) == (
        "rank 2 (pid 12) is still at work in a/b.py:3 in pack, while rank 0 waited"
    )
    assert explain([waits], ["rank 1 (pid 11) is stopped"]) == (
        "rank 1 (pid 11) is stopped, while rank 0 waited"
    )
    assert explain([waits], []) == "rank 0 (pid 10) waits in torch/x.py:1 in wait"
