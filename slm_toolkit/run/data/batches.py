"""Make each rank's batches: as many as the run needs, in an order that depends only on the seed."""

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
    """Make batches of (per_device_train_batch_size, seq_len) tokens; training text is shuffled.

    Held-out data is filled up with sequences without labels, so that every rank has whole batches and no
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
        pin_memory=torch.cuda.is_available(),  # lets the copy to the GPU run in the background
    )


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a worker, because the rank still needs batches for its last step.

    Schedulers and Ctrl-C signal every process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _FilledUp(Dataset):
    """Sequences with labels, then sequences without labels until the number is a multiple of `multiple`."""

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
    """Return the number of optimizer steps to do.

    Raises ValueError for data that is too small or has an unknown length.
    """
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
    """Return the arguments of the model's forward. Without labels in the batch, the tokens are the labels.

    flash-attn gets separated documents as one long row, and finds their ends by position_ids.
    """
    tokens = batch["input_ids"]
    inputs = {"input_ids": tokens, "labels": batch.get("labels", tokens)}
    if config.sp_size > 1:
        names = ("shift_labels", "position_ids", "attention_mask")
        return inputs | {name: batch[name] for name in names if name in batch}
    if "position_ids" not in batch:
        return inputs
    inputs["position_ids"] = batch["position_ids"]
    if config.attn_implementation.startswith("flash_attention"):
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 0] = IGNORE_INDEX  # otherwise the sequence before would predict it
        return {name: value.reshape(1, -1) for name, value in inputs.items()}
    return inputs


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of tokens with a loss: those with a label, except the first of each sequence."""
    return labels_by_sequence(batch).sum()


def labels_by_sequence(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of tokens with a loss in each sequence of a batch, or in this rank's part of it."""
    next_tokens = batch.get("shift_labels")
    if next_tokens is None:
        next_tokens = batch.get("labels", batch["input_ids"])[:, 1:]
    return (next_tokens != IGNORE_INDEX).sum(dim=1)


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
        count = torch.stack([num_labels(batch) for batch in step_batches]).float().mean()
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
        if is_stream:
            num_batches = 0
            for step_batches in _whole_steps(loader, num_micro_steps):
                num_batches += num_micro_steps
                if num_batches > skip:
                    yield from step_batches
            if num_batches == 0:
                raise ValueError("the stream contains less than one step for each process")
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
    """Yield the batches of a stream, grouped by step. An incomplete step at the end is left out."""
    step_batches = []
    for batch in loader:
        step_batches.append(batch)
        if len(step_batches) == num_micro_steps:
            yield step_batches
            step_batches = []
