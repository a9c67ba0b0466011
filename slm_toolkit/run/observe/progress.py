"""What a run says while it trains: a bar on a terminal, lines elsewhere, a file for `slm compare`."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.record.run_record import PROGRESS_FILE


class TrainingProgress:
    """Rank 0's voice; at most twice a second, so that reading the loss does not slow the steps down."""

    def __init__(self, run_dir: Path, first_step: int, num_steps: int) -> None:
        self.path = run_dir / PROGRESS_FILE
        self.num_steps = num_steps
        self.started = self.last_shown = self.last_line = time.monotonic()
        self.has_warned = False
        "that the file can't be written"
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[says]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task("training", total=num_steps, completed=first_step, says="starting")
            self.bar.start()
            self.bar.console.show_cursor(True)  # a killed run would leave it hidden

    def due(self, step: int) -> bool:
        """Whether it is time to say something after `step` steps; the last step's mean loss comes later."""
        return time.monotonic() - self.last_shown >= 0.5 and step < self.num_steps

    def show(self, step: int, loss: float, num_tokens: int) -> None:
        """num_tokens: of all ranks, without padding, since this run began."""
        self.last_shown = time.monotonic()
        tokens_per_second = num_tokens / (self.last_shown - self.started)
        if self.bar is not None:
            says = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            self.bar.update(self.task, completed=step, says=says)
        elif self.last_shown - self.last_line >= 10 or step == self.num_steps:
            self.last_line = self.last_shown
            line = f"step {step}/{self.num_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            print(line, file=sys.stderr, flush=True)
        beside = self.path.with_suffix(".new")
        state = {
            "step": step,
            "num_steps": self.num_steps,
            "loss": loss,
            "tokens_per_second": tokens_per_second,
        }
        try:
            write_new(beside, json.dumps(state))
            beside.replace(self.path)
        except OSError as error:  # `slm compare` would show it, no more
            if not self.has_warned:
                self.say(f"warning: can't write {self.path}: {error.strerror}; training goes on")
            self.has_warned = True

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """The bar moves no more; what is written from now on stands below it."""
        if self.bar is not None:
            self.bar.stop()

    def close(self) -> None:
        self.stop()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
