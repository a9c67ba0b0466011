"""The loss on each held-out set, over all ranks, after every so many steps."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.data.batches import model_inputs, num_labels
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
        """`loaders`: of each held-out set, none without --eval_steps; `num_steps`: of the whole run."""
        self._config, self._accelerator, self._num_steps = config, accelerator, num_steps
        self._model, self._loss_recorder, self._loaders = model, loss_recorder, loaders
        self._progress, self._tracker = progress, tracker
        self._losses: list[dict[str, float]] = []
        "of each evaluation: its step, and the mean loss over the tokens of all sets"
        self._losses_by_set: dict[str, list[float | None]] = {name: [] for name in loaders}

    def due(self, step: int) -> bool:
        """Whether an evaluation follows after `step` steps."""
        return bool(self._loaders) and (step % self._config.eval_steps == 0 or step == self._num_steps)

    def run(self, step: int) -> None:
        """Evaluate after `step` steps and report it. Every rank must call it."""
        of_sets = self._evaluate()
        self._losses.append({"step": step, "loss": finite(mean_loss(of_sets))})
        for name, (loss, _) in of_sets.items():
            self._losses_by_set[name].append(finite(loss))
        self._progress.say(f"step {step}: eval loss {described(of_sets)}")
        losses = {name: loss for name, (loss, _) in of_sets.items()}
        self._tracker.log_evaluation(step, mean_loss(of_sets), losses)

    def observed(self) -> dict[str, Any]:
        """Fields of the record."""
        return {"eval_losses": self._losses, "eval_losses_by_set": self._losses_by_set}

    @torch.no_grad()
    def _evaluate(self) -> dict[str, tuple[float, int]]:
        """For each set, the mean loss over its tokens that have a label, and their number.

        Uses the first `eval_batches` batches of every rank.
        """
        config, accelerator, loss_recorder = self._config, self._accelerator, self._loss_recorder
        self._model.eval()
        loss_recorder.divide_by(torch.ones((), device=accelerator.device))  # so that it is a sum
        of_sets = {}
        for name, loader in self._loaders.items():
            total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
            for _, batch in zip(range(config.eval_batches), loader, strict=False):
                if config.records_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                self._model(**model_inputs(batch, config))
                total += torch.stack([loss_recorder.last, num_labels(batch)])
            loss, count = accelerator.reduce(total, reduction="sum").tolist()
            of_sets[name] = (loss / count if count else math.nan, int(count))
        loss_recorder.divide_by(None)
        self._model.train()
        return of_sets


def mean_loss(of_sets: dict[str, tuple[float, int]]) -> float:
    """The mean over the tokens of all sets; NaN where no token has a label."""
    with_labels = [(loss, count) for loss, count in of_sets.values() if count]
    num_tokens = sum(count for _, count in with_labels)
    return sum(loss * count for loss, count in with_labels) / num_tokens if num_tokens else math.nan


def described(of_sets: dict[str, tuple[float, int]]) -> str:
    """Loss and perplexity over all sets, then of each set where there are several."""
    parts = [_loss_and_perplexity(mean_loss(of_sets))]
    if len(of_sets) > 1:
        each = (f"{name} {_loss_and_perplexity(loss)}" for name, (loss, _) in of_sets.items())
        parts.append(", ".join(each))
    return "; ".join(parts)


def _loss_and_perplexity(loss: float) -> str:
    perplexity = math.exp(loss) if loss < 20 else math.inf
    return f"{loss:.4f} (perplexity {perplexity:.4g})"
