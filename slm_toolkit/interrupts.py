"""Ctrl-C (SIGINT) while there is nothing to save; how two of them are told from one that arrives twice."""

import signal

SAME_SECONDS = 1.0
"""within this time it is the same Ctrl-C: a terminal sends it to all processes in its foreground, and a
launcher passes it on to its ranks, too"""


def end_at_once() -> None:
    """From now on SIGINT ends this process without a traceback, even in native code, and shells see 130.

    Where SIGINT is ignored (`nohup`, a script's background jobs) it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
