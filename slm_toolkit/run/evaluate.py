"""The loss on each held-out set, over all ranks."""

import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.data.batches import model_inputs, num_labels
from slm_toolkit.run.model.loss_recorder import RecordedLoss


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loss_recorder: RecordedLoss,
    loaders: dict[str, DataLoader],
    config: RunConfig,
) -> dict[str, tuple[float, int]]:
    """Of each set the mean loss per token that has one, and their number.

    Over the first `eval_batches` batches of every rank.
    """
    model.eval()
    loss_recorder.divide_by(torch.ones((), device=accelerator.device))  # so that it is a sum
    found = {}
    for name, loader in loaders.items():
        total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
        for _, batch in zip(range(config.eval_batches), loader, strict=False):
            if config.records_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            model(**model_inputs(batch, config))
            total += torch.stack([loss_recorder.last, num_labels(batch)])
        loss, count = accelerator.reduce(total, reduction="sum").tolist()
        found[name] = (loss / count if count else math.nan, int(count))
    loss_recorder.divide_by(None)
    model.train()
    return found


def mean_loss(of_sets: dict[str, tuple[float, int]]) -> float:
    """Over the tokens of all sets; not a number where none has a loss."""
    told = [(loss, count) for loss, count in of_sets.values() if count]
    return sum(loss * count for loss, count in told) / sum(count for _, count in told) if told else math.nan


def described(of_sets: dict[str, tuple[float, int]]) -> str:
    """The loss and perplexity of all, then of each set where there are several."""
    said = _loss_and_perplexity(mean_loss(of_sets))
    if len(of_sets) > 1:
        said += "; " + ", ".join(
            f"{name} {_loss_and_perplexity(loss)}" for name, (loss, _) in of_sets.items()
        )
    return said


def _loss_and_perplexity(loss: float) -> str:
    perplexity = math.exp(loss) if loss < 20 else math.inf
    return f"{loss:.4f} (perplexity {perplexity:.4g})"
