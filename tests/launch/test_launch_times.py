"""A run's record knows how its launches spent their wall time, also those that were killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENV, ROOT, launch, record_under, run, slm

from slm_toolkit.record.goodput import time_shares

FLAGS = ("--model", "slm-1m", "--seq_len", "32", "--run_name", "run", "--save_final_model", "false")


def train(folder: Path, *more: str) -> dict:
    done = launch(*FLAGS, "--output_dir", str(folder), *more, config="accel_configs/single.yaml")
    assert done.code == 0, done.err
    return record_under(folder)


@pytest.mark.quick
def test_a_resumed_run_knows_what_it_did_twice_and_what_saving_took(tmp_path: Path) -> None:
    train(tmp_path, "--max_steps", "6", "--save_steps", "4")
    record = train(tmp_path, "--max_steps", "8", "--save_steps", "4", "--resume_from_checkpoint", "latest")
    first, second = record["launches"]
    assert [first["first_step"], first["last_step"], second["first_step"], second["last_step"]] == [
        0,
        6,
        4,
        8,
    ]
    assert [saved["step"] for saved in first["saved_at"]] == [4]
    shares = time_shares(record["launches"])
    assert (shares.num_launches, shares.num_lost_steps) == (2, 2)
    assert shares.lost_seconds == pytest.approx(first["step_seconds"] - first["saved_at"][0]["step_seconds"])
    assert 0 < shares.lost_seconds < first["step_seconds"]
    # steps last from the end of one to the end of the next, but for those after a checkpoint
    assert second["step_seconds"] >= sum(record["step_seconds"][0])
    assert 0 < second["saving_seconds"] < second["seconds"]
    assert second["seconds"] == pytest.approx(record["seconds_total"], abs=1)
    shown = slm("report", str(tmp_path))
    assert "goodput of runs that saved or resumed" in shown.out

    record = train(tmp_path, "--max_steps", "3", "--overwrite_output_dir")  # another run
    assert len(record["launches"]) == 1
    assert "goodput" not in slm("report", str(tmp_path)).out


@pytest.mark.quick
def test_a_killed_launch_leaves_its_times(tmp_path: Path) -> None:
    words = ("--output_dir", str(tmp_path), "--max_steps", "100000", "--resume_from_checkpoint", "auto")
    command = [sys.executable, "-m", "slm_toolkit.train", *FLAGS, *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL)
    notes = tmp_path / "run" / "launches.json"
    while process.poll() is None and not (notes.exists() and json.loads(notes.read_text())[0]["last_step"]):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # no checkpoint: the run begins again, and all steps of the first launch are lost
    record = train(tmp_path, "--max_steps", "4", "--resume_from_checkpoint", "auto")
    killed, ended = record["launches"]
    assert killed["last_step"] > 0
    assert (ended["first_step"], ended["last_step"]) == (0, 4)
    shares = time_shares(record["launches"])
    assert shares.lost_seconds == pytest.approx(killed["step_seconds"])
    assert shares.kept_seconds == pytest.approx(ended["step_seconds"])


@pytest.mark.quick
def test_notes_that_are_missing_or_damaged_make_the_times_unknown(tmp_path: Path) -> None:
    train(tmp_path, "--max_steps", "2", "--save_steps", "2")
    for damage in ("[{", "[{}]", None):
        notes = tmp_path / "run" / "launches.json"
        notes.unlink() if damage is None else notes.write_text(damage)
        steps = ("--max_steps", "3", "--resume_from_checkpoint", str(tmp_path / "run/checkpoints/step_2"))
        assert train(tmp_path, *steps)["launches"] == []


@pytest.mark.slow
def test_the_bench_kills_and_prints_shares_that_add_up(tmp_path: Path) -> None:
    few = ("--max_steps", "40", "--save_steps", "5", "--seq_len", "32", "--kills_per_hour", "0", "400")
    # the first moment of seed 1 is 0.14 of the mean of 9 s: 1.3 s after the launch, while no run has ended
    few += ("--seed", "1")
    done = run(sys.executable, str(ROOT / "bench/goodput.py"), *few, timeout=600, warm=True)
    assert done.code == 0, done.err
    rows = [line.split("│") for line in done.out.splitlines() if "steps │" in line]
    assert [row[3].strip() == "0" for row in rows] == [True, False]
    for row in rows:
        shares = [float(cell.strip().rstrip("%")) for cell in row[5:10]]
        assert sum(shares) == pytest.approx(100, abs=0.3)
        assert all(share >= 0 for share in shares)
