"""The processes of a run, found by a variable that all of them inherit: ranks outlive a killed launcher."""

import os
import time
from pathlib import Path

import psutil

from slm_toolkit.record import RUN_DIR_VARIABLE

_GENTLE_SECONDS = 5
_LONGEST_SECONDS = 30


def processes_of(folder: Path) -> list[psutil.Process]:
    """All other processes of the run in `folder`, or of the runs right below it: not of folders further down,
    where another comparison may be at work."""
    found = []
    for process in psutil.process_iter():
        try:
            run_dir = process.environ().get(RUN_DIR_VARIABLE)
        except (psutil.Error, OSError):  # another user's, or it ended meanwhile
            continue
        if run_dir and process.pid != os.getpid() and folder in (Path(run_dir), Path(run_dir).parent):
            found.append(process)
    return found


def end_processes_of(folder: Path, *, gently: bool = True) -> list[psutil.Process]:
    """End them, by force where five seconds of asking were not enough; returns those that can't be ended."""
    started = time.monotonic()
    while (left := processes_of(folder)) and time.monotonic() - started < _LONGEST_SECONDS:
        for process in left:
            try:
                process.terminate() if gently else process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=_GENTLE_SECONDS)
        gently = False  # and look again: one may have started another meanwhile
    return left
