"""Grids that are killed and resumed, and what is said of them meanwhile."""

import dataclasses
import io
import json
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ENV, H100, ROOT, WARM, left_over, made_record, slm
from rich.console import Console

from slm_toolkit.compare.display import Display
from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.compare.local import Slot, kept_record, locked, run_in_slots, slots_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.record.files import find_records, write_record
from slm_toolkit.record.run_record import RUN_DIR_VARIABLE, RunRecord
from slm_toolkit.strategy.strategy import find_strategy

TINY = ("--model", "slm-1m", "--max_steps", "3", "--seq_len", "32")


def ok_records(folder: Path) -> dict[str, RunRecord]:
    records, problems = find_records([folder])
    assert problems == []  # a half-written record would be one
    return {str(path): record for path, record in records if record.status == "ok"}


def test_a_killed_grid_leaves_no_process_and_is_resumed_where_it_was(tmp_path: Path) -> None:
    words = ("compare", "--json", *TINY, "--strategy", "single", "ddp", "--seed", "0", "1")
    words += ("--output_dir", str(tmp_path))
    slm_command = str(Path(sys.executable).with_name("slm"))
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([slm_command, *words], cwd=ROOT, env=ENV, **silent)
    time.sleep(random.uniform(3, 12))
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 15
    while left_over(tmp_path):  # nobody resumes, and yet all end
        assert time.monotonic() < deadline, left_over(tmp_path)
        time.sleep(0.1)
    done = ok_records(tmp_path)
    finished = slm(*words)
    assert finished.code == 0, finished.err
    assert finished.err.count("kept from ") == len(done)
    records = ok_records(tmp_path)
    assert done.items() <= records.items()  # what was done is neither lost nor repeated
    assert len({record.identity for record in records.values()}) == 4
    assert [row["status"] for row in json.loads(finished.out)] == ["ok"] * 4
    assert all(len(record.losses) == 3 for record in records.values())
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith((".record", "progress", "stack"))} == set()


def test_a_second_comparison_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path):
        refused = slm("compare", "--strategy", "single", "--output_dir", str(tmp_path))
    assert refused.code == 2
    assert "error: another `slm compare` (process " in refused.err
    assert "hint: wait until it ends, or give another --output_dir" in refused.err


def test_what_a_killed_comparison_left_running_is_ended_before_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: 0); time.sleep(99)"]
    env = {**ENV, RUN_DIR_VARIABLE: str(tmp_path / "runs" / "a")}
    orphan = subprocess.Popen(command, env=env)
    elsewhere = subprocess.Popen(command, env={**ENV, RUN_DIR_VARIABLE: str(tmp_path / "runs" / "b" / "a")})
    try:
        deadline = time.monotonic() + 5
        while True:  # until it runs python, not the copy of this process that it began as
            with locked(tmp_path / "runs") as num_left_over:
                if num_left_over or time.monotonic() > deadline:
                    break
        assert num_left_over == 1
        assert orphan.poll() is not None
        assert elsewhere.poll() is None
    finally:
        elsewhere.kill()


@pytest.mark.quick
def test_slots_are_disjoint_and_no_job_starts_without_one() -> None:
    slots = [Slot(2, ("0", "1")), Slot(2, ("2", "3"))]
    at_work: set[tuple[str, ...]] = set()
    most, lock = [0], threading.Lock()

    def work(job: int, slot: Slot) -> int:
        with lock:
            assert slot.visible_devices not in at_work
            at_work.add(slot.visible_devices)
            most[0] = max(most[0], len(at_work))
        time.sleep(0.02)
        with lock:
            at_work.remove(slot.visible_devices)
        return job * job

    results = dict(run_in_slots(range(8), work, slots, threading.Event()))
    assert results == {number: number * number for number in range(8)}
    assert most == [2]


@pytest.mark.quick
def test_a_bug_in_one_job_stops_the_others_and_starts_no_more() -> None:
    stop, begun = threading.Event(), []

    def work(job: int, slot: Slot) -> None:
        begun.append(job)
        if job == 1:
            raise RuntimeError("a bug")
        assert stop.wait(timeout=10)

    with pytest.raises(RuntimeError, match="a bug"):
        list(run_in_slots(range(9), work, [Slot(2), Slot(2)], stop))
    assert set(begun) <= {0, 1, 2}  # 2 may have begun in the moment before


@pytest.mark.quick
@pytest.mark.parametrize(
    ("num_gpus", "visible", "asked", "slots"),
    [
        (5, None, {"gpus_per_run": 2}, [("0", "1"), ("2", "3")]),  # the fifth is left over
        (5, "7,5,3,1,GPU-abc", {"gpus_per_run": 2}, [("7", "5"), ("3", "1")]),
        (5, None, {}, [None]),
        (0, None, {"gpus_per_run": 1}, "--gpus_per_run is 1: this machine has 0"),
        (4, None, {"gpus_per_run": 8}, "--gpus_per_run is 8: this machine has 4"),
        (4, None, {"gpus_per_run": 1, "num_processes": 2}, "--num_processes is 2"),
    ],
)
def test_gpus_are_dealt_out_in_order_and_what_is_visible_counts(
    num_gpus: int, visible: str | None, asked: dict, slots: list | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = {"gpus_per_run": None, "num_processes": None, **asked}
    machine = Machine(num_gpus, H100 if num_gpus else None)
    if isinstance(slots, str):
        with pytest.raises(ValueError, match=slots):
            slots_of(machine, **words)
    else:
        assert [slot.visible_devices for slot in slots_of(machine, **words)] == slots


def planned(*strategies: str, **given: object) -> list[PlannedRun]:
    found = [find_strategy(name) for name in strategies]
    return plan_runs(
        {"model": "slm-1m", **given}, found, num_processes=None, machine=Machine(0, None), repeats=1
    )


@pytest.mark.quick
def test_on_a_terminal_bars_hold_stage_step_and_time_left() -> None:
    first, second, _ = runs = planned("single", seed=[0, 1, 2])
    display = Display(runs, Console(file=io.StringIO(), force_terminal=True, width=120))
    display.begin(first)
    display.end(first, made_record(seconds_total=120.0), kept=False)
    display.begin(second)
    overall, running = display.bars.tasks
    assert overall.fields["status"] == "about 4 min left"  # 120 s each for the two others
    step = {"step": 2, "num_steps": 33, "loss": 5.5, "tokens_per_second": None}
    for state, shown in (
        (None, "starting: loading Python packages"),
        ({"stage": "reading [data]"}, "starting: reading \\[data]"),  # escaped: rich shows the bracket
        (step, "loss 5.500  warming up"),
        ({**step, "tokens_per_second": 1234.0}, "loss 5.500  1,234 tokens/s"),
        ({**step, "num_steps": None, "loss": None}, ""),  # of a user's own script
    ):
        display.progress(second, state)
        assert running.fields["status"] == shown
    assert (overall.completed, overall.total, running.completed) == (1, 3, 2)


def test_what_a_dry_run_prints_runs_and_is_not_printed_again(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    words = ("compare", "--dry_run", "--strategy", "single", "--model", "slm-1m", "--max_steps", "2")
    (line,) = slm(*words, "--output_dir", str(folder)).out.splitlines()
    assert json.loads(slm(*words, "--json", "--output_dir", str(folder)).out) == [line]
    assert not folder.exists()
    command = [str(Path(sys.executable).with_name("accelerate")), *shlex.split(line)[1:]]
    subprocess.run(command, cwd=tmp_path, env=WARM.env(), check=True, capture_output=True)
    again = slm(*words, "--output_dir", str(folder))
    assert (again.code, again.out.strip()) == (0, "")
    assert "1 of 1 runs are done and kept" in again.err


def test_nohups_wish_is_heeded(tmp_path: Path) -> None:
    """A login that ends sends SIGHUP; nohup is how one leaves a grid to the night."""
    words = ["compare", *TINY, "--strategy", "single", "--output_dir", str(tmp_path)]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("slm")), *words],
        **{"cwd": ROOT, "env": ENV, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN),
    )
    while not left_over(tmp_path):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert len(ok_records(tmp_path)) == 1


def test_a_run_is_kept_where_its_tracker_has_it_and_repeated_for_another(tmp_path: Path) -> None:
    (run,) = planned("single", report_to="tensorboard", output_dir=str(tmp_path))
    record = dataclasses.replace(made_record(), identity=run.identity)
    for tracker, kept in ((None, False), ("wandb", False), ("tensorboard", True)):
        write_record(dataclasses.replace(record, reported_to=tracker), run.folder)
        assert (kept_record(run) is not None) == kept
