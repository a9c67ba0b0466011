"""The training loss of each of several datasets, step by step, though every batch mixes them."""

import torch
from accelerate import Accelerator

from slm_toolkit.record.run_record import finite
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX

_READ_AT_ONCE = 256
"steps: a device that is waited for so seldom loses no time"


class DatasetLosses:
    """Sums of losses and numbers of tokens, which wait on the device until so many are there to be read."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self._begin = torch.zeros(2, len(names), device=device, dtype=torch.float64)
        self._step = self._last = self._begin.clone()
        self._unread: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []
        "on the host, one tensor of _READ_AT_ONCE steps"

    def add(self, batch: dict[str, torch.Tensor], token_losses: torch.Tensor) -> None:
        """A micro-step's: `token_losses` is 0 where a token has none."""
        dataset = batch["dataset"]
        labels = batch.get("labels", batch["input_ids"])
        counts = (labels[:, 1:] != IGNORE_INDEX).sum(dim=1)
        sums = token_losses.view(len(dataset), -1).sum(dim=1)
        self._step.index_add_(1, dataset, torch.stack([sums, counts]).to(self._step.dtype))

    def end_step(self) -> None:
        self._last, self._step = self._step, self._begin.clone()
        self._unread.append(self._last)
        if len(self._unread) == _READ_AT_ONCE:
            self._read.append(torch.stack(self._unread).cpu())
            self._unread = []

    def of_last_step(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all ranks; without the datasets that no rank drew. Every rank must call it."""
        means = self._means(accelerator, [self._last[None]])
        return {name: losses[0] for name, losses in means.items() if losses[0] is not None}

    def observed(self, accelerator: Accelerator) -> dict[str, list[float | None]]:
        """Of each dataset the mean loss of each step, None where none was drawn; for every rank to call."""
        return self._means(accelerator, [*self._read, *(step[None] for step in self._unread)])

    def _means(self, accelerator: Accelerator, steps: list[torch.Tensor]) -> dict[str, list[float | None]]:
        """`steps`: [number of steps, 2, number of datasets] each."""
        if not steps:
            return {name: [] for name in self.names}
        on_device = torch.cat([part.to(self._begin.device) for part in steps])
        sums = accelerator.reduce(on_device, reduction="sum").tolist()
        return {
            name: [finite(loss[index] / count[index]) if count[index] else None for loss, count in sums]
            for index, name in enumerate(self.names)
        }
