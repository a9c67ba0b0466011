"""Sets the folder in which torch compiles DeepSpeed's operators, and removes stale lock files there."""

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
"prefix of a line about a compile that a run waits for; `slm compare` shows the rest of the line"
_LONG_SECONDS = 3.0
"report a compile after this time; an operator that is already compiled is locked only for an instant"


def extensions_folder() -> Path:
    """Return a folder for this machine and environment, below TORCH_EXTENSIONS_DIR or torch's default.

    Environments that share a folder rebuild each other's operators. In a folder that several machines share,
    another machine's lock looks like the lock of a killed compiler.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
    environment_hash = hashlib.sha256(f"{sys.prefix} {os.getuid()}".encode()).hexdigest()[:8]
    name = f"{socket.gethostname()}-{environment_hash}"
    return root if root.name == name else root / name  # child processes inherit the variable


def use_extensions_folder() -> None:
    """Make torch compile in `extensions_folder()`, in this process and its children."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())


def remove_stale_locks() -> None:
    """Remove locks in `extensions_folder()` that no process has open, and name them on stderr.

    torch below 2.15 waits as long as the file `lock` exists, so it waits forever after a killed compiler.
    From 2.15 on the file stays, but the kernel releases its lock when the process ends.
    """
    if not locks_by_existence():
        return
    locks = _locks()
    for lock in set(locks) - set(_holders(locks)):
        _remove(lock)


class CompilerNews:
    """Writes a line to stderr for each operator whose compile takes long: it can take minutes."""

    def __init__(self) -> None:
        self._first_seen: dict[Path, float] = {}

    def look(self) -> None:
        """Look for compiles; call it every second. Also removes locks of compilers that were killed."""
        remove_stale_locks()
        holders = _holders(_locks())
        self._first_seen = {lock: seen for lock, seen in self._first_seen.items() if lock in holders}
        for lock, holder in holders.items():
            first_seen = self._first_seen.setdefault(lock, time.monotonic())
            if time.monotonic() - first_seen <= _LONG_SECONDS:
                continue
            self._first_seen[lock] = math.inf  # report it only once
            name = lock.parent.name
            if _is_of_this_run(holder):
                _print(WAITING, f"compiling {name}, once on this machine: takes a few minutes")
            else:
                _print(WAITING, f"another run (pid {holder.pid}) is compiling {name}; this run may need it")


def locks_by_existence() -> bool:
    """Return True for torch below 2.15; later versions use a lock that ends with its process."""
    return tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 15)


def _locks() -> list[Path]:
    """Return the locks of running compiles; for torch below 2.15 also those of killed compilers."""
    # torch may add a level above the operators' folders, for the version of Python
    locks = [lock for depth in ("*/lock", "*/*/lock") for lock in extensions_folder().glob(depth)]
    return locks if locks_by_existence() else [lock for lock in locks if _is_locked(lock)]


def _is_locked(lock: Path) -> bool:
    with suppress(OSError), _opened(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _holders(locks: list[Path]) -> dict[Path, psutil.Process]:
    """Return this user's processes that have a lock open: torch keeps it open while it compiles.

    Ignores processes that opened it for appending: these are ours, see `_remove` and `_is_locked`.
    """
    by_path = {os.path.realpath(lock): lock for lock in locks}
    holders = {}
    for process in psutil.process_iter() if locks else ():
        with suppress(psutil.Error, OSError):
            for file in process.open_files():
                if file.path in by_path and not file.flags & os.O_APPEND:
                    holders[by_path[file.path]] = process
    return holders


def _opened(lock: Path) -> TextIO:
    """Open a lock for appending (see `_holders`); never create it."""
    return open(lock, "a", opener=lambda path, flags: os.open(path, flags & ~os.O_CREAT))


def _is_of_this_run(holder: psutil.Process) -> bool:
    """Return True if `holder` is a rank of the same launch."""
    with suppress(psutil.Error):
        return holder.ppid() == os.getppid()
    return False


def _remove(lock: Path) -> None:
    """Remove a lock unless a process has it open or has created it again."""
    with suppress(OSError), _opened(lock) as file:  # its inode is not reused while it is open
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another rank is removing it
        if not _holders([lock]) and os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
            lock.unlink()
            _print("note: ", f"removed {lock}: an interrupted compile of {lock.parent.name} left it behind")


def _print(prefix: str, text: str) -> None:
    print(prefix + text, file=sys.stderr, flush=True)
