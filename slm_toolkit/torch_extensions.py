"""Where torch keeps what it compiles for DeepSpeed, and the locks that a killed compiler leaves there."""

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

QUIET_SECONDS = 300.0
"""of a folder with a lock that no process of this machine holds: another machine or container may share the
folder, and its compiler writes a file every minute or two"""
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 3.0
"of a lock: what has been compiled before is locked for an instant, too"


def extensions_folder() -> Path:
    """Holds a folder for each extension; by default below one more level, for the version of Python."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def wait_for_compilers(
    *, speaks: bool, folder: Path | None = None, quiet_seconds: float = QUIET_SECONDS
) -> None:
    """Return once no other run compiles an extension; remove the locks of compilers that were killed.

    torch locks an extension's folder by a file while it compiles, and waits for as long as that is there. A
    process that is killed leaves it, and every later run would wait without end and without a word.

    speaks: whether this process writes to stderr what it waits for; what it removes it does say.
    folder: in place of `extensions_folder()`.
    quiet_seconds: how long nothing in an extension's folder has changed before an unheld lock is removed.
    """
    root = folder or extensions_folder()
    said: set[Path] = set()
    while locks := _locks(root):
        holders = _holders(locks)
        waiting = False
        for lock in locks:
            holder = holders.get(lock)
            if holder is None and _remove(lock, quiet_seconds):
                name = lock.parent.name
                _say(f"removed {lock}: a compile of {name} was interrupted, and left it locked")
            elif holder is None or not _is_of_this_run(holder):
                waiting = True
                if speaks and lock not in said:
                    said.add(lock)
                    _say(_waits_for(lock, holder, quiet_seconds))
        if not waiting:
            return
        time.sleep(_LOOK_SECONDS)


class CompilerNews:
    """Tells on stderr, once for each extension, that it is being compiled, which takes minutes."""

    def __init__(self) -> None:
        self._said: set[Path] = set()

    def look(self, folder: Path | None = None) -> None:
        """folder: in place of `extensions_folder()`."""
        for lock in _locks(folder or extensions_folder()):
            with suppress(OSError):  # done meanwhile
                if lock in self._said or time.time() - lock.stat().st_mtime <= _LONG_SECONDS:
                    continue
                holder = _holders([lock]).get(lock)
                if holder is not None and _is_of_this_run(holder):  # of others `wait_for_compilers` tells
                    self._said.add(lock)
                    name = lock.parent.name
                    _say(f"{name} is compiled for DeepSpeed, once on this machine: up to some minutes")


def _locks(root: Path) -> list[Path]:
    return [lock for depth in ("*/lock", "*/*/lock") for lock in root.glob(depth)]


def _holders(locks: list[Path]) -> dict[Path, psutil.Process]:
    """The processes of this machine and user that have a lock open, as torch does while it compiles."""
    wanted = {os.path.realpath(lock): lock for lock in locks}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            for file in process.open_files():
                if file.path in wanted:
                    found[wanted[file.path]] = process
    return found


def _is_of_this_run(holder: psutil.Process) -> bool:
    """A rank beside this one, which torch waits for; were it killed, the run would end."""
    with suppress(psutil.Error):
        return holder.ppid() == os.getppid()
    return False


def _remove(lock: Path, quiet_seconds: float) -> bool:
    """Whether this process has removed a lock in whose folder nothing has changed for so long."""
    with suppress(OSError), open(lock) as file:  # gone meanwhile
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another rank is at it
        is_it_still = os.fstat(file.fileno()).st_ino == lock.stat().st_ino
        changed = max(path.lstat().st_mtime for path in lock.parent.iterdir())
        if is_it_still and time.time() - changed > quiet_seconds:
            lock.unlink()
            return True
    return False


def _waits_for(lock: Path, holder: psutil.Process | None, quiet_seconds: float) -> str:
    name = lock.parent.name
    if holder is not None:
        return f"pid {holder.pid} compiles {name}; this run waits for it"
    return (
        f"{lock} says that {name} is being compiled, by no process of this machine; if by none at all, remove"
        f" it. Otherwise this run waits until nothing has changed there for {quiet_seconds / 60:.3g} minutes"
    )


def _say(what: str) -> None:
    print(f"note: {what}", file=sys.stderr, flush=True)
