"""What `slm compare` says while it works, on stderr: live bars on a terminal, a line per run elsewhere."""

import dataclasses
import re
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from slm_toolkit.compare.causes import LOG_FILE, telling_lines
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.time_left import as_words, seconds_left
from slm_toolkit.compare.waits import Waits
from slm_toolkit.config import RunConfig
from slm_toolkit.record import PARITY_REFERENCE, RunRecord

_QUOTED_LINES = 5
_STYLE = {"ok": "green", "oom": "yellow", "skipped": "yellow"}


class Display:
    """Shows each run of a comparison from its start to its end; runs side by side call it from threads.

    With `searching`, `runs` are tried with several batches each, nobody knows how many. `num_slots`: None
    where nobody knows how many go on at once; `usd_so_far`: None for an unknown price.
    """

    def __init__(
        self,
        runs: list[PlannedRun],
        console: Console,
        *,
        searching: bool = False,
        num_slots: int | None = 1,
        usd_so_far: Callable[[], float] | None = None,
    ) -> None:
        self.console, self.runs, self.searching = console, runs, searching
        self.num_slots, self.usd_so_far = num_slots, usd_so_far
        self.num_ended = 0
        self.took: list[tuple[PlannedRun, float]] = []
        self.waiting = {run.run_name: run for run in runs}
        self.running: dict[str, tuple[PlannedRun, float, int]] = {}
        "with the time when it began, and its bar"
        self.waits: dict[str, Waits] = {}
        self.lock = threading.RLock()
        names = [f.name for f in dataclasses.fields(RunConfig) if f.metadata["grid"]]
        others = [run.config for run in runs if not run.run_name.startswith(PARITY_REFERENCE)]
        self.varying = [name for name in names if len({getattr(config, name) for config in others}) > 1]
        self.varying += ["per_device_train_batch_size"] if searching else []
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[says]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.overall = self.bars.add_task("all runs", total=None if searching else len(runs), says="")

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def begin(self, run: PlannedRun) -> None:
        says, steps = "starting", run.config.steps_asked
        if run.config.rehearse is not None and run.gpu is None:
            says, steps = "rehearsing, some seconds", None  # two steps, neither of which tells that it began
        with self.lock:
            bar = self.bars.add_task(self._label(run), total=steps, says=says)
            self.waiting.pop(run.run_name, None)
            self.running[run.run_name] = run, time.monotonic(), bar
            self.waits[run.run_name] = Waits(run.folder / LOG_FILE)

    def progress(self, run: PlannedRun, state: dict[str, float] | None) -> None:
        with self.lock:
            self.bars.update(self.overall, says=self._outlook())
            _, _, bar = self.running[run.run_name]
            if state is not None:
                says = f"loss {state['loss']:.3f}  {state['tokens_per_second']:,.0f} tokens/s"
                self.bars.update(bar, completed=state["step"], total=state["num_steps"], says=says)
            waits = self.waits[run.run_name]
            if (wait := waits.look(state)) is None:
                return
            self.bars.update(bar, says=escape(wait))
            if not self.console.is_terminal and wait not in waits.shown:
                waits.shown.add(wait)
                self.console.print(f"{self._label(run)}: {escape(wait)}", highlight=False, soft_wrap=True)

    def end(self, run: PlannedRun, record: RunRecord, *, kept: bool) -> None:
        """Replace the run's bar by a line that stays, and what it wrote last where it failed."""
        with self.lock:
            if run.run_name in self.running:
                _, _, bar = self.running.pop(run.run_name)
                self.bars.remove_task(bar)
            self.waiting.pop(run.run_name, None)
            self.num_ended += 1
            if record.status != "skipped" and record.seconds_total is not None:
                self.took.append((run, record.seconds_total))
            outlook = self._outlook()
            self.bars.update(self.overall, completed=self.num_ended, says=outlook)
            style = _STYLE.get(record.status, "red")
            took = f"{record.seconds_total:.0f} s"
            if (waits := self.waits.pop(run.run_name, None)) is not None:
                took += escape(waits.at_the_end(record.seconds_total))
            if kept:
                took = f"kept from {record.started_at[:16].replace('T', ' ')} UTC (--force measures again)"
            count = f"trial {self.num_ended}" if self.searching else f"{self.num_ended}/{len(self.runs)}"
            line = f"{count}  {self._label(run)}  [{style}]{record.status}[/]  {took}"
            if outlook and not kept and not self.console.is_terminal:
                line += f"  ({outlook})"
            if record.reason:
                line += f"  {escape(record.reason)}"
            self.console.print(line, highlight=False, soft_wrap=True)
            log = run.folder / LOG_FILE
            quoted = telling_lines(log, _QUOTED_LINES, reason=record.reason)
            if record.status in ("failed", "timeout") and quoted:
                text = "\n".join(f"    {line[:200]}" for line in (f"{log}:", *quoted))
                self.console.print(text, markup=False, highlight=False, style="dim", soft_wrap=True)

    def _outlook(self) -> str:
        """Time left and cost so far, as far as they are known."""
        now, words = time.monotonic(), []
        running = [(run, now - began) for run, began, _ in self.running.values()]
        waiting = list(self.waiting.values())
        if self.num_slots is not None and not self.searching and (running or waiting):
            left = seconds_left(self.took, waiting, running, num_slots=self.num_slots)
            words += [] if left is None else [f"about {as_words(left)} left"]
        if self.usd_so_far is not None:
            words.append(f"${self.usd_so_far():,.2f} so far")
        return ", ".join(words)

    def _label(self, run: PlannedRun) -> str:
        """The strategy, and what else of the grid tells this run from the others."""
        repeat = re.search(r"-r(\d+)$", run.run_name)
        words = [run.strategy.name, *(f"{name}={getattr(run.config, name)}" for name in self.varying)]
        if run.run_name.startswith(PARITY_REFERENCE):
            words[0] = f"reference: one process in {run.config.numerics}"
        return escape(" ".join([*words, f"launch {repeat[1]}"] if repeat else words))
