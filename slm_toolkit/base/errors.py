"""Turn a user's mistake into one line with a hint and exit code 2; a bug keeps its traceback."""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

EXIT_CODE_VARIABLE = "SLM_EXIT_CODE_FILE"
"environment variable of ranks started by `slm launch`: the file where a rank writes a nonzero exit code"
TIME_LIMIT_VARIABLE = "SLM_TIME_LIMIT"
"environment variable of ranks started by `slm compare`: the limit in seconds, and its monotonic end time"
KILLED_OR_CRASHED = "was killed or crashed"
"part of the message about a process that ended without a message; its parent process knows the signal"
STOPPED_AFTER = "stopped after"
"first words of the message of a run that reached its time limit"


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
    """Return a message with a hint for an error about an unusable path; None for all other errors."""
    if error.errno not in _HELPS:
        return None
    path = "the output" if error.filename is None else error.filename
    return shown(f"can't use {path}: {error.strerror}\nhint: {_HELPS[error.errno]}")


_HELPS = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "check who owns it and whether its disk is writable",
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space on its disk or raise its quota"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the place of a folder; use another path"),
    errno.EISDIR: "this is a folder; give the path of a file",
    errno.ELOOP: "its symbolic links form a loop",
    errno.ENAMETOOLONG: "use a shorter name",
}


_FIRST_RANK_SECONDS = 30.0
"time for local rank 0 to find and print the same mistake"


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


_NO_VALUE = re.compile(r"\S+Error|Traceback|hint: |[EW]\d{4} ")
"begins a line that is no part of the message above it; the last is of torch's launcher"


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"error numbers of a failed write: the disk is full, the quota is used up, the file exceeds its size limit"
SAYS_DISK_FULL = re.compile(
    r"\[Errno (28|122|27)\]|No space left on device|Disk quota exceeded|os error (28|122|27)\b"
)
"the same errors in text: Linux's numbers, and the messages of C++ and Rust"
OUT_OF_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE
)
"out of memory in the messages of CUDA, NCCL, cuBLAS, cuDNN and the CPU's allocator, which raise other errors"


# The optional packages, by the extras of pyproject.toml. Messages name the packages: the extras themselves
# install from a checkout only (`pip install -e ".[peft]"`).
PACKAGES = {
    "fp8": "torchao",
    "peft": "peft bitsandbytes",
}


def pip_install(extra: str) -> str:
    """Return the command that installs an extra: "peft" gives `pip install peft bitsandbytes`."""
    return f"pip install {PACKAGES[extra]}"
