"""Turn a user's mistake into one line with a hint and exit code 2; a bug keeps its traceback."""

import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

# environment variable of ranks started by `slm launch`: the file where a rank writes a nonzero exit code
EXIT_CODE_VARIABLE = "SLM_EXIT_CODE_FILE"
# environment variable of ranks started by `slm compare`: the limit in seconds, and its monotonic end time
TIME_LIMIT_VARIABLE = "SLM_TIME_LIMIT"
# part of the message about a process that ended without a message; its parent process knows the signal
KILLED_OR_CRASHED = "was killed or crashed"
# first words of the message of a run that reached its time limit
STOPPED_AFTER = "stopped after"


class RunEnded(RuntimeError):
    """Ends a started run on all ranks: prints one message, records the reason, shows no traceback."""

    def __init__(self, message: str, *, exit_code: int = 1, status: str = "failed") -> None:
        super().__init__(message)
        self.exit_code, self.status = exit_code, status


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ValueError, or an error that `about_path` explains, as `error: ...`; then exit with code 2.

    Each machine shows the error once: the launcher kills all ranks once one exits, so other ranks wait until
    local rank 0 has printed the error.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error) if isinstance(error, ValueError) else about_path(error)
        if message is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_FIRST_RANK_SECONDS)
        print(f"error: {shown(message)}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def about_path(error: OSError) -> str | None:
    """Return a message about an unusable path, a full disk or a used-up quota; None for all other errors."""
    if error.errno not in _OF_PATHS:
        return None
    path = "the output" if error.filename is None else error.filename
    is_full = error.errno in DISK_FULL
    hint = "free space on its disk or raise its quota" if is_full else "check the path and its owner"
    return shown(f"can't use {path}: {error.strerror}\nhint: {hint}")


_OF_PATHS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EEXIST, errno.ENOTDIR),
    *(errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
}


# time for local rank 0 to find and print the same mistake
_FIRST_RANK_SECONDS = 30.0


def shown(message: str) -> str:
    """Return a message that is safe to print: control characters are escaped, long lines are shortened."""
    lines = without_controls(message).split("\n")
    half = _LONGEST_LINE // 2
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}" for line in lines
    )


def without_controls(text: str) -> str:
    """Return the text with control characters and invisible characters escaped: `\\x1b`, `\\u202e`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile(  # controls except tab and newline; direction marks, zero widths, separators, tags
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
_LONGEST_LINE = 2000  # characters; a longer line quotes a user's file or name


def first_line(error: BaseException) -> str:
    """Return `first_of` the lines of the error's message, or the name of its type if it has no message."""
    text = str(error).strip()
    return first_of(text.splitlines()) if text else type(error).__name__


def first_of(lines: list[str]) -> str:
    """Return the first of a message's lines; if it ends with a colon, with the values on the lines below."""
    first, *below = (line.strip() for line in lines[:6])
    if first.endswith(":"):
        first += " " + "; ".join(takewhile(lambda line: not _NO_VALUE.match(line), below))
    return first.strip()


# begins a line that is no part of the message above it; the last is of torch's launcher
_NO_VALUE = re.compile(r"\S+Error|Traceback|hint: |[EW]\d{4} ")


# error numbers of a failed write: the disk is full, the quota is used up, the file exceeds its size limit
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the same errors in text: Linux's numbers, and the messages of C++ and Rust
SAYS_DISK_FULL = re.compile(
    r"\[Errno (28|122|27)\]|No space left on device|Disk quota exceeded|os error (28|122|27)\b"
)
# out of memory in the messages of CUDA, NCCL, cuBLAS, cuDNN and the CPU's allocator, which raise other
# errors
OUT_OF_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE
)


# Ctrl-C (SIGINT) while there is nothing to save.

# Two SIGINTs within this time come from one Ctrl-C: the terminal sends it to all processes in its
# foreground, and the launcher also forwards it to its ranks.
SAME_SECONDS = 1.0


def end_at_once() -> None:
    """Let SIGINT end this process from now on, without a traceback, even in native code; shells see 130.

    If SIGINT is ignored (`nohup`, background jobs of a script), it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end the process inside this block: C modules can crash on a KeyboardInterrupt at import."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
