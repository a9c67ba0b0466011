"""How a run's files are made, anew and never through a link, and how one process holds a folder."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def open_new(path: Path, mode: str = "x", *, newline: str | None = None) -> IO:
    """Open a file to write it anew; a link in its place is removed, and what it points to stays as it is."""
    path.unlink(missing_ok=True)
    return path.open(mode, newline=newline)


def write_new(path: Path, text: str) -> None:
    with open_new(path) as file:
        file.write(text)


def make_folder(folder: Path) -> None:
    """Make `folder` where it is not there; a link in its place is removed, its target stays as it is."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def hold(path: Path) -> IO[str]:
    """Lock the file `path` until the returned file is closed or this process ends, however it ends.

    Raises BlockingIOError, whose `strerror` names the process that holds it, and OSError where the file can't
    be opened, a link for one. A file system without locks stops nobody.
    """
    flags = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    for access in (os.O_RDONLY, os.O_RDWR):  # open to write it would keep its disk from being made read-only
        file = open(os.open(path, flags | access, 0o666))  # noqa: SIM115 - open as long as it is held
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            with file:
                raise BlockingIOError(error.errno, file.read(200).strip(), str(path)) from None
        except OSError:  # NFS locks only what is open to write, others nothing
            continue
    os.register_at_fork(after_in_child=file.close)  # a data loader's worker may outlive its rank
    with suppress(OSError), open(os.open(path, flags | os.O_WRONLY | os.O_TRUNC), "w") as name:
        name.write(f"process {os.getpid()} on {socket.gethostname()}")
    return file
