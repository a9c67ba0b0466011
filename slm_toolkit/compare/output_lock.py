"""One comparison at a time in a folder: who holds it may end what an earlier, killed one left running."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slm_toolkit.compare.processes import end_processes_of, processes_of
from slm_toolkit.safe_files import hold

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
