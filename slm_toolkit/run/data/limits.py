"""Limits of processor time and memory for code of somebody else's that runs in this process."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_AGAIN_SECONDS = 0.1  # where a first TimeoutError was caught on the way


@contextlib.contextmanager
def limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Raises TimeoutError after so many seconds of processor time, and MemoryError for so many bytes beyond
    those that the process has now.

    The time is limited in the main thread only, where Python takes signals; the memory on Linux only.
    """
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread():
            after.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, _too_long))
            after.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
        statm = Path("/proc/self/statm")
        if statm.exists():
            import resource

            # RLIMIT_DATA: what is written in private, not the files that Arrow maps nor a GPU's address space
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = int(statm.read_text().split()[5]) * os.sysconf("SC_PAGESIZE") + num_bytes
            known = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
            after.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        yield


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError
