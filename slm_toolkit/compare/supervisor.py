"""The keeper: a process between `slm compare` and a launch; it ends the run's processes when either ends.

    SLM_TOOLKIT_RUN_DIR=runs/a python -m slm_toolkit.compare.supervisor accelerate launch ...

Each rank is its own session, so a signal to a process group does not reach all ranks. The keeper adopts
processes whose parents end, so it finds all processes of the launch. `slm compare` can't handle SIGKILL, so
the keeper's stdin is a pipe from `slm compare`. Nothing is written to the pipe. When `slm compare` dies, the
kernel closes the pipe, and the keeper ends the launch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from slm_toolkit.base.safe_files import hold
from slm_toolkit.launch.processes import adopt_orphans
from slm_toolkit.record.run_record import RUN_DIR_VARIABLE

_GENTLE_SECONDS = 5
"time that processes have to end after SIGTERM"
_LONGEST_SECONDS = 30
"time after which `end_processes_of` gives up"


def processes_of(folder: Path, *, keeper: int | None = None) -> list[psutil.Process]:
    """Return all processes of the run in `folder`, or of runs directly below it, except this process.

    Ignores runs further down, because they may belong to another comparison. Finds processes by their
    environment; with `keeper`, the pid of a running keeper, also all processes below it.
    """
    processes = [] if keeper is None else psutil.Process(keeper).children(recursive=True)
    for process in psutil.process_iter():
        try:
            run_dir = process.environ().get(RUN_DIR_VARIABLE)
        except (psutil.Error, OSError):  # another user's process, or it has just ended
            continue
        if run_dir and process.pid != os.getpid() and folder in (Path(run_dir), Path(run_dir).parent):
            processes.append(process)
    return list(dict.fromkeys(processes))


def end_processes_of(folder: Path, *, gently: bool = True, keeper: int | None = None) -> list[psutil.Process]:
    """End the processes of `processes_of`, and return those that can't be ended.

    Sends SIGTERM, and SIGKILL to processes that still run after 5 seconds. With gently=False, sends SIGKILL
    at once.
    """
    until = time.monotonic() + _LONGEST_SECONDS
    while (remaining := processes_of(folder, keeper=keeper)) and time.monotonic() < until:
        for process in remaining:
            try:
                process.terminate() if gently else process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=_GENTLE_SECONDS)
        gently = False  # the loop looks again, because a process may have started another
    return remaining


LOCK_FILE = ".compare.lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock `folder` for the block; the lock also ends with this process, for any reason.

    Ends processes that an earlier comparison left over, and yields their number. Raises ValueError if
    another comparison has the lock, or if leftover processes can't be ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = hold(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"another `slm compare` ({error.strerror}) is running in {folder}\n"
            "hint: wait until it ends, or give another --output_dir"
        ) from None
    except OSError as error:
        raise ValueError(
            f"can't write {error.filename}: {error.strerror}\nhint: choose another folder with --output_dir"
        ) from None
    with file:
        left_over = processes_of(folder)
        if stuck := end_processes_of(folder, gently=False):
            raise ValueError(
                f"processes {', '.join(str(process.pid) for process in stuck)} of an earlier comparison in "
                f"{folder} can't be ended and still use memory\nhint: check for a stuck driver or disk"
            )
        yield len(left_over)


def start_kept(
    command: list[str], run_dir: Path, log: BinaryIO, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` under a keeper. The keeper's exit code is the command's, or 128 + N after signal N."""
    return subprocess.Popen(
        [sys.executable, "-m", "slm_toolkit.compare.supervisor", *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**env, RUN_DIR_VARIABLE: str(run_dir)},
    )


def end_kept(keeper: subprocess.Popen[bytes], run_dir: Path) -> None:
    """End the keeper and all processes of the run, even if the keeper was killed."""
    keeper.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(timeout=15)
    end_processes_of(run_dir, gently=False, keeper=keeper.pid if keeper.poll() is None else None)
    keeper.wait()


def main() -> None:
    must_end = threading.Event()

    def wait_for_end_of_parent() -> None:
        os.read(sys.stdin.fileno(), 1)
        must_end.set()

    signal.signal(signal.SIGTERM, lambda *_: must_end.set())
    adopt_orphans()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=wait_for_end_of_parent, daemon=True).start()
    while child.poll() is None and not must_end.wait(0.05):
        pass
    code = child.returncode
    end_processes_of(Path(os.environ[RUN_DIR_VARIABLE]), keeper=os.getpid())
    sys.exit(1 if code is None else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
