"""The record of a run that left none: its status and its reason, from the launch's end and its log."""

from pathlib import Path

import pytest

from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.compare.outcome import LOG_FILE, Ended, record_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.strategy.strategy import find_strategy

LAUNCHERS_ERROR = """Traceback (most recent call last):
  File "<frozen runpy>", line 88, in _run_code
  File "/venv/accelerate/commands/launch.py", line 1423, in <module>
    main()
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""
COMMAND = ["python", "-m", "launcher", "--main_process_port", "29511", "-m", "slm_toolkit.train"]
AT_STEP_3 = {"step": 3, "num_steps": 20}


def planned(folder: Path, log: str) -> PlannedRun:
    given = {"model": "slm-1m", "output_dir": str(folder)}
    (run,) = plan_runs(given, [find_strategy("ddp")], num_processes=2, machine=Machine(num_gpus=0, gpu=None))
    run.folder.mkdir(parents=True)
    (run.folder / LOG_FILE).write_text(log)
    return run


def ended(
    exit_code: int, *, stopped_after_seconds: float | None = None, progress: dict | None = None
) -> Ended:
    return Ended(
        command=COMMAND,
        started_at="2026-01-01T00:00:00+00:00",
        seconds_total=60.0,
        exit_code=exit_code,
        progress=progress,
        stopped_after_seconds=stopped_after_seconds,
        killed_by="sender unknown",
    )


@pytest.mark.parametrize(
    ("log", "end", "status", "reason"),
    [
        ("", ended(1, stopped_after_seconds=60, progress=AT_STEP_3), "timeout", "60 s, at step 3 of 20"),
        ("", ended(1, stopped_after_seconds=60), "timeout", "60 s, before its first step"),
        ("error: no such dataset\n", ended(2), "failed", "no such dataset"),
        ("", ended(137), "failed", "was killed by signal 9: sender unknown"),
        ("", ended(0), "failed", "/record.json'"),
        (
            "[rank1]: ValueError: sizes differ:\n[rank1]:   width: 64 and 128\n[rank1]:   heads: 2 and 4\n"
            f"W1128 03:55:38.718000 15412 torch/distributed/elastic/api.py:1028] Sending\n{LAUNCHERS_ERROR}",
            ended(1),
            "failed",
            "ValueError: sizes differ: width: 64 and 128; heads: 2 and 4",
        ),
        (
            f"  rank   : 0\n  exitcode  : -9 (pid: 7)\nValueError: mine\n{LAUNCHERS_ERROR}",
            ended(1),
            "failed",
            "ValueError: mine",
        ),
    ],
)
def test_a_run_without_a_record_gets_its_status_and_reason(
    tmp_path: Path, log: str, end: Ended, status: str, reason: str
) -> None:
    record = record_of(planned(tmp_path, log), end)
    assert record.status == status
    assert record.reason.endswith(reason)
    assert (record.strategy, record.seconds_total) == ("ddp", 60.0)
