"""Report a run's progress to the terminal, to `slm compare` and to an experiment tracker."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
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
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.run_record import PROGRESS_FILE, finite
from slm_toolkit.run.observe.machine_load import allocator_retries
from slm_toolkit.run.observe.watch import RunWatch


@contextmanager
def starting(run_dir: Path, stage: str, *, is_main: bool) -> Iterator[None]:
    """Show a stage before the first step, on rank 0. If it fails, the run's folder is left as it was."""
    if is_main:
        _show_stage(run_dir, stage)
    try:
        yield
    except BaseException:
        if is_main:
            _remove(run_dir / PROGRESS_FILE)
        raise


def _show_stage(run_dir: Path, stage: str) -> None:
    """Tell a terminal, and `slm compare` through the progress file, what the run does."""
    if sys.stderr.isatty():
        print(f"starting: {stage}", file=sys.stderr, flush=True)
    if run_dir.is_dir():  # `slm compare` made it
        with suppress(OSError):  # the run itself does not need the file
            write_state(run_dir / PROGRESS_FILE, {"stage": stage})


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    unfinished = path.with_suffix(".new")
    write_new(unfinished, json.dumps(state))
    unfinished.replace(path)


class NoProgress:
    """The progress of ranks other than 0: shows nothing."""

    def due(self, step: int) -> bool:
        return False

    def show(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class TrainingProgress:
    """The progress of rank 0, shown at most twice a second because reading the loss slows a step down."""

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        num_steps: int,
        *,
        device: torch.device,
        logging_steps: int | None = None,
    ) -> None:
        self.path = run_dir / PROGRESS_FILE
        self.device = device
        self.num_retries = 0
        "how often the allocator of this rank's GPU was full, freed its unused blocks and retried"
        self.logging_steps = logging_steps
        self.num_steps = num_steps
        self.last_shown = self.last_line = time.monotonic()
        _show_stage(run_dir, "first step")
        self.has_warned = False
        "True after the warning that the file can't be written"
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task(
                "training", total=num_steps, completed=first_step, status="first step"
            )
            self.bar.start()
            self.bar.console.show_cursor(True)  # otherwise a killed run would leave it hidden

    def due(self, step: int) -> bool:
        """Return True if progress is due after `step` steps. The last step is shown later, with its mean."""
        is_time = time.monotonic() - self.last_shown >= 0.5
        return (is_time or self._is_logged(step)) and step < self.num_steps

    def show(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Show the loss and the rate; None while the first steps warm up."""
        self.last_shown = time.monotonic()
        rate = "warming up" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        self._show_retries(allocator_retries(self.device).get("num_alloc_retries", 0))
        if self.bar is not None:
            status = f"loss {loss:.4f}  {rate}"
            if self.num_retries:
                status += f"  nearly full, {self.num_retries} retries"
            self.bar.update(self.task, completed=step, status=status)
        elif self._is_logged(step) or step == self.num_steps:
            self.last_line = self.last_shown
            line = f"step {step}/{self.num_steps}  loss {loss:.4f}  {rate}"
            print(line, file=sys.stderr, flush=True)
        state = {
            "step": step,
            "num_steps": self.num_steps,
            "loss": finite(loss),
            "tokens_per_second": tokens_per_second,
        }
        try:
            write_state(self.path, state)
        except OSError as error:  # only the display of `slm compare` needs the file
            if not self.has_warned:
                self.say(f"warning: can't write {self.path}: {error.strerror}; training continues")
            self.has_warned = True

    def _show_retries(self, num_retries: int) -> None:
        """Print that the GPU is nearly full when the allocator retries for the first time."""
        if num_retries and not self.num_retries:
            self.say(
                "warning: the GPU is nearly full: PyTorch waited for it, freed unused blocks and retried, "
                "which makes steps slower\n"
                "hint: a smaller --per_device_train_batch_size, or PYTORCH_ALLOC_CONF="
                "expandable_segments:True"
            )
        self.num_retries = num_retries

    def _is_logged(self, step: int) -> bool:
        """Whether a line is printed where there is no terminal."""
        if self.logging_steps is not None:
            return step % self.logging_steps == 0
        return time.monotonic() - self.last_line >= 10

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Stop updating the bar. Later output appears below it."""
        if self.bar is not None:
            self.bar.stop()

    def close(self) -> None:
        self.stop()
        _remove(self.path)


class Tracker:
    """The experiment tracker of --report_to, such as tensorboard or wandb. It does nothing with `none`."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, run_dir: Path) -> None:
        """Start the tracker. In trackio and wandb, the run has the name of the run's folder."""
        self._accelerator = accelerator
        self._is_on = config.report_to != "none"
        self._logging_steps = config.logging_steps or 1
        self._losses: list[torch.Tensor] = []
        "of the steps since the last log"
        if self._is_on:
            flags = {key: "" if value is None else value for key, value in dataclasses.asdict(config).items()}
            options = {"trackio": {"name": run_dir.name}, "wandb": {"name": run_dir.name}}
            accelerator.init_trackers("slm_toolkit", config=flags, init_kwargs=options)

    def log_step(self, step: int, loss: torch.Tensor, lr: float, watch: RunWatch) -> None:
        """Log the step that has just ended, if it is due. `loss`: this rank's. Every rank must call it.

        What is logged is the mean loss of the steps since the last log.
        """
        if not self._is_on:
            return
        self._losses.append(loss)
        if step % self._logging_steps:
            return
        mean = self._accelerator.reduce(torch.stack(self._losses).mean(), reduction="mean").item()
        self._losses.clear()
        values = {"loss": mean, "learning_rate": lr, "tokens_per_second": watch.last_tokens_per_second()}
        if watch.dataset_losses is not None:
            dataset_losses = watch.dataset_losses.of_last_step(self._accelerator)
            values |= {f"loss/{name}": loss for name, loss in dataset_losses.items()}
        self._accelerator.log(values, step=step)

    def log_evaluation(self, step: int, eval_loss: float, of_sets: dict[str, float]) -> None:
        if self._is_on:
            set_losses = {f"eval_loss/{name}": loss for name, loss in of_sets.items()}
            self._accelerator.log({"eval_loss": eval_loss, **set_losses}, step=step)
