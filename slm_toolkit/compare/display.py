"""What `slm compare` says while it works, on stderr: live bars on a terminal, a line per run elsewhere."""

import dataclasses
import re
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.config import RunConfig
from slm_toolkit.record import PARITY_REFERENCE, RunRecord


class Display:
    """Shows each run of a comparison from its start to its end.

    With `searching`, `runs` are tried with several batches each, nobody knows how many.
    """

    def __init__(self, runs: list[PlannedRun], console: Console, *, searching: bool = False) -> None:
        self.console, self.runs, self.num_done, self.num_executed = console, runs, 0, 0
        self.searching = searching
        self.started = time.monotonic()
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
        self.task = self.bars.add_task(self._label(run), total=steps, says=says)

    def progress(self, state: dict[str, float] | None) -> None:
        if state is not None:
            says = f"loss {state['loss']:.3f}  {state['tokens_per_second']:,.0f} tokens/s"
            self.bars.update(self.task, completed=state["step"], total=state["num_steps"], says=says)

    def end(self, run: PlannedRun, record: RunRecord, *, kept: bool) -> None:
        """Replace the run's bar by a line that stays."""
        if not kept:
            self.bars.remove_task(self.task)
        self.num_done += 1
        self.num_executed += not kept
        per_run = (time.monotonic() - self.started) / max(1, self.num_executed)
        known = self.num_executed and not self.searching
        left = (len(self.runs) - self.num_done) * per_run if known else 0
        self.bars.update(
            self.overall, completed=self.num_done, says=f"about {left:.0f} s left" if left else ""
        )
        style = {"ok": "green", "oom": "yellow"}.get(record.status, "red")
        took = f"{record.seconds_total:.0f} s"
        if kept:
            took = f"kept from {record.started_at[:16].replace('T', ' ')} UTC (--force measures again)"
        why = f"  {record.reason}" if record.reason else ""
        count = f"trial {self.num_done}" if self.searching else f"{self.num_done}/{len(self.runs)}"
        line = f"{count}  {self._label(run)}  [{style}]{record.status}[/]  {took}"
        self.console.print(line, highlight=False, end="" if why else "\n")
        if why:
            self.console.print(why, markup=False, highlight=False)

    def _label(self, run: PlannedRun) -> str:
        """The strategy, and what else of the grid tells this run from the others."""
        names = [f.name for f in dataclasses.fields(RunConfig) if f.metadata["grid"]]
        others = [run for run in self.runs if not run.run_name.startswith(PARITY_REFERENCE)]
        varying = [name for name in names if len({getattr(other.config, name) for other in others}) > 1]
        varying += ["per_device_train_batch_size"] if self.searching else []
        repeat = re.search(r"-r(\d+)$", run.run_name)
        words = [run.strategy.name, *(f"{name}={getattr(run.config, name)}" for name in varying)]
        if run.run_name.startswith(PARITY_REFERENCE):
            words[0] = f"reference: one process in {run.config.numerics}"
        return " ".join([*words, f"launch {repeat[1]}"] if repeat else words)
