"""Each rank's batches: as many as the run needs, in an order that depends on nothing but the seed."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slm_toolkit.config import SYNTHETIC, RunConfig
from slm_toolkit.run.loss import RecordedLoss
from slm_toolkit.run.loss_kernels import IGNORE_INDEX


def make_loader(dataset: Any, config: RunConfig, *, train: bool, num_ranks: int = 1) -> DataLoader:
    """Batches of (per_device_train_batch_size, seq_len) tokens; real text to train on is shuffled.

    Held-out sequences are filled up with some without labels, so that every rank has whole batches and none
    counts twice.
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
        pin_memory=torch.cuda.is_available(),  # so that the copy to the GPU need not be waited for
    )


class _FilledUp(Dataset):
    """Sequences with labels, so many more without any that their number is a multiple of `multiple`."""

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


def count_steps(config: RunConfig, loader: DataLoader) -> int:
    """Optimizer steps to do. Raises ValueError for data that is too small or of unknown length."""
    if isinstance(loader.dataset, IterableDataset):
        if config.steps_asked is None:
            raise ValueError("a stream has no epochs\nhint: give --max_steps, or --streaming false")
        return config.steps_asked
    num_batches = len(loader)
    if num_batches == 0:
        raise ValueError(
            f"{config.dataset} is too small for one batch of {config.per_device_train_batch_size} sequences "
            f"of {config.seq_len} tokens on each process\n"
            "hint: lower --per_device_train_batch_size or --seq_len"
        )
    if config.steps_asked is not None:
        return config.steps_asked
    of_epoch = num_batches // config.epoch_multiple * config.epoch_multiple  # as `endless` has them
    return max(1, math.ceil(config.num_train_epochs * of_epoch / config.gradient_accumulation_steps))


def model_inputs(batch: dict[str, torch.Tensor], config: RunConfig) -> dict[str, torch.Tensor]:
    """What the model's forward takes of a batch; a token's label is itself where none are given.

    Kept apart, documents are one long row to flash-attn, which finds their ends by position_ids so only.
    """
    tokens = batch["input_ids"]
    inputs = {"input_ids": tokens, "labels": batch.get("labels", tokens)}
    if "position_ids" not in batch:
        return inputs
    inputs["position_ids"] = batch["position_ids"]
    if config.attn_implementation.startswith("flash_attention"):
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 0] = IGNORE_INDEX  # of the sequence before it
        return {name: value.reshape(1, -1) for name, value in inputs.items()}
    return inputs


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens of a batch that have a loss: those with a label, but for the first of each sequence."""
    labels = batch.get("labels", batch["input_ids"])
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def steps_by_labels(
    accelerator: Accelerator,
    batches: Iterator[dict[str, torch.Tensor]],
    loss_recorder: RecordedLoss,
    num_micro_steps: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches, drawn a step at a time, so that every label of the step counts alike.

    The loss of each micro-step is divided by the mean number of labels of all micro-steps on all ranks: its
    mean over them is then the mean over all labels, however unevenly those fall.
    """
    while True:
        of_step = [next(batches) for _ in range(num_micro_steps)]
        count = torch.stack([num_labels(batch) for batch in of_step]).float().mean()
        loss_recorder.divide_by(accelerator.reduce(count, reduction="mean").clamp(min=1.0))
        yield from of_step


def endless(
    accelerator: Accelerator, loader: DataLoader, *, skip: int, multiple: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches, epoch after epoch, from number `skip` on; a stream is read again up to there.

    Of each epoch, a multiple of `multiple` batches is used: several processes, too, drop what is not enough
    for one batch each.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not is_stream and len(loader) < multiple:
        raise ValueError(f"an epoch has {len(loader)} batches, less than --epoch_multiple {multiple}")
    epoch, skip = (0, skip) if is_stream else divmod(skip, len(loader) // multiple * multiple)
    while True:
        loader.set_epoch(epoch)
        num_batches = 0
        waiting = []
        for batch in accelerator.skip_first_batches(loader, skip) if skip and not is_stream else loader:
            num_batches += 1
            waiting.append(batch)
            if (num_batches + (0 if is_stream else skip)) % multiple:
                continue
            for complete in waiting:
                if is_stream and skip > 0:
                    skip -= 1
                else:
                    yield complete
            waiting = []
        if is_stream and num_batches < multiple:
            raise ValueError("the stream holds less than one batch for each process")
        epoch, skip = epoch + 1, skip if is_stream else 0
