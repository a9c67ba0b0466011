"""One comparison at a time in a folder: who holds it may end what an earlier, killed one left running."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from slm_toolkit.compare.processes import end_processes_of, processes_of

LOCK_FILE = ".compare.lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold `folder` until the end of this process, however it ends; yields how many processes were left over.

    Raises ValueError where another comparison holds it, and where one's processes can't be ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise ValueError(
            f"can't write to {folder}: {error.strerror}\nhint: --output_dir says where runs go"
        ) from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(
                    f"another `slm compare` (process {file.read().strip()}) is at work in {folder}\n"
                    "hint: wait for it, or give another --output_dir"
                ) from None
        left_over = processes_of(folder)
        if stuck := end_processes_of(folder, gently=False):
            raise ValueError(
                f"processes {', '.join(str(process.pid) for process in stuck)} of an earlier comparison in "
                f"{folder} can't be ended\nhint: they hold memory; is a driver or a disk stuck?"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        with suppress(OSError):  # a full disk: the lock holds, its holder has no name
            file.flush()
        yield len(left_over)
