"""Shows the progress of `slm compare` on stderr: live bars on a terminal, else a line per run."""

import re
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from slm_toolkit.base.errors import shown
from slm_toolkit.base.safe_files import read_end
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.outcome import LOG_FILE
from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.record.run_record import PARITY_REFERENCE, RunRecord


def as_words(seconds: float) -> str:
    """Format a time: 45 s, 12 min."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


_MOST_BYTES = 64 * 1024
"read at most the last 64 KiB of a log"
_STANDSTILL_SECONDS = 60
"a run without a step for so long says so, and again each time it has passed"


class Standstill:
    """Finds a run that makes no step, with its stage and the last line of its log. Call `look` often."""

    def __init__(self, log: Path) -> None:
        self.log, self.shown = log, ""
        self._step: float | None = None
        self._moved_at = time.monotonic()
        "when the run began or was seen to do a step"
        self._num_minutes, self._text = 0, ""

    def look(self, state: dict[str, Any] | None) -> str | None:
        """Return how long the run makes no step, and why; None in the first minute.

        `state`: the content of the run's progress file, None before there is one.
        """
        now, state = time.monotonic(), state or {}
        if state.get("step") != self._step or not self.log.exists():  # a Slurm job waits in its queue
            self._step, self._moved_at = state.get("step"), now
        number = int((now - self._moved_at) / _STANDSTILL_SECONDS)
        if number > self._num_minutes:
            end = read_end(self.log, _MOST_BYTES)[0].decode(errors="replace")
            lines = [line.strip() for line in re.split(r"[\r\n]", end) if line.strip()]
            last = f"its last output: {shown(lines[-1])[:200]}" if lines else "no output yet"
            doing = ", ".join(filter(None, (state.get("stage"), last)))
            self._text = f"no step for {as_words(number * _STANDSTILL_SECONDS)}: {doing}"
        self._num_minutes = number
        return self._text if number else None


_STYLE = {"ok": "green", "oom": "yellow"}


class Display:
    """Shows each run of a comparison from start to end. Concurrent runs call it from several threads.

    With `searching`, each run has an unknown number of trials with different batches. `num_slots`: how many
    runs run at the same time, None if unknown.
    """

    def __init__(
        self,
        runs: list[PlannedRun],
        console: Console,
        *,
        searching: bool = False,
        num_slots: int | None = 1,
    ) -> None:
        self.console, self.runs, self.searching, self.num_slots = console, runs, searching, num_slots
        self.num_ended = 0
        self.took: list[float] = []
        self.running: dict[str, tuple[TaskID, Standstill]] = {}
        self.lock = threading.RLock()
        names = [name for name, flag in FLAGS.items() if flag.grid]
        others = [run.config for run in runs if not run.run_name.startswith(PARITY_REFERENCE)]
        self.varying = [name for name in names if len({getattr(config, name) for config in others}) > 1]
        self.varying += ["per_device_train_batch_size"] if searching else []
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.overall = self.bars.add_task("all runs", total=None if searching else len(runs), status="")

    def begin(self, run: PlannedRun) -> None:
        status = "starting: loading Python packages"
        steps = None if run.words else run.config.steps_asked  # a user's own script sets its own number
        with self.lock:
            bar = self.bars.add_task(self._label(run), total=steps, status=status)
            self.running[run.run_name] = bar, Standstill(run.folder / LOG_FILE)

    def progress(self, run: PlannedRun, state: dict[str, Any] | None) -> None:
        with self.lock:
            bar, standstill = self.running[run.run_name]
            status = "" if state is None else f"starting: {state.get('stage')}"
            if state is not None and "step" in state:
                rate = state["tokens_per_second"]
                words = "warming up" if rate is None else f"{rate:,.0f} tokens/s"
                status = "" if state["loss"] is None else f"loss {state['loss']:.3f}  {words}"
                self.bars.update(bar, completed=state["step"], total=state["num_steps"])
            if stuck := standstill.look(state):
                status = stuck
                if stuck != standstill.shown and not self.console.is_terminal:
                    self._print(f"{self._label(run)}: {escape(stuck)}")
                standstill.shown = stuck
            if state or stuck:
                self.bars.update(bar, status=escape(status))

    def end(self, run: PlannedRun, record: RunRecord, *, kept: bool) -> None:
        """Replace the run's bar by a permanent line; if the run failed, also show its last log lines."""
        with self.lock:
            if run.run_name in self.running:
                self.bars.remove_task(self.running.pop(run.run_name)[0])
            self.num_ended += 1
            seconds = record.seconds_total
            if seconds is not None and not kept:
                self.took.append(seconds)
            outlook = self._outlook()
            self.bars.update(self.overall, completed=self.num_ended, status=outlook)
            time_text = "-" if seconds is None else f"{seconds:.0f} s"
            if kept:
                began = record.started_at[:16].replace("T", " ")
                time_text = f"kept from {began} UTC (--force runs it again)"
            elif outlook and not self.console.is_terminal:
                time_text += f"  ({outlook})"
            count = f"trial {self.num_ended}" if self.searching else f"{self.num_ended}/{len(self.runs)}"
            style = _STYLE.get(record.status, "red")
            line = f"{count}  {self._label(run)}  [{style}]{record.status}[/]  {escape(time_text)}"
            log = f"  log: {run.folder / LOG_FILE}" * (record.status in ("failed", "timeout"))
            self._print(f"{line}  {escape(shown(record.reason or '') + log)}".rstrip())

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _outlook(self) -> str:
        """Return the time left, if known: for each run that has not ended, the mean of those that have."""
        num_left = len(self.runs) - self.num_ended
        if self.num_slots is None or self.searching or not (self.took and num_left):
            return ""
        return f"about {as_words(mean(self.took) * num_left / self.num_slots)} left"

    def _label(self, run: PlannedRun) -> str:
        """Return the strategy and the flags that vary between the runs of the grid."""
        repeat = re.search(r"-r(\d+)$", run.run_name)
        words = [
            run.name,
            *filter(None, [run.details]),
            *(f"{name}={getattr(run.config, name)}" for name in self.varying),
        ]
        if run.run_name.startswith(PARITY_REFERENCE):
            words[0] = f"reference: one process in {run.config.numerics}"
        return escape(" ".join([*words, f"launch {repeat[1]}"] if repeat else words))
