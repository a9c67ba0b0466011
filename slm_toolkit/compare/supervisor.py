"""A process between `slm compare` and a launch, which ends the launch's whole process tree when either ends.

    SLM_TOOLKIT_RUN_DIR=runs/a python -m slm_toolkit.compare.supervisor accelerate launch ...

Each rank is a session of its own, so no signal to a group reaches them all, and nobody can handle a SIGKILL.
But the kernel closes a dead process's files: its stdin is a pipe from `slm compare`, never written to.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

from slm_toolkit.base.safe_files import hold
from slm_toolkit.record.run_record import RUN_DIR_VARIABLE

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


LOCK_FILE = ".compare.lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold `folder` until the end of this process, however it ends; yields how many processes were left over.

    Raises ValueError where another comparison holds it, and where one's processes can't be ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = hold(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"another `slm compare` ({error.strerror}) is at work in {folder}\n"
            "hint: wait for it, or give another --output_dir"
        ) from None
    except OSError as error:
        raise ValueError(
            f"can't write {error.filename}: {error.strerror}\nhint: --output_dir says where runs go"
        ) from None
    with file:
        left_over = processes_of(folder)
        if stuck := end_processes_of(folder, gently=False):
            raise ValueError(
                f"processes {', '.join(str(process.pid) for process in stuck)} of an earlier comparison in "
                f"{folder} can't be ended\nhint: they hold memory; is a driver or a disk stuck?"
            )
        yield len(left_over)


def start_kept(
    command: list[str], run_dir: Path, log: BinaryIO, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` under a keeper, whose exit code is the command's: 128 + N where signal N ended it."""
    return subprocess.Popen(
        [sys.executable, "-m", "slm_toolkit.compare.supervisor", *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**env, RUN_DIR_VARIABLE: str(run_dir)},
    )


def end_kept(keeper: subprocess.Popen[bytes], run_dir: Path) -> None:
    """End all that `start_kept` started, and what a killed keeper would leave."""
    keeper.stdin.close()
    try:
        keeper.wait(timeout=15)
    except subprocess.TimeoutExpired:
        keeper.kill()
    end_processes_of(run_dir, gently=False)
    keeper.wait()


def main() -> None:
    to_end = threading.Event()

    def wait_for_end_of_parent() -> None:
        os.read(sys.stdin.fileno(), 1)
        to_end.set()

    signal.signal(signal.SIGTERM, lambda *_: to_end.set())
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=wait_for_end_of_parent, daemon=True).start()
    while child.poll() is None and not to_end.wait(0.05):
        pass
    code = child.returncode
    end_processes_of(Path(os.environ[RUN_DIR_VARIABLE]))
    sys.exit(1 if code is None else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
