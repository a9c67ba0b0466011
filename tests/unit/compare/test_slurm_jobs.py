"""What Slurm says of a job's end becomes a row, also what a Slurm on one machine can't be made to say."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import made_record
from test_outcome import planned

from slm_toolkit.compare.slurm import UNKNOWN, SlurmJob, _record_of, _seconds
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import PROGRESS_FILE


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("OUT_OF_MEMORY", "failed", "it ran out of host memory"),
        ("TIMEOUT", "timeout", "TIMEOUT: why Slurm thinks so at step 2 of 4"),
        (UNKNOWN, "failed", "Slurm no longer has its final state"),
    ],
)
def test_slurms_word_the_step_and_the_log_are_in_the_reason(
    state: str, status: str, words: str, tmp_path: Path
) -> None:
    run = planned(tmp_path, "step 2/4\nOSError: the disk is full\n")
    (run.folder / PROGRESS_FILE).write_text(json.dumps({"step": 2, "num_steps": 4}))
    record = _record_of(run, SlurmJob(7, state, "why Slurm thinks so", 65.0))
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
    ],
)
def test_the_runs_own_record_counts_unless_slurm_ended_it(
    state: str, of_record: str, status: str, tmp_path: Path
) -> None:
    run = planned(tmp_path, "")
    write_record(dataclasses.replace(made_record(), status=of_record, reason="its own"), run.folder)
    record = _record_of(run, SlurmJob(7, state, "", 1.0))
    assert record.status == status
    assert ("Slurm job 7" in record.reason) == (status != of_record)


def test_elapsed_times_are_seconds() -> None:
    assert [_seconds(text) for text in ("0:05", "1:00:00", "2-00:00:00", "INVALID")] == [5, 3600, 172800, 0]
