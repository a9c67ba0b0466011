"""The record of a run that has ended: its own where that tells the truth, else one that says why not."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.compare.causes import (
    LOG_FILE,
    crash,
    disk_full,
    killed_process,
    port_taken,
    read_log,
    reason_in_log,
)
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.lost_ranks import KILLED_OR_CRASHED
from slm_toolkit.record import RECORD_FILE, RunRecord, model_facts
from slm_toolkit.record_files import read_record
from slm_toolkit.secret_words import without_secrets


@dataclass(frozen=True)
class Ended:
    """What is known of a launch when all its processes have ended."""

    command: list[str]
    started_at: str
    seconds_total: float
    exit_code: int
    progress: dict[str, float] | None
    stopped_after_seconds: float | None
    "its time limit, where it took longer"
    hung: str | None
    "which rank hung, where that could be seen"
    killed_by: str
    "who sends a SIGKILL at such a time, if one was sent"


def own_record(run: PlannedRun, ended: Ended) -> RunRecord | None:
    """What the run wrote itself, where that tells its end truly."""
    path, log_text = run.folder / RECORD_FILE, read_log(run.folder / LOG_FILE)
    if not path.is_file():
        return None
    record = read_record(path)
    killed = killed_process(log_text, ended.exit_code) is not None
    timed_out = ended.stopped_after_seconds is not None
    # What the others saw of a rank's end, a closed connection, is not the cause, nor that it is gone: we know
    # the signal. Their own crash is.
    reason = record.reason or ""
    broken_off = killed and record.status == "failed" and ("peer" in reason or KILLED_OR_CRASHED in reason)
    ended_well = record.status == "ok" and ended.exit_code == 0 and not timed_out
    told_why = record.status == "failed" and not broken_off and not timed_out
    return record if record.status == "oom" or ended_well or told_why else None


def record_of(run: PlannedRun, ended: Ended, *, reason: str | None = None) -> RunRecord:
    """The record of a run that left none, or none that is true."""
    return planned_record(
        run,
        status="failed" if ended.stopped_after_seconds is None else "timeout",
        started_at=ended.started_at,
        reason=reason or _reason(run.folder, ended),
        command=as_typed(ended.command) if ended.command else None,
        seconds_total=ended.seconds_total,
        gpu=run.gpu,
    )


def planned_record(run: PlannedRun, **observed: Any) -> RunRecord:
    """What was asked of a run that can't speak for itself, with what others `observed` of it."""
    return RunRecord(
        run_name=run.run_name,
        identity=run.identity,
        strategy=run.strategy.name,
        asked=run.asked,
        model=model_facts(run.spec),
        versions=run.versions,
        **observed,
    )


def _reason(folder: Path, ended: Ended) -> str:
    log = folder / LOG_FILE
    log_text, last = read_log(log), ended.progress
    if ended.stopped_after_seconds is not None:
        where = f"at step {last['step']} of {last['num_steps']}" if last else "before its first step"
        hung = f": {ended.hung}" if ended.hung else ""
        return f"stopped after {ended.stopped_after_seconds:g} s, {where}{hung}"
    if (full := disk_full(folder, log_text)) is not None:
        return full
    if (killed := killed_process(log_text, ended.exit_code)) is not None:
        return f"{killed} was killed by signal 9: {ended.killed_by}"
    reason = reason_in_log(log)
    if port_taken(reason):
        port = re.search(r"--main_process_port (\d+)", shlex.join(ended.command))[1]
        return f"port {port} was taken by another program (EADDRINUSE)"
    if reason.startswith("last line") and (name := crash(log_text)):
        return f"a rank crashed ({name}): see {log}"
    return reason


def as_typed(command: list[str]) -> str:
    """A launch's command line for a shell."""
    return shlex.join(["accelerate", "launch", *without_secrets(command[3:])])
