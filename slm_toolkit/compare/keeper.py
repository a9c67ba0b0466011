"""A process between `slm compare` and a launch, which ends the launch's whole process tree when either ends.

    SLM_TOOLKIT_RUN_DIR=runs/a python -m slm_toolkit.compare.keeper accelerate launch ...

Each rank is a session of its own, so no signal to a group reaches them all, and nobody can handle a SIGKILL.
But the kernel closes a dead process's files: its stdin is a pipe from `slm compare`, never written to.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from slm_toolkit.compare.processes import end_processes_of
from slm_toolkit.record import RUN_DIR_VARIABLE


def start_kept(
    command: list[str], run_dir: Path, log: BinaryIO, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` under a keeper, whose exit code is the command's: 128 + N where signal N ended it."""
    return subprocess.Popen(
        [sys.executable, "-m", "slm_toolkit.compare.keeper", *command],
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
