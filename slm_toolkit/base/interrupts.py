"""Handle Ctrl-C (SIGINT) while there is nothing to save."""

import contextlib
import signal
import threading
from collections.abc import Iterator

SAME_SECONDS = 1.0
"""Two SIGINTs within this time come from one Ctrl-C: the terminal sends it to all processes in its
foreground, and the launcher also forwards it to its ranks."""


def end_at_once() -> None:
    """Let SIGINT end this process from now on, without a traceback, even in native code; shells see 130.

    If SIGINT is ignored (`nohup`, background jobs of a script), it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end the process inside this block: C modules can crash on a KeyboardInterrupt at import."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
