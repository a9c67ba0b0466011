"""The training loss of each of several datasets, step by step, though every batch mixes them."""

import torch
from accelerate import Accelerator

from slm_toolkit.record import finite
from slm_toolkit.run.loss_kernels import IGNORE_INDEX


class DatasetLosses:
    """Sums of losses and numbers of tokens, kept on the device until they are asked for."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.steps: list[torch.Tensor] = []
        self._begin = torch.zeros(2, len(names), device=device, dtype=torch.float64)
        self._step = self._begin.clone()

    def add(self, batch: dict[str, torch.Tensor], token_losses: torch.Tensor) -> None:
        """A micro-step's: `token_losses` is 0 where a token has none."""
        dataset = batch["dataset"]
        labels = batch.get("labels", batch["input_ids"])
        counts = (labels[:, 1:] != IGNORE_INDEX).sum(dim=1)
        sums = token_losses.view(len(dataset), -1).sum(dim=1)
        self._step.index_add_(1, dataset, torch.stack([sums, counts]).to(self._step.dtype))

    def end_step(self) -> None:
        self.steps.append(self._step)
        self._step = self._begin.clone()

    def of_last_step(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all ranks; without the datasets that no rank drew. Every rank must call it."""
        means = self._means(accelerator, self.steps[-1:])
        return {name: losses[0] for name, losses in means.items() if losses[0] is not None}

    def observed(self, accelerator: Accelerator) -> dict[str, list[float | None]]:
        """Of each dataset the mean loss of each step, None where none was drawn; for every rank to call."""
        return self._means(accelerator, self.steps)

    def _means(self, accelerator: Accelerator, steps: list[torch.Tensor]) -> dict[str, list[float | None]]:
        if not steps:
            return {name: [] for name in self.names}
        sums = accelerator.reduce(torch.stack(steps), reduction="sum").tolist()
        return {
            name: [finite(loss[index] / count[index]) if count[index] else None for loss, count in sums]
            for index, name in enumerate(self.names)
        }
