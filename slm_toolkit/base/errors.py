"""A user's mistake becomes one line with a hint and exit code 2; a bug keeps its traceback."""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE_VARIABLE = "SLM_EXIT_CODE_FILE"
"in the environment of ranks that `slm launch` started: where they write with which code they end, if not 0"
TIME_LIMIT_VARIABLE = "SLM_TIME_LIMIT"
"in the environment of ranks that `slm compare` started: seconds, and the monotonic time when they are over"
KILLED_OR_CRASHED = "was killed or crashed"
"in the message about a process that ended without one; the process that started it knows the signal"
STOPPED_AFTER = "stopped after"
"begins the message of a run that ended at its time limit"


class RunEnded(RuntimeError):
    """Ends a run that had begun, on all ranks alike: one message, a record that says why, no traceback."""

    def __init__(self, message: str, *, exit_code: int = 1, status: str = "failed") -> None:
        super().__init__(message)
        self.exit_code, self.status = exit_code, status


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ValueError, or what `about_path` knows, as `error: ...` and exit with 2: once on each machine.

    The launcher kills all ranks once one exits, so other ranks wait until local rank 0 has printed the error.
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
    """What can be said in a line, with a hint, of a path that can't be used; None for all other errors."""
    if error.errno not in _HELPS:
        return None
    where = "the output" if error.filename is None else error.filename
    return shown(f"can't use {where}: {error.strerror}\nhint: {_HELPS[error.errno]}")


_HELPS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "is it yours, and its disk writable?"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "is its disk full?"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file stands where a folder is needed"),
    errno.EISDIR: "a folder stands where a file is needed",
    errno.ELOOP: "links there lead to one another",
    errno.ENAMETOOLONG: "a shorter name",
}


_FIRST_RANK_SECONDS = 30.0
"to find the same mistake, and to be the one who tells"


def shown(message: str) -> str:
    """A message as a terminal may have it: what a file or a name smuggled in is spelt out, or cut short."""
    lines = without_controls(message).split("\n")
    half = _LONGEST_LINE // 2
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}" for line in lines
    )


def without_controls(text: str) -> str:
    """The text, with characters spelt out that a terminal obeys or that can't be seen: `\\x1b`, `\\u202e`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile(  # all but tab and newline; then marks of direction and of no width, separators, tags
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
_LONGEST_LINE = 2000  # characters, of lines that quote a user's own words


def first_line(error: BaseException) -> str:
    """The first line of its message, or its type."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"error numbers of a write for which there is no room: of the disk, of a quota, of a limit on a file's size"
SAYS_DISK_FULL = re.compile(
    r"\[Errno (28|122|27)\]|No space left on device|Disk quota exceeded|os error (28|122|27)\b"
)
"the same numbers on Linux, and how C++ and Rust say it"


# The optional packages, by the extras of pyproject.toml. Messages name the packages: the extras themselves
# install from a checkout only (`pip install -e ".[peft]"`).
PACKAGES = {
    "completion": "shtab",
    "figures": "kaleido",
    "fp8": "torchao",
    "liger": "liger-kernel",
    "lm_eval": "lm_eval",
    "peft": "peft bitsandbytes",
}


def pip_install(extra: str) -> str:
    """`pip install peft bitsandbytes` of "peft"."""
    return f"pip install {PACKAGES[extra]}"
