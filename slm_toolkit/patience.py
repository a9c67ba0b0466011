"""How long is waited for another machine of a launch, and what is said meanwhile."""

import os
import sys
import time
from dataclasses import dataclass

PATIENCE_VARIABLE = "SLM_PATIENCE_SECONDS"
PATIENCE_SECONDS = 300.0
_SAY_SECONDS = 30.0
"between two lines that say the same"
_NEWS_SECONDS = 2.0
"between two lines that don't"


@dataclass(frozen=True)
class Patience:
    """With machines that are not there."""

    seconds: float
    silent_seconds: float
    "at first, when nobody is late yet"
    hint: str
    "what to do about those that did not come"


def patience_seconds() -> float:
    """How long a machine may be missing. Raises ValueError for a variable that is no time."""
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(text or PATIENCE_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise ValueError(f"{PATIENCE_VARIABLE} is {text!r}\nhint: seconds to wait for a machine, 1 or more")
    return seconds


class Waiting:
    """The time that is left, and now and then a line about it on stderr."""

    def __init__(self, who: str, patience: Patience) -> None:
        self._who, self._seconds = who, patience.seconds
        self._began = time.monotonic()
        self._next = self._soonest = self._began + patience.silent_seconds
        self._last = ""

    @property
    def seconds_left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    @property
    def seconds_until_next(self) -> float:
        """Until there is something to say, or until the end; never 0, which would mean not to wait."""
        return max(0.01, min(self._next - time.monotonic(), self.seconds_left))

    def say(self, line: str) -> None:
        """Print it where it is news, or has not been said for a while."""
        now = time.monotonic()
        if now >= self._next or (line != self._last and now >= self._soonest):
            self._next, self._soonest, self._last = now + _SAY_SECONDS, now + _NEWS_SECONDS, line
            self.note(f"{line}, {now - self._began:.0f} of {self._seconds:g} s")

    def go_on(self, line: str) -> None:
        """Print good news for whoever was told to wait."""
        if self._last:
            self.note(line)

    def note(self, line: str) -> None:
        print(f"{self._who}: {line}", file=sys.stderr, flush=True)
