"""Evaluates a run: the loss on held-out sets during training."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.data.batches import labels_by_sequence, model_inputs
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.observe.progress import NoProgress, Tracker, TrainingProgress


class Evaluations:
    """All evaluations of a run: after every --eval_steps steps and after the last one."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        model: torch.nn.Module,
        loss_recorder: RecordedLoss,
        loaders: dict[str, DataLoader],
        progress: TrainingProgress | NoProgress,
        tracker: Tracker,
        num_steps: int,
    ) -> None:
        """`loaders`: one per held-out set, empty without --eval_steps. `num_steps`: the run's last step."""
        self._config, self._accelerator, self._num_steps = config, accelerator, num_steps
        self._model, self._loss_recorder, self._loaders = model, loss_recorder, loaders
        self._progress, self._tracker = progress, tracker
        self._losses: list[dict[str, float]] = []
        "one entry per evaluation: its step, and the mean loss over the tokens of all sets"
        self._losses_by_set: dict[str, list[float | None]] = {name: [] for name in loaders}

    @property
    def has_sets(self) -> bool:
        return bool(self._loaders)

    def due(self, step: int) -> bool:
        """Return True if an evaluation is due after `step` steps."""
        return self.has_sets and (step % self._config.eval_steps == 0 or step == self._num_steps)

    def run(self, step: int) -> None:
        """Evaluate after `step` steps and report the losses. Every rank must call it."""
        by_set = self._evaluate()
        self._losses.append({"step": step, "loss": finite(mean_loss(by_set))})
        for name, (loss, _) in by_set.items():
            self._losses_by_set[name].append(finite(loss))
        self._progress.say(f"step {step}: eval loss {described(by_set)}")
        losses = {name: loss for name, (loss, _) in by_set.items()}
        self._tracker.log_evaluation(step, mean_loss(by_set), losses)

    def observed(self) -> dict[str, Any]:
        """Return fields of the record."""
        return {"eval_losses": self._losses, "eval_losses_by_set": self._losses_by_set}

    @torch.no_grad()
    def _evaluate(self) -> dict[str, tuple[float, int]]:
        """Return each set's mean loss over its tokens that have a label, and the number of those tokens.

        Every rank uses its first `eval_batches` batches.
        """
        config, accelerator, loss_recorder = self._config, self._accelerator, self._loss_recorder
        self._model.eval()
        loss_recorder.divide_by(torch.ones((), device=accelerator.device))  # makes the loss a sum
        by_set = {}
        for name, loader in self._loaders.items():
            total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
            for _, batch in zip(range(config.eval_batches), loader, strict=False):
                if config.records_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                self._model(**model_inputs(batch, config))
                total += torch.stack([loss_recorder.last, labels_by_sequence(batch).sum()])
            loss, count = accelerator.reduce(total, reduction="sum").tolist()
            by_set[name] = (loss / count if count else math.nan, int(count))
        loss_recorder.divide_by(None)
        self._model.train()
        return by_set


def mean_loss(by_set: dict[str, tuple[float, int]]) -> float:
    """Return the mean loss over the tokens of all sets; NaN if no token has a label."""
    with_labels = [(loss, count) for loss, count in by_set.values() if count]
    num_tokens = sum(count for _, count in with_labels)
    return sum(loss * count for loss, count in with_labels) / num_tokens if num_tokens else math.nan


def described(by_set: dict[str, tuple[float, int]]) -> str:
    """Return a line with loss and perplexity over all sets; if there are several, then of each set."""
    parts = [_loss_and_perplexity(mean_loss(by_set))]
    if len(by_set) > 1:
        sets = (f"{name} {_loss_and_perplexity(loss)}" for name, (loss, _) in by_set.items())
        parts.append(", ".join(sets))
    return "; ".join(parts)


def _loss_and_perplexity(loss: float) -> str:
    perplexity = math.exp(loss) if loss < 20 else math.inf
    return f"{loss:.4f} (perplexity {perplexity:.4g})"
