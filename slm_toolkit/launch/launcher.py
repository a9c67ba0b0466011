"""Runs `accelerate launch` in this process and exits with the exit code of its ranks.

accelerate and torch alone print a traceback for every failure and always exit with 1. A scheduler then can't
distinguish a run that was stopped and saved (143) from a failed run.
"""

from slm_toolkit.base.errors import SAME_SECONDS, end_at_once

if __name__ == "__main__":
    end_at_once()  # importing accelerate takes seconds

# isort: split
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from slm_toolkit.base.errors import EXIT_CODE_VARIABLE
from slm_toolkit.hardware.machine import RamState, killed_for_ram, look_at_host_ram
from slm_toolkit.launch.processes import signal_name

_LOGS_OF_TORCH = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
"torch's launcher logs each signal and exit code here; ranks that wrote theirs have said how the run ended"


def launch(words: list[str]) -> int:
    """Run `accelerate launch` with these words. Return the exit code of the first rank that failed, else 0.

    After SIGTERM or SIGINT (Ctrl-C), return the exit code that the ranks wrote: 143 or 130 if they saved, 1
    if they could not. If they ended without writing it, return 128 + the signal.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _pass_on)  # torch's launcher replaces this handler by its own
    _kill_at_second_interrupt()
    with tempfile.NamedTemporaryFile() as exit_code_file:
        for name in _LOGS_OF_TORCH:
            logging.getLogger(name).addFilter(
                lambda record: " signal" not in record.getMessage() and not _has_said_why(exit_code_file.name)
            )
        os.environ[EXIT_CODE_VARIABLE] = exit_code_file.name
        before = look_at_host_ram()
        try:
            launch_command(launch_command_parser().parse_args(words))
        except SignalException as error:
            return int(Path(exit_code_file.name).read_text() or 128 + error.sigval)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _shell_exit_code(f"rank {rank} (pid {failure.pid})", failure.exitcode, before)
        except subprocess.CalledProcessError as error:  # raised for a strategy with one process
            return _shell_exit_code("the process", error.returncode, before)
    return 0


def _has_said_why(exit_code_file: str) -> bool:
    """Return whether a rank ended with its own message: it then writes its exit code."""
    return os.path.exists(exit_code_file) and os.path.getsize(exit_code_file) > 0


def _shell_exit_code(process: str, exit_code: int, before: RamState) -> int:
    """Return a shell's exit code. If a signal ended the process, print that; the rank could not."""
    if exit_code >= 0:
        return exit_code
    name = signal_name(-exit_code)
    cause = killed_for_ram(before, look_at_host_ram()) if name == "SIGKILL" else None
    print(f"error: {process} was ended by {name}" + (f": {cause}" if cause else ""), file=sys.stderr)
    return 128 - exit_code


def _pass_on(number: int, frame: FrameType | None) -> None:
    children = psutil.Process().children()
    if not children:  # no rank was started yet
        raise SystemExit(128 + number)
    for child in children:
        child.send_signal(number)


def _kill_at_second_interrupt() -> None:
    """Start a thread that kills all ranks at a second Ctrl-C; torch's launcher would wait 30 s for them.

    Python's C handler writes each signal's number to a pipe. So the thread sees every signal, even if torch's
    launcher sets another handler, and while that handler waits.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def watch() -> None:
        first = None
        while True:
            if os.read(reads, 1)[0] != signal.SIGINT:
                continue
            first = first or time.monotonic()
            if time.monotonic() > first + SAME_SECONDS:
                break
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        print("error: killed at the second Ctrl-C; steps since the last checkpoint are lost", file=sys.stderr)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    try:
        code = launch(sys.argv[1:])
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    sys.stderr.flush()
    os._exit(code)  # torch's threads may abort a normal exit
