"""`accelerate launch` in this process, ended by one line and an exit code that say how the ranks ended.

accelerate and torch show a traceback of their own for every end but a good one, and always exit with 1; a
scheduler then can't tell a run that was stopped and saved (143) from one that failed.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from slm_toolkit.errors import EXIT_CODE_VARIABLE


def launch(words: list[str]) -> int:
    """Run `accelerate launch` with these words; returns the exit code: that of the rank that ended first.

    Of a launcher that got a signal: what its ranks ended with, 143 where they saved, 1 where they could not;
    128 + the signal where they were gone before they could say.
    """
    signal.signal(signal.SIGTERM, _pass_on)  # torch's launcher has its own handler instead
    with tempfile.NamedTemporaryFile() as said:
        os.environ[EXIT_CODE_VARIABLE] = said.name
        try:
            launch_command(launch_command_parser().parse_args(words))
        except SignalException as error:
            return int(Path(said.name).read_text() or 128 + error.sigval)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _told(f"rank {rank} (pid {failure.pid})", failure.exitcode)
        except subprocess.CalledProcessError as error:  # of a strategy with one process
            return _told("the process", error.returncode)
    return 0


def _told(who: str, exit_code: int) -> int:
    """The exit code as shells have it, after a line about a signal; all else the rank has told itself."""
    if exit_code >= 0:
        return exit_code
    name = signal.Signals(-exit_code).name
    print(f"error: {who} was ended by {name}", file=sys.stderr)
    return 128 - exit_code


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


if __name__ == "__main__":
    code = launch(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # torch's threads may abort a slow exit
