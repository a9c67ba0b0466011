"""What a run waits for, from the `note: ` lines that it writes to its log."""

import re
import time
from pathlib import Path

_STANDS_SECONDS = 2.0
"after which a note without a step since is shown: a run's last notes are followed by its end"
_STEP = re.compile(r"step (?P<done>\d+)/(?P<of>\d+) |rank 0 of \d+: peak ")
"what a run writes of its steps, and a rehearsal on tensors without memory of its end"
_MOST_BYTES = 64 * 1024
"of a log that are read in one look; of more, the last"


class RunNotes:
    """Follows the log of one run; `look` several times a second."""

    def __init__(self, log: Path, *, stands_seconds: float | None = None) -> None:
        self.log = log
        self.stands_seconds = _STANDS_SECONDS if stands_seconds is None else stands_seconds
        self.told: set[str] = set()
        "that were shown where a line stays"
        self._began_at = time.monotonic()
        self._first_step_at: float | None = None
        self._before_step_1: str | None = None
        "the last that `look` returned while no step was done"
        self._offset = 0
        self._half_line = b""
        self._step: float | None = None
        self._is_done = False
        self._note: str | None = None
        self._noted_at = 0.0

    def look(self, state: dict[str, float] | None) -> str | None:
        """The run's last note, where it has stood for a while and no step was done since.

        `state`: what the run wrote last about its steps, None before the first.
        """
        step = None if state is None else state["step"]
        if step != self._step:
            self._step, self._note = step, None
            self._first_step_at = self._first_step_at or time.monotonic()
        for line in self._new_lines():
            if line.startswith("note: "):
                self._note, self._noted_at = line.removeprefix("note: ").strip(), time.monotonic()
            elif found := _STEP.match(line):  # a few quick steps may have left their progress unseen
                self._note, self._is_done = None, self._is_done or found["done"] == found["of"]
                self._first_step_at = self._first_step_at or time.monotonic()
        if self._is_done or self._note is None or time.monotonic() - self._noted_at < self.stands_seconds:
            return None
        if self._first_step_at is None:
            self._before_step_1 = self._note
        return self._note

    def at_the_end(self, seconds_total: float) -> str:
        """`, 270 s of it before step 1: ...` where a note was shown there, else nothing."""
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
                    self._offset, self._half_line, self._is_done = 0, b"", False
                if size - self._offset > _MOST_BYTES:
                    self._offset, self._half_line = size - _MOST_BYTES, b""
                file.seek(self._offset)
                new = file.read(size - self._offset)
        except OSError:  # not there yet, or moved away just now
            return []
        self._offset += len(new)
        *whole, self._half_line = (self._half_line[-_MOST_BYTES:] + new).split(b"\n")
        return [line.decode(errors="replace") for line in whole]
