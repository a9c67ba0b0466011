"""`accelerate launch` in this process, ended by one line and an exit code that say how the ranks ended.

accelerate and torch show a traceback of their own for every end but a good one, and always exit with 1; a
scheduler then can't tell a run that was stopped and saved (143) from one that failed.
"""

from slm_toolkit.base.interrupts import SAME_SECONDS, end_at_once

if __name__ == "__main__":
    end_at_once()  # accelerate is imported for seconds

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

_LOGS_OF_TORCH = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
"where torch's launcher reports each signal that it gets and passes on; how a run ended its ranks report"


def launch(words: list[str]) -> int:
    """Run `accelerate launch` with these words; returns the exit code: that of the rank that ended first.

    Of a launcher that got SIGTERM or SIGINT (Ctrl-C): what its ranks ended with, 143 or 130 where they saved,
    1 where they could not; 128 + the signal where they ended before they could say.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _pass_on)  # torch's launcher has its own handler instead
    _kill_at_second_interrupt()
    for name in _LOGS_OF_TORCH:
        logging.getLogger(name).addFilter(lambda record: " signal" not in record.getMessage())
    with tempfile.NamedTemporaryFile() as said:
        os.environ[EXIT_CODE_VARIABLE] = said.name
        before = look_at_host_ram()
        try:
            launch_command(launch_command_parser().parse_args(words))
        except SignalException as error:
            return int(Path(said.name).read_text() or 128 + error.sigval)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _told(f"rank {rank} (pid {failure.pid})", failure.exitcode, before)
        except subprocess.CalledProcessError as error:  # of a strategy with one process
            return _told("the process", error.returncode, before)
    return 0


def _told(who: str, exit_code: int, before: RamState) -> int:
    """The exit code as shells have it, after a line about a signal; all else the rank has told itself."""
    if exit_code >= 0:
        return exit_code
    name = signal.Signals(-exit_code).name
    cause = killed_for_ram(before, look_at_host_ram()) if name == "SIGKILL" else None
    print(f"error: {who} was ended by {name}" + (f": {cause}" if cause else ""), file=sys.stderr)
    return 128 - exit_code


def _pass_on(number: int, frame: FrameType | None) -> None:
    children = psutil.Process().children()
    if not children:  # nothing was started yet
        raise SystemExit(128 + number)
    for child in children:
        child.send_signal(number)


def _kill_at_second_interrupt() -> None:
    """Start a thread that kills all ranks at a second Ctrl-C; torch's launcher would wait 30 s for them.

    Python's C handler writes the number of each signal to a file of our choice: so the thread knows of it
    whatever handler torch's launcher sets, and while that handler waits.
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
        print(
            "error: ended at the second Ctrl-C; the steps since the last checkpoint are lost", file=sys.stderr
        )
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    code = launch(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # torch's threads may abort a slow exit
