"""Which sequences a step saw whose loss or gradient was no number: for a look at the data."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from slm_toolkit.record import finite
from slm_toolkit.run.batches import place_in_data
from slm_toolkit.run.job import Job, Prepared
from slm_toolkit.run.lookout import Seen
from slm_toolkit.run.ranks import gather_to_all
from slm_toolkit.safe_files import write_new

_SHOWN_TOKENS = 64
"of each sequence, as text"


def describe_bad_step(job: Job, prepared: Prepared, seen: Seen, *, max_loss: float) -> tuple[str, Path]:
    """What was wrong on which rank, and the file that tells more, by rank 0. Every rank must call it."""
    bad_ranks = seen.bad_ranks(max_loss)
    loader, rank = prepared.loader, job.accelerator.process_index
    numbers = list(_sequence_numbers(loader, seen.step, prepared.num_micro_steps, job.accelerator))
    of_ranks = gather_to_all([{"number": number, **_start_of(job, loader, number)} for number in numbers])
    path = job.run_dir / f"bad-step-{seen.step + 1}.json"
    if rank == 0:
        told = {
            "step": seen.step + 1,
            "ranks": [
                {
                    "rank": of_rank,
                    "loss": finite(seen.losses[of_rank]),
                    "grad_norm": None if (norm := seen.grad_norms[of_rank]) is None else finite(norm),
                    "is_bad": of_rank in bad_ranks,
                    "sequences": sequences,
                }
                for of_rank, sequences in enumerate(of_ranks)
            ],
        }
        write_new(path, json.dumps(told, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    losses = " and ".join(f"{seen.losses[rank]:.4g} on rank {rank}" for rank in bad_ranks)
    if seen.is_loss_bad(max_loss):
        return f"the loss is {losses}", path
    norm = seen.grad_norms[0]
    told = f"the norm of the gradients is {'unknown' if norm is None else f'{norm:.4g}'}, the loss {losses}"
    if job.config.on_bad_step == "skip":  # then it is the norm that tells
        told += f"; or the loss of a micro-step is above {max_loss:.4g} (--max_loss)"
    return told, path


def _sequence_numbers(loader: Any, step: int, num_micro_steps: int, accelerator: Any) -> Iterator[int]:
    """Of this rank in one step: where they stand in the data set, or in the stream."""
    epoch, skip = place_in_data(loader, step, num_micro_steps)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        size, num_ranks = loader.total_batch_size // accelerator.num_processes, accelerator.num_processes
        for batch in range(skip, skip + num_micro_steps):
            first = (batch * num_ranks + accelerator.process_index) * size
            yield from range(first, first + size)
        return
    now = loader.iteration
    loader.set_epoch(epoch)
    for batch in islice(iter(loader.batch_sampler), skip, skip + num_micro_steps):
        yield from batch
    loader.set_epoch(now)


def _start_of(job: Job, loader: Any, number: int) -> dict[str, Any]:
    """The first tokens of a sequence, as text where there is a tokenizer."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return {}
    tokens = loader.dataset[number]["input_ids"][:_SHOWN_TOKENS].tolist()
    return {"text": job.data.tokenizer.decode(tokens)} if job.data.tokenizer else {"tokens": tokens}
