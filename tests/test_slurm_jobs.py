"""What Slurm says of a job's end becomes a row, also what a Slurm on one machine can't be made to say."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.compare.local import LOG_FILE
from slm_toolkit.compare.slurm import _record_of
from slm_toolkit.compare.slurm_queue import UNKNOWN, Job, _seconds, accounted, queue
from slm_toolkit.hardware import Machine
from slm_toolkit.record import PROGRESS_FILE, write_record
from slm_toolkit.strategy import find_strategy


def planned(folder: Path) -> PlannedRun:
    given = {"model": "slm-1m", "max_steps": 4, "output_dir": str(folder)}
    machine = Machine(num_gpus=0, gpu=None)
    (run,) = plan_runs(given, [find_strategy("ddp")], num_processes=2, machine=machine)
    run.folder.mkdir()
    return run


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("OUT_OF_MEMORY", "failed", "it wanted more host memory than it had"),
        ("TIMEOUT", "timeout", "its time limit ended it at step 2 of 4"),
        ("PREEMPTED", "failed", "another job took its place"),
        ("LAUNCH_FAILED", "failed", "LAUNCH_FAILED: why Slurm thinks so"),
        (UNKNOWN, "failed", "Slurm no longer knows how it ended"),
    ],
)
def test_slurms_word_the_step_and_the_log_are_in_the_reason(
    state: str, status: str, words: str, tmp_path: Path
) -> None:
    run = planned(tmp_path)
    (run.folder / LOG_FILE).write_text("step 2/4\nOSError: the disk is full\n")
    (run.folder / PROGRESS_FILE).write_text(json.dumps({"step": 2, "num_steps": 4}))
    record = _record_of(run, Job(7, state, "why Slurm thinks so", 65.0))
    assert (record.status, record.seconds_total) == (status, 65.0)
    assert record.reason.startswith(f"Slurm job 7 {state}: ")
    assert words in record.reason
    assert record.reason.endswith("; OSError: the disk is full")


@pytest.mark.parametrize(
    ("state", "of_record", "status"),
    [
        ("COMPLETED", "ok", "ok"),
        (UNKNOWN, "ok", "ok"),
        ("FAILED", "ok", "failed"),  # it broke after its record: not a run to trust
        ("FAILED", "oom", "oom"),
        ("CANCELLED", "oom", "oom"),  # one rank was out of memory, srun ended the others
        ("NODE_FAIL", "failed", "failed"),
    ],
)
def test_the_runs_own_record_counts_unless_slurm_ended_it(
    state: str, of_record: str, status: str, tmp_path: Path
) -> None:
    run = planned(tmp_path)
    write_record(dataclasses.replace(made_record(), status=of_record, reason="its own"), run.folder)
    record = _record_of(run, Job(7, state, "", 1.0))
    assert record.status == status
    assert ("Slurm job 7" in record.reason) == (state in ("NODE_FAIL", "FAILED") and of_record != "oom")


def fake(folder: Path, name: str, prints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{prints}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_accounting_is_asked_about_a_job_that_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(7, "RUNNING", "None", 3.0)
    fake(tmp_path, "sacct", "echo 'CANCELLED by 1000|00:01:05'", monkeypatch)
    assert accounted(job) == Job(7, "CANCELLED", "", 65.0)
    fake(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1", monkeypatch)
    assert accounted(job).state == UNKNOWN


def test_the_newest_job_of_a_script_counts_and_arrays_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "9_[1-3]|PENDING|Priority|0:00|/a b\n8|RUNNING|None|1-02:00:01|/a b\n7|FAILED|None|0:02|/a b"
    fake(tmp_path, "squeue", f"echo '{shown}'", monkeypatch)
    assert queue() == {"/a b": Job(8, "RUNNING", "None", 93601.0)}  # 86400 + 7200 + 1


def test_elapsed_times_are_seconds() -> None:
    assert [_seconds(text) for text in ("0:05", "1:00:00", "2-00:00:00", "INVALID")] == [5, 3600, 172800, 0]
