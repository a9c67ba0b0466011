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


def write_beside(texts: dict[Path, str], *, flag: str, overwrite: bool | None = None) -> list[Path]:
    """Write the files that a user asked for by `flag`, and their folders; returns their paths.

    `overwrite`: None for a verb without that flag. Raises ValueError where one is there, and writes none of
    them, or where one can't be written.
    """
    if (present := [path for path in texts if path.exists()]) and not overwrite:
        such = f" ({len(present)} such files)" if len(present) > 1 else ""
        instead = "" if overwrite is None else ", or --overwrite to replace it"
        raise ValueError(
            f"{present[0]} exists{such}: nothing was written\nhint: another folder after {flag}{instead}"
        )
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ValueError(
                f"can't write to {path.parent}: {error.strerror}\nhint: give {flag} a folder"
            ) from None
    return list(texts)


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
