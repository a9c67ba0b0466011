"""What a run waits for, from the `waiting: ` lines that it writes to its log."""

import time
from pathlib import Path

from slm_toolkit.torch_extensions import WAITING

_MOST_BYTES = 64 * 1024
"of a log that are read in one look; of more, the last"


class Waits:
    """Follows the log of one run; `look` several times a second."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.shown: set[str] = set()
        "that were printed where there is no live line"
        self._began_at = time.monotonic()
        self._first_step_at: float | None = None
        self._before_step_1: str | None = None
        self._step: float | None = None
        self._wait: str | None = None
        self._offset = 0
        self._half_line = b""

    def look(self, state: dict[str, float] | None) -> str | None:
        """What the run said last that it waits for; None where it did not, or has done a step since.

        `state`: what the run wrote last about its steps, None before the first.
        """
        for line in self._new_lines():
            if line.startswith(WAITING):
                self._wait = line.removeprefix(WAITING).strip()
                if state is None:
                    self._before_step_1 = self._wait
        step = None if state is None else state["step"]
        if step != self._step:
            self._step, self._wait = step, None
            self._first_step_at = self._first_step_at or time.monotonic()
        return self._wait

    def at_the_end(self, seconds_total: float) -> str:
        """`, 270 s of it before step 1: ...` where the run waited there, else nothing."""
        if self._before_step_1 is None:
            return ""
        seconds = seconds_total if self._first_step_at is None else self._first_step_at - self._began_at
        seconds = min(seconds, seconds_total)  # which the run itself has counted
        return f", {seconds:.0f} s of it before step 1: {self._before_step_1}"

    def _new_lines(self) -> list[str]:
        """The whole lines that were written since the last look."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # another try has a new log
                    self._offset, self._half_line = 0, b""
                if size - self._offset > _MOST_BYTES:
                    self._offset, self._half_line = size - _MOST_BYTES, b""
                file.seek(self._offset)
                new = file.read(size - self._offset)
        except OSError:  # not there yet, or moved away just now
            return []
        self._offset += len(new)
        *whole, self._half_line = (self._half_line[-_MOST_BYTES:] + new).split(b"\n")
        return [line.decode(errors="replace") for line in whole]
