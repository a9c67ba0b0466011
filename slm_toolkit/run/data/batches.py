"""Make each rank's batches: as many as the run needs, in an order that depends only on the seed."""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX
from slm_toolkit.run.model.loss_recorder import RecordedLoss


def make_loader(dataset: Any, config: RunConfig, *, train: bool, num_ranks: int = 1) -> DataLoader:
    """Make batches of (per_device_train_batch_size, seq_len) tokens; training text is shuffled.

    Held-out data is filled up with sequences without labels, so that every rank has whole batches and no
    sequence counts twice.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if not train and not is_stream:
        dataset = _FilledUp(dataset, config.per_device_train_batch_size * num_ranks)
    return DataLoader(
        dataset,
        batch_size=config.per_device_train_batch_size,
        shuffle=train and not is_stream and config.dataset != SYNTHETIC,
        drop_last=train,
        num_workers=config.dataloader_num_workers,
        persistent_workers=config.dataloader_num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),  # lets the copy to the GPU run in the background
    )


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a worker, because the rank still needs batches for its last step.

    Schedulers and Ctrl-C signal every process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass
class _FilledUp(Dataset):
    """Sequences with labels, then sequences without labels until the number is a multiple of `multiple`."""

    sequences: Any
    multiple: int

    def __len__(self) -> int:
        return -(-len(self.sequences) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        has_labels = index < len(self.sequences)
        row = self.sequences[index if has_labels else 0]
        labels = row.get("labels", row["input_ids"])
        return {**row, "labels": labels if has_labels else torch.full_like(labels, IGNORE_INDEX)}


def count_steps(config: RunConfig, loader: DataLoader, num_micro_steps: int) -> int:
    """Return the number of optimizer steps to do.

    Raises ValueError for data that is too small or has an unknown length.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not is_stream and len(loader) < num_micro_steps:
        raise ValueError(
            f"{config.dataset} is too small for one step of {num_micro_steps} x "
            f"{config.per_device_train_batch_size} sequences of {config.seq_len} tokens on each process\n"
            "hint: lower --per_device_train_batch_size, --gradient_accumulation_steps or --seq_len"
        )
    if config.steps_asked is not None:
        return config.steps_asked
    if is_stream:
        raise ValueError("a stream has no epochs\nhint: give --max_steps, or --streaming false")
    return max(1, math.ceil(config.num_train_epochs * (len(loader) // num_micro_steps)))


def model_inputs(batch: dict[str, torch.Tensor], config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the arguments of the model's forward. Without labels in the batch, the tokens are the labels.

    flash-attn gets separated documents as one long row, and finds their ends by position_ids.
    """
    inputs = {"labels": batch["input_ids"]}
    inputs |= {name: value for name, value in batch.items() if name != "padding"}  # for the count of tokens
    if config.attn_implementation.startswith("flash_attention") and "position_ids" in batch:
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 0] = IGNORE_INDEX  # otherwise the sequence before would predict it
        return {name: value.reshape(1, -1) for name, value in inputs.items()}
    return inputs


def labels_by_sequence(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of tokens with a loss in each sequence of a batch."""
    return (batch.get("labels", batch["input_ids"])[:, 1:] != IGNORE_INDEX).sum(dim=1)


def steps_by_labels(
    accelerator: Accelerator,
    batches: Iterator[dict[str, torch.Tensor]],
    loss_recorder: RecordedLoss,
    num_micro_steps: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the same batches, drawn a step at a time, and scale losses so that every label counts equally.

    The loss of each micro-step is divided by the mean number of labels of all micro-steps on all ranks. The
    mean over micro-steps and ranks is then the mean over all labels, even if their numbers are uneven.
    """
    while True:
        step_batches = [next(batches) for _ in range(num_micro_steps)]
        count = torch.stack([labels_by_sequence(batch).sum() for batch in step_batches]).float().mean()
        loss_recorder.divide_by(accelerator.reduce(count, reduction="mean").clamp(min=1.0))
        yield from step_batches


def place_in_data(loader: DataLoader, step: int, num_micro_steps: int) -> tuple[int, int]:
    """Return a step's epoch, counted from 0, and the number of the epoch's batches before that step.

    An epoch consists of whole steps. The rest at its end is dropped, so that its length does not depend on
    the split of a step's sequences over processes and micro-steps. A stream is one epoch.
    """
    if isinstance(loader.dataset, IterableDataset):
        return 0, step * num_micro_steps
    epoch, in_epoch = divmod(step, len(loader) // num_micro_steps)
    return epoch, in_epoch * num_micro_steps


def endless(
    accelerator: Accelerator, loader: DataLoader, *, first_step: int, num_micro_steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's batches, epoch after epoch, from `first_step` on.

    A stream is read from its beginning, and its batches before `first_step` are skipped.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    epoch, skip = place_in_data(loader, first_step, num_micro_steps)
    while True:
        loader.set_epoch(epoch)
        num_batches = 0 if is_stream else skip
        batches = iter(accelerator.skip_first_batches(loader, num_batches) if num_batches else loader)
        # an incomplete step at the end is left out
        while len(step_batches := list(islice(batches, num_micro_steps))) == num_micro_steps:
            num_batches += num_micro_steps
            if num_batches > skip:
                yield from step_batches
        if num_batches == 0:
            raise ValueError("the stream contains less than one step for each process")
        skip = max(0, skip - num_batches)
        epoch += 1
