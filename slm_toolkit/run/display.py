"""Show a run's steps on the terminal, to `slm compare` and in an experiment tracker."""

import dataclasses
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.observe.progress import Observer, remove_state, say, show_stage, write_state
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.run import Run


class TrainingProgress(Observer):
    """The progress of rank 0, shown at most twice a second because reading the loss slows a step down."""

    def __init__(self, run: Run, watch: RunWatch) -> None:
        self._run, self._watch = run, watch
        self._is_main = run.accelerator.is_main_process
        self._last_shown = self._last_line = time.monotonic()
        self._step, self._loss = run.record.first_step, None
        "the number of steps done, and this rank's loss in the last one"
        show_stage(run.run_dir, "first step")
        is_hidden = not (self._is_main and sys.stderr.isatty())
        self._bar = tqdm(desc="training", total=run.num_steps, initial=self._step, disable=is_hidden)

    def after_step(self, step: int, loss: torch.Tensor, norm: Any) -> None:
        """Show the step if that is due. The last one is shown at the end, with the mean loss of all ranks."""
        self._step, self._loss = step + 1, loss
        is_due = time.monotonic() - self._last_shown >= 0.5 or self._is_logged(self._step)
        if self._is_main and is_due and self._step < self._run.num_steps:
            self.show(self._step, loss.item(), self._watch.steady_tokens_per_second())

    def end(self, observed: dict[str, Any]) -> None:
        if self._loss is None:
            say(f"all {self._run.num_steps} steps were already done")
        elif self._is_main:
            losses = observed.get("losses")  # a rehearsal has only this rank's
            loss = losses[-1] if losses else self._loss.item()
            self.show(self._step, loss, self._watch.steady_tokens_per_second())
        self.stop()
        remove_state(self._run.run_dir)

    def show(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """Show the loss and the rate; None while the first steps warm up."""
        num_steps, self._last_shown = self._run.num_steps, time.monotonic()
        rate = "warming up" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        status = f"loss {'nan' if loss is None else f'{loss:.4f}'}  {rate}"
        if not self._bar.disable:
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_logged(step) or step == num_steps:
            self._last_line = self._last_shown
            print(f"step {step}/{num_steps}  {status}", file=sys.stderr, flush=True)
        loss = None if loss is None else finite(loss)
        state = {"step": step, "num_steps": num_steps, "loss": loss, "tokens_per_second": tokens_per_second}
        write_state(self._run.run_dir, state)

    def _is_logged(self, step: int) -> bool:
        """Whether a line is printed where there is no terminal."""
        if (logging_steps := self._run.config.logging_steps) is not None:
            return step % logging_steps == 0
        return time.monotonic() - self._last_line >= 10

    def stop(self) -> None:
        """Stop updating the bar. Later output appears below it."""
        self._bar.close()


def start_tracker(run: Run) -> None:
    """Start the tracker of --report_to. In trackio and wandb, the run has the name of the run's folder."""
    if run.config.report_to != "none" and run.data is not None:
        flags = dataclasses.asdict(run.config).items()
        flags = {key: "" if value is None else value for key, value in flags}
        options = dict.fromkeys(("trackio", "wandb"), {"name": run.run_dir.name})
        run.accelerator.init_trackers("slm_toolkit", config=flags, init_kwargs=options)


class Tracker(Observer):
    """Logs to the experiment tracker of --report_to, such as tensorboard. It does nothing with `none`."""

    def __init__(self, run: Run, watch: RunWatch) -> None:
        self._run, self._watch = run, watch
        self._is_on = run.config.report_to != "none"
        self._losses: list[torch.Tensor] = []
        "of the steps since the last log"

    def after_step(self, step: int, loss: torch.Tensor, norm: Any) -> None:
        """Log the mean loss of the steps since the last log, if that is due."""
        config, accelerator = self._run.config, self._run.accelerator
        if not self._is_on:
            return
        self._losses.append(loss)
        if (step + 1) % (config.logging_steps or 1):
            return
        mean = accelerator.reduce(torch.stack(self._losses).mean(), reduction="mean").item()
        self._losses.clear()
        values = {
            "loss": mean,
            "learning_rate": learning_rate(config, step, self._run.num_steps),
        }
        if (rate := self._watch.steady_tokens_per_second()) is not None:
            values["tokens_per_second"] = rate
        accelerator.log(values, step=step + 1)

    def log_evaluation(self, step: int, eval_loss: float, of_sets: dict[str, float]) -> None:
        if self._is_on:
            set_losses = {f"eval_loss/{name}": loss for name, loss in of_sets.items()}
            self._run.accelerator.log({"eval_loss": eval_loss, **set_losses}, step=step)

    def end(self, observed: dict[str, Any]) -> None:
        observed["reported_to"] = self._run.config.report_to if self._is_on else None
