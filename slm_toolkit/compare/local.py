"""Run planned runs on this machine, one process tree after the other, each ending as a record."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.flags import flags_of
from slm_toolkit.hardware import num_cores
from slm_toolkit.record import PROGRESS_FILE, RECORD_FILE, RunRecord, model_facts, read_record, write_record
from slm_toolkit.strategy import write_resolved

LOG_FILE = "log.txt"
Progress = Callable[[dict[str, float] | None], None]
"called several times a second with what the run last wrote about itself, None before the first step"


def kept_record(run: PlannedRun) -> RunRecord | None:
    """The record of an earlier run that asked the very same and ended ok or out of memory.

    None too where this run is to leave something that the earlier one did not: a model, a tracker's log.
    """
    path = run.folder / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = read_record(path)
    except ValueError:  # of another version, or damaged: run again
        return None
    lacks_model = run.config.save_final_model and (
        record.model_dir is None or not Path(record.model_dir).is_dir()
    )
    if record.status == "ok" and (lacks_model or run.config.report_to != "none"):
        return None
    return record if record.identity == run.identity and record.status in ("ok", "oom") else None


def execute(run: PlannedRun, *, timeout_seconds: float, retries: int, on_progress: Progress) -> RunRecord:
    """Launch one run, again up to `retries` times while it fails or times out; returns its record."""
    record = _execute_once(run, timeout_seconds=timeout_seconds, on_progress=on_progress)
    while record.status in ("failed", "timeout") and retries > 0:
        retries -= 1
        record = _execute_once(run, timeout_seconds=timeout_seconds, on_progress=on_progress)
    return record


def launch_command(run: PlannedRun, yaml_path: Path) -> list[str]:
    """The command line of a run; the record shows it as `accelerate launch ...`."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(yaml_path)),
        *("--num_processes", str(run.num_processes)),
        *("--main_process_port", str(free_port())),
        *("-m", "slm_toolkit.train", *flags_of(run.config)),
    ]


def _execute_once(run: PlannedRun, *, timeout_seconds: float, on_progress: Progress) -> RunRecord:
    folder = run.folder
    for name in (RECORD_FILE, LOG_FILE, PROGRESS_FILE):
        (folder / name).unlink(missing_ok=True)
    command = launch_command(run, write_resolved(run.strategy, folder / "launch", run.num_processes))
    started_at, started = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    timed_out = False
    tree: dict[int, psutil.Process] = {}
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(run),
        )
        try:
            while process.poll() is None:
                on_progress(_progress_of(folder))
                tree |= tree_of(process.pid)
                if time.monotonic() - started > timeout_seconds:
                    timed_out = True
                    break
                time.sleep(0.2)
        finally:
            end_processes(list((tree | tree_of(process.pid)).values()))
            process.wait()
    last = _progress_of(folder)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    log_text = (folder / LOG_FILE).read_text(errors="replace")
    killed = "exitcode  : -9" in log_text
    if (folder / RECORD_FILE).is_file():
        record = read_record(folder / RECORD_FILE)
        # What the others saw of a rank's end, a closed connection, is not the cause; their own crash is.
        broken_off = killed and record.status == "failed" and "peer" in (record.reason or "")
        ended_well = record.status == "ok" and process.returncode == 0 and not timed_out
        told_why = record.status == "failed" and not broken_off and not timed_out
        if record.status == "oom" or ended_well or told_why:
            return record
    status, reason = "failed", reason_in_log(folder / LOG_FILE)
    if timed_out:
        where = f"at step {last['step']} of {last['num_steps']}" if last else "before its first step"
        status, reason = "timeout", f"stopped after {timeout_seconds:g} s, {where}"
    elif killed:
        reason = "a rank was killed (signal 9), most often by the kernel for want of host memory"
    elif reason.startswith("last line") and (number := re.search(r"exitcode  : -(\d+)", log_text)):
        reason = f"a rank crashed ({signal.Signals(int(number[1])).name}): see {folder / LOG_FILE}"
    record = RunRecord(
        run_name=run.run_name,
        identity=run.identity,
        status=status,
        strategy=run.strategy.name,
        asked=run.asked,
        model=model_facts(run.spec),
        versions=run.versions,
        started_at=started_at,
        reason=reason,
        command=shlex.join(["accelerate", "launch", *command[3:]]),
        seconds_total=time.monotonic() - started,
        gpu=run.gpu,
    )
    write_record(record, folder)
    return record


def reason_in_log(log: Path) -> str:
    """The line of a log that says best why a run ended: ours, else the last exception's, else the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for pattern in (r"error: (.*)", r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b: .*)"):
        found = [
            match[1]
            for line in lines
            if (match := re.match(pattern, line)) and "ChildFailedError" not in line
        ]
        if found:
            return found[-1]
    return f"see {log}" if not lines else f"last line of {log}: {lines[-1][:200]}"


def _environment(run: PlannedRun) -> dict[str, str]:
    """As a user's shell, with CPU threads shared out among CPU processes."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // run.num_processes)))
    return env


def _progress_of(folder: Path) -> dict[str, float] | None:
    try:
        return json.loads((folder / PROGRESS_FILE).read_text())
    except (OSError, json.JSONDecodeError):  # not there yet
        return None


def tree_of(pid: int) -> dict[int, psutil.Process]:
    """A process and all below it, by number; empty once it has ended."""
    try:
        root = psutil.Process(pid)
        return {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.NoSuchProcess:
        return {}


def end_processes(processes: list[psutil.Process]) -> None:
    """End what still runs: gently, then by force. Ranks outlive a killed launcher, and hold memory."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            try:
                process.send_signal(signal_number)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=5)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def forget(run: PlannedRun) -> None:
    """Remove an earlier run's folder, checkpoints and all."""
    shutil.rmtree(run.folder, ignore_errors=True)
