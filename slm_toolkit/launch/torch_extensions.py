"""The folder in which torch compiles DeepSpeed's operators, and the lock files of compilers in it."""

import fcntl
import hashlib
import math
import os
import socket
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import psutil

WAITING = "waiting: "
"begins a line about a compile that a run waits for; `slm compare` shows the rest of it"
_LONG_SECONDS = 3.0
"of a compile; an operator that was compiled before is locked for an instant, too"


def extensions_folder() -> Path:
    """This environment's own folder on this machine, below TORCH_EXTENSIONS_DIR or torch's default.

    Environments that share a folder rebuild each other's operators, and a lock in a folder that several
    machines share can't be told from one that a killed compiler left.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
    of_environment = hashlib.sha256(f"{sys.prefix} {os.getuid()}".encode()).hexdigest()[:8]
    name = f"{socket.gethostname()}-{of_environment}"
    return root if root.name == name else root / name  # a process that a run starts inherits the folder


def use_extensions_folder() -> None:
    """Let torch compile in `extensions_folder()`, in this process and those that it starts."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())


def remove_stale_locks() -> None:
    """Remove the locks in `extensions_folder()` that nobody holds, and write to stderr which.

    Below 2.15 torch takes the existence of the file `lock` for a compile that goes on, and waits for ever on
    one that a killed compiler left. From 2.15 on the file stays, and the kernel releases its lock.
    """
    if not locks_by_existence():
        return
    locks = _locks()
    for lock in set(locks) - set(_holders(locks)):
        _remove(lock)


class CompilerNews:
    """Writes a line to stderr for each operator that is being compiled, which takes minutes."""

    def __init__(self) -> None:
        self._first_seen: dict[Path, float] = {}

    def look(self) -> None:
        """To be called every second. Also removes the lock of a compiler that was killed meanwhile."""
        remove_stale_locks()
        holders = _holders(_locks())
        self._first_seen = {lock: seen for lock, seen in self._first_seen.items() if lock in holders}
        for lock, holder in holders.items():
            first_seen = self._first_seen.setdefault(lock, time.monotonic())
            if time.monotonic() - first_seen <= _LONG_SECONDS:
                continue
            self._first_seen[lock] = math.inf  # is written once
            name = lock.parent.name
            if _is_of_this_run(holder):
                _print(WAITING, f"{name} is compiled for DeepSpeed, once on this machine: up to some minutes")
            else:
                _print(WAITING, f"another run, pid {holder.pid}, compiles {name}, which this run may need")


def locks_by_existence() -> bool:
    """Whether torch is older than 2.15, the first whose lock ends with the process that holds it."""
    return tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 15)


def _locks() -> list[Path]:
    """Of operators that are being compiled, and those that killed compilers left."""
    # torch puts one more level above the operators' folders, for the version of Python
    found = [lock for depth in ("*/lock", "*/*/lock") for lock in extensions_folder().glob(depth)]
    return found if locks_by_existence() else [lock for lock in found if _is_locked(lock)]


def _is_locked(lock: Path) -> bool:
    with suppress(OSError), _opened(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _holders(locks: list[Path]) -> dict[Path, psutil.Process]:
    """The processes of this user that have a lock open, as torch does while it compiles.

    A process that has it open to append is one of ours that looks at it, see `_remove` and `_is_locked`.
    """
    by_path = {os.path.realpath(lock): lock for lock in locks}
    found = {}
    for process in psutil.process_iter() if locks else ():
        with suppress(psutil.Error, OSError):
            for file in process.open_files():
                if file.path in by_path and not file.flags & os.O_APPEND:
                    found[by_path[file.path]] = process
    return found


def _opened(lock: Path) -> TextIO:
    """Open to append, see `_holders`, and never made anew where it is gone."""
    return open(lock, "a", opener=lambda path, flags: os.open(path, flags & ~os.O_CREAT))


def _is_of_this_run(holder: psutil.Process) -> bool:
    """Whether it is a rank of the same launch."""
    with suppress(psutil.Error):
        return holder.ppid() == os.getppid()
    return False


def _remove(lock: Path) -> None:
    """Remove a lock unless a process holds it, or has made it anew."""
    with suppress(OSError), _opened(lock) as file:  # its inode is not used again while it is open
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or else another rank is removing it
        if not _holders([lock]) and os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
            lock.unlink()
            _print("note: ", f"removed {lock}: a compile of {lock.parent.name} was interrupted, and left it")


def _print(prefix: str, text: str) -> None:
    print(prefix + text, file=sys.stderr, flush=True)
