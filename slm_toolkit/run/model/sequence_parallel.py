"""Sequence parallelism by `--sp_size`: ranks share each sequence, and exchange heads around attention.

Every rank of a group computes all layers for its stretch of the tokens. Attention needs whole sequences:
there each rank gives the other ranks their heads of its tokens, computes its own heads of all tokens, and
gives the results back. This is DeepSpeed-Ulysses (arXiv 2309.14509). Weights and gradients don't know of it:
a step's gradients are the mean over all ranks, as without it. So it is the same under every engine.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.utils.data import DataLoader

from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX
from slm_toolkit.run.peers.machines import process_group_timeout


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each sequence: neighbours, so that a group lies in one node if it can."""

    size: int = 1
    rank: int = 0
    "of this process in its group"
    process_group: ProcessGroup | None = None
    "None if there is one rank"

    def stretch_of(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's tokens of a batch of whole sequences, and the tokens that they predict.

        Adds shift_labels, because the last token of a stretch predicts the first of the next; position_ids,
        because positions count from the sequence's start; and for separate documents the attention_mask of
        the whole sequence, [sequences, 1, tokens, tokens].
        """
        if self.size == 1:
            return batch
        tokens = batch["input_ids"]
        start, end = (tokens.shape[1] // self.size * rank for rank in (self.rank, self.rank + 1))
        labels = batch.get("labels", tokens)
        positions = batch.get("position_ids")
        whole = {**batch, "shift_labels": functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)}
        if positions is None:
            whole["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        part = {
            name: values[:, start:end].contiguous() if values.shape == tokens.shape else values
            for name, values in whole.items()
            if name != "labels"
        }
        if "padding" in batch:  # at the sequences' ends
            part["padding"] = (end - tokens.shape[1] + batch["padding"]).clamp(0, end - start)
            part["padding_of_group"] = batch["padding"] / self.size
        if positions is not None:
            part["attention_mask"] = _mask_of_documents(positions)
        return part

    def loader_of(self, loader: DataLoader, accelerator: Accelerator) -> DataLoader:
        """Prepare a DataLoader that gives all ranks of a group the same batches."""
        if self.size == 1:
            return accelerator.prepare_data_loader(loader)
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=accelerator.num_processes // self.size,
            process_index=accelerator.process_index // self.size,
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=accelerator.dispatch_batches,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            non_blocking=accelerator.non_blocking,
        )

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the group of each value, on every rank."""
        if self.size > 1:
            torch.distributed.all_reduce(values, group=self.process_group)
        return values / self.size

    def heads_for_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Exchange states [batch, heads, stretch, width] for [batch, heads / size, tokens, width].

        If the group's size does not divide the key-value heads, heads of zeros are added, each with its
        queries. So the slowest rank has as many heads as if some ranks had one head less.
        """
        missing = -key.shape[1] % self.size
        # under autocast, RoPE has made query and key fp32; the kernel would cast them, after the exchange
        states = [state.to(value.dtype) for state in (query, key, value)]
        if missing:
            states = [
                functional.pad(state, (0, 0, 0, 0, 0, missing * state.shape[1] // key.shape[1]))
                for state in states
            ]
        by_rank = [state.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4) for state in states]
        numbers = [state.shape[3] for state in by_rank]  # heads for each rank
        joined = torch.cat(by_rank, dim=3)
        del states, by_rank  # frees the padded ones before the exchange allocates its result
        received = _Exchange.apply(joined, self.process_group).flatten(0, 1)
        return tuple(part.permute(1, 2, 0, 3) for part in received.split(numbers, dim=2))

    def tokens_for_heads(self, output: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Exchange output [batch, tokens, num_heads / size, width] for [batch, stretch, num_heads, width]."""
        by_rank = output.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        received = _Exchange.apply(by_rank, self.process_group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_heads]


WHOLE = SequenceGroup()
"every rank has its own sequences"


def join_sequence_group(size: int) -> SequenceGroup:
    """Return this rank's group of `size` neighbours. Every rank must call it, after all are connected."""
    if size == 1:
        return WHOLE
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for first in range(0, num_ranks, size):  # every rank takes part in making every group
        group = torch.distributed.new_group(list(range(first, first + size)), timeout=process_group_timeout())
        if first <= rank < first + size:
            own = group
    return SequenceGroup(size, rank % size, own)


class _Exchange(torch.autograd.Function):
    """Give part r of the first dimension to rank r, and receive one part from each. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradient.contiguous(), ctx.group), None


def _mask_of_documents(positions: torch.Tensor) -> torch.Tensor:
    """Return which tokens see which, [sequences, 1, tokens, tokens]: earlier ones of the same document."""
    documents = (positions == 0).cumsum(dim=1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()  # in place: it is the largest tensor of a long sequence
