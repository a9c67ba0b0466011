"""Create and lock a run's files and folders without following links; read the end of a file that grows."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def open_new(path: Path, mode: str = "x") -> IO:
    """Open a new file at `path`. Deletes an old file or link there; the target of a link stays unchanged."""
    path.unlink(missing_ok=True)
    return path.open(mode)


def write_new(path: Path, text: str) -> None:
    with open_new(path) as file:
        file.write(text)


def read_end(path: Path, limit_bytes: int, *, start: int = 0) -> tuple[bytes, int]:
    """Return the bytes of a file from `start` on, at most the last `limit_bytes`, and the file's size.

    For a file that other programs write: never waits, and returns (b"", 0) for a pipe, a folder or no file.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                begin = max(start, status.st_size - limit_bytes)
                return os.pread(descriptor, max(0, status.st_size - begin), begin), status.st_size
        finally:
            os.close(descriptor)
    return b"", 0


def write_beside(texts: dict[Path, str], *, flag: str) -> list[Path]:
    """Make the folders of `texts`, write the files, and return their paths.

    `flag` is the user's flag that names the folder, for error messages. Raises ValueError if a file exists
    already (then no file is written) or if a file can't be written.
    """
    if path := next(filter(Path.exists, texts), None):
        raise ValueError(f"{path} exists: nothing was written\nhint: give {flag} another folder")
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
    """Make `folder` if it does not exist. Replaces a link by a folder; the target of the link stays."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def hold(path: Path) -> IO[str]:
    """Lock the file `path` until the returned file is closed or this process ends for any reason.

    Raises BlockingIOError if another process has the lock; the error's `strerror` names that process. Raises
    OSError if the file can't be opened, for example because it is a link. On a file system without locks,
    nothing is locked and no error is raised.
    """
    flags = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    for access in (os.O_RDONLY, os.O_RDWR):  # read-only first: a file open for writing blocks a remount as ro
        file = open(os.open(path, flags | access, 0o666))  # noqa: SIM115 - open as long as it is held
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            with file:
                raise BlockingIOError(error.errno, file.read(200).strip(), str(path)) from None
        except OSError:  # NFS locks only files open for writing; some file systems have no locks
            continue
    os.register_at_fork(after_in_child=file.close)  # a data loader's worker can outlive its rank
    with suppress(OSError), open(os.open(path, flags | os.O_WRONLY | os.O_TRUNC), "w") as name:
        name.write(f"process {os.getpid()} on {socket.gethostname()}")
    return file
