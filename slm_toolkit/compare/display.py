"""Shows the progress of `slm compare` on stderr: live bars on a terminal, else a line per run."""

import re
import threading
import time
from dataclasses import dataclass
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
from slm_toolkit.compare.outcome import LOG_FILE, telling_lines
from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.record.run_record import PARITY_REFERENCE, RunRecord

OVERDUE = 1.1
"the least that a run may still take, as a share of its time so far: nobody knows how long a late run takes"


def seconds_left(
    done: list[tuple[PlannedRun, float]],
    waiting: list[PlannedRun],
    running: list[tuple[PlannedRun, float]],
    *,
    num_slots: int,
) -> float | None:
    """Estimate the seconds until all runs are done; None before the first is done.

    `done` and `running`: runs with their seconds so far. A run is expected to take the mean of the runs that
    are done with the same model, strategy and batch; without any, the same model and strategy; then the same
    strategy; then all. A run that has taken longer is expected to take OVERDUE times its seconds so far.
    """
    if not done:
        return None
    took: dict[tuple, list[float]] = {}
    for run, seconds in done:
        for kind in _kinds(run):
            took.setdefault(kind, []).append(seconds)

    def expected(run: PlannedRun) -> float:
        return next(mean(took[kind]) for kind in _kinds(run) if kind in took)

    rest = [max(expected(run) - elapsed, (OVERDUE - 1) * elapsed) for run, elapsed in running]
    total = sum(rest) + sum(expected(run) for run in waiting)
    return max([total / num_slots, *rest])


def as_words(seconds: float) -> str:
    """Format a time: 45 s, 12 min, 3 h 20 min, 2 d 5 h."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{int(hours // 24)} d {round(hours % 24)} h"


def _kinds(run: PlannedRun) -> list[tuple]:
    """Return the groups of runs that `run` belongs to, from the narrowest to all runs."""
    strategy, batch = run.name, run.config.per_device_train_batch_size
    model = run.details if run.spec is None else run.spec.name
    return [(model, strategy, batch), (model, strategy), (strategy,), ()]


_MOST_BYTES = 64 * 1024
"read at most the last 64 KiB of a log"


_STANDSTILL_SECONDS = 60
"a run without a step for so long says so, and again each time it has passed"


class Standstill:
    """Finds a run that makes no step, with its stage and the last line of its log. Call `look` often."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.shown = ""
        "the last text that was printed, if there is no terminal"
        self._step: float | None = None
        self._moved_at = time.monotonic()
        "when the run began or was seen to do a step"
        self._num_minutes, self._text = 0, ""

    def look(self, state: dict[str, Any] | None) -> str | None:
        """Return how long the run makes no step, and why; None in the first minute.

        `state`: the content of the run's progress file, None before there is one.
        """
        now, step = time.monotonic(), (state or {}).get("step")
        if step != self._step or not self.log.exists():  # a Slurm job waits in its queue
            self._step, self._moved_at = step, now
        number = int((now - self._moved_at) / _STANDSTILL_SECONDS)
        if number > self._num_minutes:
            end = read_end(self.log, _MOST_BYTES)[0].decode(errors="replace")
            lines = [line.strip() for line in re.split(r"[\r\n]", end) if line.strip()]
            last = f"its last output: {shown(lines[-1])[:200]}" if lines else "no output yet"
            stage = (state or {}).get("stage")
            doing = f"{stage}, {last}" if stage else last
            self._text = f"no step for {as_words(number * _STANDSTILL_SECONDS)}: {doing}"
        self._num_minutes = number
        return self._text if number else None


_QUOTED_LINES = 5
_STYLE = {"ok": "green", "oom": "yellow"}


@dataclass(frozen=True)
class _Running:
    """A run that was launched."""

    run: PlannedRun
    began: float
    bar: TaskID
    standstill: Standstill


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
        self.took: list[tuple[PlannedRun, float]] = []
        self.waiting = {run.run_name: run for run in runs}
        self.running: dict[str, _Running] = {}
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

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def begin(self, run: PlannedRun) -> None:
        status = "starting: loading Python packages"
        steps = None if run.words else run.config.steps_asked  # a user's own script sets its own number
        with self.lock:
            bar = self.bars.add_task(self._label(run), total=steps, status=status)
            self.waiting.pop(run.run_name, None)
            self.running[run.run_name] = _Running(
                run, time.monotonic(), bar, Standstill(run.folder / LOG_FILE)
            )

    def progress(self, run: PlannedRun, state: dict[str, Any] | None) -> None:
        with self.lock:
            self.bars.update(self.overall, status=self._outlook())
            running = self.running[run.run_name]
            if state is not None and "step" in state:
                rate = state["tokens_per_second"]
                words = "warming up" if rate is None else f"{rate:,.0f} tokens/s"
                status = "" if state["loss"] is None else f"loss {state['loss']:.3f}  {words}"
                self.bars.update(
                    running.bar, completed=state["step"], total=state["num_steps"], status=status
                )
            elif state is not None:
                self.bars.update(running.bar, status=escape(f"starting: {state['stage']}"))
            if (text := running.standstill.look(state)) is None:
                return
            self.bars.update(running.bar, status=escape(text))
            if not self.console.is_terminal and text != running.standstill.shown:
                running.standstill.shown = text
                self.console.print(f"{self._label(run)}: {escape(text)}", highlight=False, soft_wrap=True)

    def end(self, run: PlannedRun, record: RunRecord, *, kept: bool) -> None:
        """Replace the run's bar by a permanent line; if the run failed, also show its last log lines."""
        with self.lock:
            running = self.running.pop(run.run_name, None)
            if running is not None:
                self.bars.remove_task(running.bar)
            self.waiting.pop(run.run_name, None)
            self.num_ended += 1
            if record.seconds_total is not None:
                self.took.append((run, record.seconds_total))
            outlook = self._outlook()
            self.bars.update(self.overall, completed=self.num_ended, status=outlook)
            style = _STYLE.get(record.status, "red")
            seconds = record.seconds_total
            time_text = "-" if seconds is None else f"{seconds:.0f} s"
            if kept:
                began = record.started_at[:16].replace("T", " ")
                time_text = f"kept from {began} UTC (--force runs it again)"
            count = f"trial {self.num_ended}" if self.searching else f"{self.num_ended}/{len(self.runs)}"
            line = f"{count}  {self._label(run)}  [{style}]{record.status}[/]  {escape(time_text)}"
            if outlook and not kept and not self.console.is_terminal:
                line += f"  ({outlook})"
            if record.reason:
                line += f"  {escape(shown(record.reason))}"
            self.console.print(line, highlight=False, soft_wrap=True)
            log = run.folder / LOG_FILE
            quoted = telling_lines(log, _QUOTED_LINES, reason=record.reason)
            if record.status in ("failed", "timeout") and quoted:
                text = "\n".join(f"    {line[:200]}" for line in (f"{log}:", *quoted))
                self.console.print(text, markup=False, highlight=False, style="dim", soft_wrap=True)

    def _outlook(self) -> str:
        """Return the time left, if known."""
        now = time.monotonic()
        running = [(one.run, now - one.began) for one in self.running.values()]
        waiting = list(self.waiting.values())
        if self.num_slots is None or self.searching or not (running or waiting):
            return ""
        left = seconds_left(self.took, waiting, running, num_slots=self.num_slots)
        if left is None:
            return ""
        return f"about {as_words(left)} left"

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
