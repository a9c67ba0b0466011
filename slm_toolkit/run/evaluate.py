"""Evaluates a run: the loss on held-out sets during training."""

import math
from typing import Any

import torch

from slm_toolkit.record.run_record import finite
from slm_toolkit.run.data.batches import labels_by_sequence, model_inputs
from slm_toolkit.run.display import Tracker
from slm_toolkit.run.faults.watchdog import Watchdog
from slm_toolkit.run.observe.progress import Observer, say
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.run import Run


class Evaluations(Observer):
    """All evaluations of a run: after every --eval_steps steps and after the last one."""

    def __init__(self, run: Run, watch: RunWatch, watchdog: Watchdog, tracker: Tracker) -> None:
        self._run, self._watch, self._watchdog, self._tracker = run, watch, watchdog, tracker
        self._losses: list[dict[str, float]] = []
        "one entry per evaluation: its step, and the mean loss over the tokens of all sets"
        self._losses_by_set: dict[str, list[float | None]] = {name: [] for name in run.eval_loaders}

    def after_step(self, step: int, loss: torch.Tensor, norm: Any) -> None:
        done, run = step + 1, self._run
        if run.eval_loaders and (done % run.config.eval_steps == 0 or done == run.num_steps):
            self._report(done)

    def end(self, observed: dict[str, Any]) -> None:
        # a run that was killed between its last checkpoint and its record has only the evaluation left to do
        if self._run.eval_loaders and self._run.record.first_step == self._run.num_steps:
            self._report(self._run.num_steps)
        observed |= {"eval_losses": self._losses, "eval_losses_by_set": self._losses_by_set}

    def _report(self, step: int) -> None:
        """Evaluate after `step` steps. The time does not count as time of a step."""
        self._watchdog.beat(f"in the evaluation after step {step}")
        by_set = self._evaluate()
        self._losses.append({"step": step, "loss": finite(mean_loss(by_set))})
        for name, (loss, _) in by_set.items():
            self._losses_by_set[name].append(finite(loss))
        say(f"step {step}: eval loss {described(by_set)}")
        losses = {name: loss for name, (loss, _) in by_set.items()}
        self._tracker.log_evaluation(step, mean_loss(by_set), losses)
        self._watch.clock.pause()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, tuple[float, int]]:
        """Return each set's mean loss over its tokens that have a label, and the number of those tokens.

        Every rank uses its first `eval_batches` batches.
        """
        run = self._run
        config, accelerator, loss_recorder = run.config, run.accelerator, run.loss_recorder
        run.model.eval()
        loss_recorder.divide_by(torch.ones((), device=accelerator.device))  # makes the loss a sum
        by_set = {}
        for name, loader in run.eval_loaders.items():
            total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
            for _, batch in zip(range(config.eval_batches), loader, strict=False):
                if config.records_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                run.model(**model_inputs(batch, config))
                total += torch.stack([loss_recorder.last, labels_by_sequence(batch).sum()])
            loss, count = accelerator.reduce(total, reduction="sum").tolist()
            by_set[name] = (loss / count if count else math.nan, int(count))
        loss_recorder.divide_by(None)
        run.model.train()
        return by_set


def mean_loss(by_set: dict[str, tuple[float, int]]) -> float:
    """Return the mean loss over the tokens of all sets; NaN if no token has a label."""
    with_labels = [(loss, count) for loss, count in by_set.values() if count]
    num_tokens = sum(count for _, count in with_labels)
    return sum(loss * count for loss, count in with_labels) / num_tokens if num_tokens else math.nan


def described(by_set: dict[str, tuple[float, int]]) -> str:
    """Return loss and perplexity over all sets; if there are several, then of each set."""
    losses = {"": mean_loss(by_set)}
    if len(by_set) > 1:
        losses |= {f"{name} ": loss for name, (loss, _) in by_set.items()}
    perplexities = (
        f"{name}{loss:.4f} (perplexity {math.exp(min(loss, 50)):.4g})" for name, loss in losses.items()
    )
    return ", ".join(perplexities)
