"""Each rank's batches: as many as the run needs, in an order that depends only on the seed."""

import math
import signal
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX
from slm_toolkit.run.model.loss_recorder import RecordedLoss


def make_loader(dataset: Any, config: RunConfig, *, train: bool, num_ranks: int = 1) -> DataLoader:
    """Batches of (per_device_train_batch_size, seq_len) tokens; text to train on is shuffled.

    Held-out sequences are filled up with some without labels, so that every rank has whole batches and no
    sequence counts twice.
    """
    shuffle = train and config.dataset != SYNTHETIC and not isinstance(dataset, IterableDataset)
    if not train and not isinstance(dataset, IterableDataset):
        dataset = _FilledUp(dataset, config.per_device_train_batch_size * num_ranks)
    return DataLoader(
        dataset,
        batch_size=config.per_device_train_batch_size,
        shuffle=shuffle,
        drop_last=train,
        num_workers=config.dataloader_num_workers,
        persistent_workers=config.dataloader_num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),  # so that the copy to the GPU need not be waited for
    )


def _ignore_stop_signals(worker: int) -> None:
    """Schedulers and Ctrl-C signal every process, but a rank still needs batches for its last step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _FilledUp(Dataset):
    """Sequences with labels, then some without, so that their number is a multiple of `multiple`."""

    def __init__(self, sequences: Any, multiple: int) -> None:
        self.sequences = sequences
        self.length = -(-len(sequences) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.sequences[index if index < len(self.sequences) else 0]
        labels = row.get("labels", row["input_ids"])
        if index >= len(self.sequences):
            labels = torch.full_like(labels, IGNORE_INDEX)
        return {**row, "labels": labels}


def count_steps(config: RunConfig, loader: DataLoader, num_micro_steps: int) -> int:
    """How many optimizer steps to do. Raises ValueError for data that is too small or of unknown length."""
    if isinstance(loader.dataset, IterableDataset):
        if config.steps_asked is None:
            raise ValueError("a stream has no epochs\nhint: give --max_steps, or --streaming false")
        return config.steps_asked
    num_batches = len(loader)
    if num_batches < num_micro_steps:
        raise ValueError(
            f"{config.dataset} is too small for one step of {num_micro_steps} x "
            f"{config.per_device_train_batch_size} sequences of {config.seq_len} tokens on each process\n"
            "hint: lower --per_device_train_batch_size, --gradient_accumulation_steps or --seq_len"
        )
    if config.steps_asked is not None:
        return config.steps_asked
    return max(1, math.ceil(config.num_train_epochs * (num_batches // num_micro_steps)))


def model_inputs(batch: dict[str, torch.Tensor], config: RunConfig) -> dict[str, torch.Tensor]:
    """The arguments of the model's forward; without labels in the batch, tokens are their own labels.

    Documents that are kept apart become one long row for flash-attn, which then finds their ends by
    position_ids.
    """
    tokens = batch["input_ids"]
    inputs = {"input_ids": tokens, "labels": batch.get("labels", tokens)}
    if "position_ids" not in batch:
        return inputs
    inputs["position_ids"] = batch["position_ids"]
    if config.attn_implementation.startswith("flash_attention"):
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 0] = IGNORE_INDEX  # or the sequence before it would predict it
        return {name: value.reshape(1, -1) for name, value in inputs.items()}
    return inputs


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many tokens of a batch have a loss: those with a label, without the first of each sequence."""
    labels = batch.get("labels", batch["input_ids"])
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def steps_by_labels(
    accelerator: Accelerator,
    batches: Iterator[dict[str, torch.Tensor]],
    loss_recorder: RecordedLoss,
    num_micro_steps: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches, drawn a step at a time, with losses scaled so that every label counts alike.

    The loss of each micro-step is divided by the mean number of labels of all micro-steps on all ranks. The
    mean over micro-steps and ranks is then the mean over all labels, however uneven their numbers are.
    """
    while True:
        of_step = [next(batches) for _ in range(num_micro_steps)]
        count = torch.stack([num_labels(batch) for batch in of_step]).float().mean()
        loss_recorder.divide_by(accelerator.reduce(count, reduction="mean").clamp(min=1.0))
        yield from of_step


def place_in_data(loader: DataLoader, step: int, num_micro_steps: int) -> tuple[int, int]:
    """The epoch of a step, counted from 0, and the number of the epoch's batches before that step.

    An epoch has whole steps: the rest at its end is dropped, so that its length does not depend on the split
    of a step's sequences over processes and micro-steps. A stream is one epoch.
    """
    if isinstance(loader.dataset, IterableDataset):
        return 0, step * num_micro_steps
    epoch, in_epoch = divmod(step, len(loader) // num_micro_steps)
    return epoch, in_epoch * num_micro_steps


def endless(
    accelerator: Accelerator, loader: DataLoader, *, first_step: int, num_micro_steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches, epoch after epoch, from `first_step` on; a stream is read again up to there."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    epoch, skip = place_in_data(loader, first_step, num_micro_steps)
    while True:
        loader.set_epoch(epoch)
        if is_stream:
            num_batches = 0
            for of_step in _whole_steps(loader, num_micro_steps):
                num_batches += num_micro_steps
                if num_batches > skip:
                    yield from of_step
            if num_batches == 0:
                raise ValueError("the stream holds less than one step for each process")
            skip = max(0, skip - num_batches)
        else:
            last = len(loader) // num_micro_steps * num_micro_steps
            rest = accelerator.skip_first_batches(loader, skip) if skip else loader
            for number, batch in enumerate(rest, start=skip):
                if number < last:
                    yield batch
            skip = 0
        epoch += 1


def _whole_steps(loader: DataLoader, num_micro_steps: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The batches of a stream, grouped by step; an incomplete step at the end is left out."""
    of_step = []
    for batch in loader:
        of_step.append(batch)
        if len(of_step) == num_micro_steps:
            yield of_step
            of_step = []
