"""Ctrl-C (SIGINT) while there is nothing to save; how two of them are told from one that arrives twice."""

import contextlib
import signal
import threading
from collections.abc import Iterator

SAME_SECONDS = 1.0
"""within this time it is the same Ctrl-C: a terminal sends it to all processes in its foreground, and a
launcher passes it on to its ranks, too"""


def end_at_once() -> None:
    """From now on SIGINT ends this process without a traceback, even in native code, and shells see 130.

    Where SIGINT is ignored (`nohup`, a script's background jobs) it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Within, SIGINT ends this process: modules in C may crash where KeyboardInterrupt ends their import."""
    if threading.current_thread() is not threading.main_thread():  # in which alone Python takes signals
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
