"""Sets the folder in which torch compiles DeepSpeed's operators, and removes stale lock files there."""

import hashlib
import os
import socket
import sys
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil

_NUM_LOOKS = 4
"report a compile at this look; an operator that is already compiled is locked only for an instant"


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
    """Make torch compile in `extensions_folder()`, in this process and its children, free of stale locks."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())
    CompilerNews().look()


def locks_by_existence() -> bool:
    """Return True for torch below 2.15; later versions use a lock that ends with its process."""
    return tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 15)


class CompilerNews:
    """Names on stderr each compile that takes long, and removes locks of killed compilers.

    torch below 2.15 waits as long as the file `lock` exists, so it waits forever after a killed compiler. A
    running compiler has the file open. Only the first rank of a machine does this.
    """

    def __init__(self) -> None:
        self._num_looks: Counter[Path] = Counter()

    def look(self) -> None:
        """Call it every second."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        # torch may add a level above the operators' folders, for the version of Python
        locks = [lock for depth in ("*/lock", "*/*/lock") for lock in extensions_folder().glob(depth)]
        compilers = _pids_by_open_file() if locks else {}
        for lock in locks:
            pid = compilers.get(os.path.realpath(lock))
            self._num_looks[lock] += pid is not None
            if pid is not None and self._num_looks[lock] == _NUM_LOOKS:
                _say(f"waiting: {lock.parent.name} is being compiled (pid {pid}): takes a few minutes, once")
            elif pid is None and locks_by_existence():
                lock.unlink(missing_ok=True)
                _say(f"note: removed {lock}: an interrupted compile of {lock.parent.name} left it behind")


def _pids_by_open_file() -> dict[str, int]:
    pids: dict[str, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            pids |= {file.path: process.pid for file in process.open_files()}
    return pids


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
