"""A user's mistake becomes one line with a hint and exit code 2; a bug keeps its traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class RunEnded(RuntimeError):
    """Ends a run that had begun, on all ranks alike: one message, a record that says why, no traceback."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ValueError as `error: ...`, on the first rank of each machine only, and exit with 2."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
