"""`slm compare --take_turns`: runs that are launched together compute one at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ENV, ROOT, slm

from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import PROGRESS_FILE, RunRecord

TINY = ("--model", "slm-1m", "--seq_len", "32", "--per_device_train_batch_size", "2", "--take_turns")


def records_in(folder: Path) -> list[RunRecord]:
    return [record for _, record in find_records([folder])[0]]


@pytest.mark.quick
def test_rounds_are_paired_and_waiting_counts_as_no_step(tmp_path: Path) -> None:
    words = ["compare", *TINY, "--strategy", "single", "ddp", "--max_steps", "100", "--repeats", "3"]
    done = slm(*words, "--output_dir", str(tmp_path))
    assert done.code == 0, done.err
    assert "in paired rounds taken in turns" in " ".join(done.out.split())
    records = records_in(tmp_path)
    assert [record.took_turns for record in records] == [True] * 6
    for record in records:
        (launch,) = record.launches
        steps = sum(record.slowest_rank_seconds)
        assert launch["step_seconds"] < 1.5 * steps
        assert launch["seconds"] > launch["start_seconds"] + 1.5 * steps  # it waited, too
    again = slm(*words, "--output_dir", str(tmp_path), "--json")
    assert {row["num_launches"] for row in json.loads(again.out)} == {3}
    words[words.index("single")] = "fsdp_full_shard"  # it would have no run to take turns with
    refused = slm(*words, "--output_dir", str(tmp_path))
    assert (refused.code, "without the other runs of its round\nhint: " in refused.err) == (2, True)
    assert {record.started_at for record in records_in(tmp_path)} == {r.started_at for r in records}


@pytest.mark.slow
def test_a_killed_run_leaves_its_turns_to_the_others(tmp_path: Path) -> None:
    words = ["compare", *TINY, "--strategy", "single", "--seed", "0", "1", "2", "--max_steps", "150"]
    command = [str(Path(sys.executable).with_name("slm")), *words, "--output_dir", str(tmp_path)]
    compare = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(steps := list(tmp_path.glob(f"*/{PROGRESS_FILE}"))) < 3 or any(
        "step" not in path.read_text() for path in steps
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    victim = next(
        process
        for process in psutil.Process(compare.pid).children(recursive=True)
        if "slm_toolkit.train" in process.cmdline() and "accelerate" not in " ".join(process.cmdline())
    )
    os.kill(victim.pid, signal.SIGKILL)
    assert compare.wait(timeout=240) == 1
    statuses = sorted(record.status for record in records_in(tmp_path))
    assert statuses == ["failed", "ok", "ok"]


def test_what_can_take_no_turns_is_refused() -> None:
    script = ("compare", "--script", __file__, "--take_turns")
    for words, reason in (
        (script, "whose steps can't wait for other runs"),
        (("compare", *TINY, "--runs_at_once", "2"), "which lets runs slow each other down"),
        (("compare", *TINY, "--largest_batch", "--max_batch", "4"), "whose runs depend on each other"),
    ):
        done = slm(*words)
        assert done.code == 2
        assert reason in done.err
