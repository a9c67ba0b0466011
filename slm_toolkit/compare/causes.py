"""Why a run ended as it did, from what it left: its log, its exit code, its disk."""

import re
import shutil
import signal
from pathlib import Path

from slm_toolkit.disk_full import SAYS_DISK_FULL

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
