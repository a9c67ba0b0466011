"""Finds or makes the record of a run that has ended, with the reason if the run failed."""

import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import (
    KILLED_OR_CRASHED,
    OUT_OF_MEMORY,
    SAYS_DISK_FULL,
    STOPPED_AFTER,
    first_line,
    first_of,
    shown,
)
from slm_toolkit.base.safe_files import read_end
from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.compare.grid import PlannedRun, versions
from slm_toolkit.launch.processes import signal_name
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord, model_facts

LOG_FILE = "log.txt"
"a run's stdout and stderr, in the folder of its record"
_EXIT_SIGNAL = re.compile(r"(?:exitcode  : -|died with (?:<Signals\.\w+: |unknown signal ))(\d+)")
"messages of torch's and accelerate's launchers about a rank that a signal ended"
_LITTLE_BYTES = 64 * 1024
_END_OF_LOG_BYTES = 4 * 2**20
"read so much of the end of a log"
MOST_LOG_BYTES = 2 * 2**30
"a run that prints more is ended before it fills the disk"
_KILLED = 128 + 9
"a shell's or our keeper's exit code for a process that signal 9 ended"


def reason_in_log(log: Path) -> str:
    """Return the reason in a log: the last `error:` line, else the last exception, else the last line.

    A line that ends with a colon is continued by the lines below.
    """
    output, _ = _parts(read_log(log))
    lines = [re.sub(r"^\[rank\d+\]: ", "", line.rstrip()) for line in output.splitlines() if line.strip()]
    for pattern in (r"(?:\S+\.py: )?error: (.*)", r"([\w.]*(?:Error|Exception)\b: .*)"):
        for at, line in reversed([*enumerate(lines)]):
            if "ChildFailedError" not in line and (match := re.match(pattern, line.strip())):
                return shown(first_of([match[1], *lines[at + 1 :]]))
    return f"last line of {log}: {lines[-1].strip()[:200]}" if lines else f"see {log}"


def _parts(log_text: str) -> tuple[str, str]:
    """Split a log into what the ranks printed, and the launcher's traceback, which names the failed ranks."""
    *_, launchers_error = [len(log_text), *(match.start() for match in _LAUNCHERS_ERROR.finditer(log_text))]
    return log_text[:launchers_error], log_text[launchers_error:]


_LAUNCHERS_ERROR = re.compile(
    r'^Traceback .*\n(?:  .*\n){0,8}?  File "[^"]*accelerate/commands/launch\.py".*\n(?:  .*\n)*'
    r"(?:\S+\.ChildFailedError|subprocess\.CalledProcessError): ",
    re.MULTILINE,
)


def read_log(log: Path) -> str:
    """Return the end of the log's text; empty without a log."""
    return read_end(log, _END_OF_LOG_BYTES)[0].decode(errors="replace")


def killed_process(log_text: str, exit_code: int) -> str | None:
    """Return the process of a run that signal 9 ended: a rank, or the launcher; None if there is none."""
    _, launchers_error = _parts(log_text)
    if match := re.search(r"rank\s+: (\d+).*\n\s*exitcode\s+: -9\b", launchers_error):
        return f"rank {match[1]}"
    if "died with <Signals.SIGKILL: 9>" in launchers_error:  # written for a strategy with one process
        return "rank 0"
    return "the launcher" if exit_code in (_KILLED, -9) else None


def crash(log_text: str) -> str | None:
    """Return the name of the signal that ended the first rank; later ranks are ended by the launcher."""
    cause = _parts(log_text)[1].rpartition("Root Cause (first observed failure)")[2]
    match = _EXIT_SIGNAL.search(cause)
    return signal_name(int(match[1])) if match else None


def disk_full(folder: Path, log_text: str) -> str | None:
    """Return a reason with the free space if a full disk ended the run, else None."""
    free_bytes = shutil.disk_usage(folder).free
    if not SAYS_DISK_FULL.search(log_text) and free_bytes >= _LITTLE_BYTES:
        return None
    return f"no room on the disk of {folder} ({free_bytes / 2**20:,.1f} MiB free now)"


@dataclass(frozen=True)
class Ended:
    """Facts about a launch after all its processes have ended."""

    command: list[str]
    started_at: str
    seconds_total: float
    exit_code: int
    progress: dict[str, float] | None
    stopped_after_seconds: float | None
    "the time limit, if the launch exceeded it"
    killed_by: str
    "the likely sender of a SIGKILL at that time, if there was one"
    flooded: bool = False
    "whether the launch was ended because its log became too large"


def written_record(folder: Path) -> RunRecord | None:
    """Return the record in a run's folder; None if missing, damaged or of another version."""
    with suppress(ValueError):
        return read_record(folder / RECORD_FILE)
    return None


def own_record(run: PlannedRun, ended: Ended) -> RunRecord | None:
    """Return the run's own record if it describes the end correctly, else None."""
    record, log_text = written_record(run.folder), read_log(run.folder / LOG_FILE)
    if record is None:
        return None
    killed = killed_process(log_text, ended.exit_code) is not None
    timed_out = ended.stopped_after_seconds is not None
    # If a rank was killed, other ranks record only a closed connection or a lost rank. That is not the cause,
    # and we know the signal. A crash of their own is a cause.
    reason = record.reason or ""
    names_lost_rank = "peer" in reason or KILLED_OR_CRASHED in reason
    is_consequence = killed and record.status == "failed" and names_lost_rank
    is_ok = record.status == "ok" and ended.exit_code == 0 and not timed_out
    is_failure = record.status == "failed" and not is_consequence and not timed_out
    return record if record.status == "oom" or is_ok or is_failure else None


def record_of(run: PlannedRun, ended: Ended, *, reason: str | None = None) -> RunRecord:
    """Make the record of a run that left no record, or not a correct one."""
    reason = reason or _reason(run.folder, ended)
    status = "failed" if ended.stopped_after_seconds is None else "timeout"
    if run.words and OUT_OF_MEMORY.search(reason):  # a run of ours writes such a record itself
        status = "oom"
    return planned_record(
        run,
        status=status,
        started_at=ended.started_at,
        reason=reason,
        command=as_typed(ended.command) if ended.command else None,
        seconds_total=ended.seconds_total,
        gpu=run.gpu,
    )


def planned_record(run: PlannedRun, **observed: Any) -> RunRecord:
    """Make the record of a run that wrote none, from its plan and the fields that others `observed`."""
    return RunRecord(
        run_name=run.run_name,
        identity=run.identity,
        strategy=run.name,
        asked=run.asked,
        model={"name": Path(run.asked["script"][0]).name} if run.spec is None else model_facts(run.spec),
        versions=versions(),
        **observed,
    )


def _reason(folder: Path, ended: Ended) -> str:
    log = folder / LOG_FILE
    log_text, last = read_log(log), ended.progress
    if ended.stopped_after_seconds is not None:
        if match := re.search(rf"^error: ({STOPPED_AFTER} .*)$", log_text, re.MULTILINE):
            return match[1]  # names the hanging rank
        where = "before its first step" if last is None else f"at step {last['step']}"
        if last is not None and last["num_steps"] is not None:
            where += f" of {last['num_steps']}"
        return f"{STOPPED_AFTER} {ended.stopped_after_seconds:g} s, {where}"
    if ended.flooded:
        return f"stopped because it printed over {MOST_LOG_BYTES / 2**30:g} GiB: see {log}"
    if ended.exit_code == 0:
        try:
            read_record(folder / RECORD_FILE)
        except ValueError as error:
            return f"exit code 0, but no valid record: {first_line(error)}"
    if (full := disk_full(folder, log_text)) is not None:
        return full
    if (killed := killed_process(log_text, ended.exit_code)) is not None:
        return f"{killed} was killed by signal 9: {ended.killed_by}"
    reason = reason_in_log(log)
    if reason.startswith(("last line", "see ")) and (name := crash(log_text)):
        return f"a rank crashed ({name}): see {log}"
    return reason


def as_typed(command: list[str]) -> str:
    """Return a launch's command line as a user would type it in a shell."""
    return shlex.join(["accelerate", "launch", *without_secrets(command[3:])])
