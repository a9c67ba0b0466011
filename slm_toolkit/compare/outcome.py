"""The record of a run that has ended: its own where that tells the truth, else one that says why not."""

import re
import shlex
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import KILLED_OR_CRASHED, SAYS_DISK_FULL, STOPPED_AFTER
from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord, model_facts

LOG_FILE = "log.txt"
"what a run wrote to stdout and stderr, beside its record"
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|another process is utilizing it", re.IGNORECASE)
"how torch's store, gloo and accelerate say it"
_EXIT_SIGNAL = re.compile(r"(?:exitcode  : -|died with <Signals\.\w+: )(\d+)")
"how torch's launcher and accelerate's tell of a rank that a signal ended"
_LITTLE_BYTES = 64 * 1024
_KILLED = 128 + 9
"exit code of a process, as shells and our keeper give it, that signal 9 ended"


def reason_in_log(log: Path) -> str:
    """The line of a log that says best why a run ended: ours, else the last exception's, else the last."""
    lines = [line.strip() for line in read_log(log).splitlines() if line.strip()]
    for pattern in (r"error: (.*)", r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b: .*)"):
        found = [
            match[1]
            for line in lines
            if (match := re.match(pattern, line)) and "ChildFailedError" not in line
        ]
        if found:
            return found[-1]
    return f"see {log}" if not lines else f"last line of {log}: {lines[-1][:200]}"


def telling_lines(log: Path, number: int, *, reason: str | None) -> list[str]:
    """Of a log the lines up to the one that says `reason`, else the last before the launcher's summary."""
    lines = [line.rstrip() for line in read_log(log).splitlines() if line.strip()]
    launcher = next((i for i, line in enumerate(lines) if _LAUNCHER.match(line)), len(lines))
    lines = lines[:launcher] or lines
    said = [i for i, line in enumerate(lines) if reason and reason in line]
    return lines[: said[-1] + 1 if said else None][-number:]


_LAUNCHER = re.compile(r"[EW]\d{4} [\d:.]+ \d+ .*torch/distributed/elastic/")


def read_log(log: Path) -> str:
    """Empty where a full disk left none."""
    return log.read_text(errors="replace") if log.is_file() else ""


def killed_process(log_text: str, exit_code: int) -> str | None:
    """Which process of a run signal 9 ended: a rank, as the launcher reports, or the launcher; None: none."""
    if found := re.search(r"rank\s+: (\d+).*\n\s*exitcode\s+: -9\b", log_text):
        return f"rank {found[1]}"
    if "exitcode  : -9" in log_text:
        return "a rank"
    if "died with <Signals.SIGKILL: 9>" in log_text:  # of a strategy with one process
        return "rank 0"
    return "the launcher" if exit_code in (_KILLED, -9) else None


def crash(log_text: str) -> str | None:
    """The signal, by name, with which a rank crashed: the first, for the launcher ends the others."""
    cause = log_text.rpartition("Root Cause (first observed failure)")[2]  # where there is none, all
    found = _EXIT_SIGNAL.search(cause)
    return signal.Signals(int(found[1])).name if found else None


def port_taken(reason: str) -> bool:
    """Whether a run ended for its port; torch warns of such things where it goes on without."""
    return _PORT_TAKEN.search(reason) is not None


def disk_full(folder: Path, log_text: str) -> str | None:
    """What a full disk stopped, with what is free now; None where the disk is not why."""
    free_bytes = shutil.disk_usage(folder).free
    if not SAYS_DISK_FULL.search(log_text) and free_bytes >= _LITTLE_BYTES:
        return None
    said = next((line.strip() for line in log_text.splitlines() if SAYS_DISK_FULL.search(line)), None)
    return f"no room on the disk of {folder} ({free_bytes / 2**20:,.1f} MiB free now)" + (
        f": {said[:200]}" if said else ""
    )


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
        if own := re.search(rf"^error: ({STOPPED_AFTER} .*)$", log_text, re.MULTILINE):
            return own[1]  # names the rank that hangs
        where = f"at step {last['step']} of {last['num_steps']}" if last else "before its first step"
        return f"{STOPPED_AFTER} {ended.stopped_after_seconds:g} s, {where}"
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
