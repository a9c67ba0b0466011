"""A rank's launcher: whether this process has one, and the kernel's help in ending with it."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"of Linux's prctl"
_LAUNCHERS = ("accelerate", "accelerate.commands.launch", "slm_toolkit.launcher")


def launcher_pid() -> int | None:
    """The process that started this one as a rank; None without a launcher."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    try:  # one process: accelerate starts it without torch's launcher
        words = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return parent if any(word in _LAUNCHERS or Path(word).name == "accelerate" for word in words) else None


def end_with_launcher(*, how: bool = True) -> None:
    """From now on the kernel kills this process when its launcher ends, in native code too; or no longer.

    For the seconds of importing torch, in which no thread of ours can look. Linux only.
    """
    if launcher_pid() is not None and (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if how else 0)
