"""Muon under DDP and FSDP2: it updates hidden matrices by their orthogonalized momentum.

The algorithm is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). Updates are as large as
AdamW's ("Muon is Scalable for LLM Training", arXiv 2502.16982), so both optimizers have one learning rate and
weight decay; torch.optim.Muon calls it match_rms_adamw. Orthogonalizing needs whole matrices: of every W
matrices, each of W ranks orthogonalizes one. Under FSDP2 it receives the rows of all ranks, and sends them
back; under DDP it sends its result to all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

MUON_MOMENTUM = 0.95  # Jordan's and PyTorch's default
MOMENTUM = "momentum_buffer"
"name of the momentum in an optimizer's state"
MUON = "slm_toolkit::muon"
"name under which a profile shows the orthogonalization of a matrix"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz's quintic iteration, from Jordan's post
_ITERATIONS = 5


@dataclass(frozen=True)
class HiddenMatrix:
    """This rank's rows of a matrix, in tensors that share memory with the training state."""

    shape: torch.Size
    "of the whole matrix"
    gradient: torch.Tensor
    momentum: torch.Tensor
    weights: torch.Tensor


def step_by_muon(
    matrices: list[HiddenMatrix],
    group: dist.ProcessGroup | None,
    *,
    is_sharded: bool,
    compute_dtype: torch.dtype,
    lr: float,
    weight_decay: float,
    clip: torch.Tensor | None,
) -> None:
    """Update this rank's weights and momentums. `clip`: a factor on the gradients.

    group: the ranks among which the matrices are sharded or copied; None: this process alone.
    compute_dtype: of the Newton-Schulz iteration.
    """
    num_ranks = group.size() if group is not None else 1
    for start in range(0, len(matrices), num_ranks):
        batch = matrices[start : start + num_ranks]
        if is_sharded and group is not None:
            results = iter(_exchanged(batch, _updates(batch, compute_dtype, clip), group))
        else:
            results = _shared_out(batch, compute_dtype, clip, group)
        torch._foreach_mul_([matrix.weights for matrix in batch], 1 - lr * weight_decay)
        for matrix, result in zip(batch, results, strict=True):
            # with this factor, an update is as large as AdamW's
            matrix.weights.add_(result, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))


def _updates(
    batch: list[HiddenMatrix], compute_dtype: torch.dtype, clip: torch.Tensor | None
) -> list[torch.Tensor]:
    """Add gradients to momentums; return Nesterov's updates. Overwrites gradients of the same dtype."""
    momentums = [matrix.momentum for matrix in batch]
    gradients = [matrix.gradient.to(matrix.momentum.dtype) for matrix in batch]
    if clip is not None:
        torch._foreach_mul_(gradients, clip)
    torch._foreach_lerp_(momentums, gradients, 1 - MUON_MOMENTUM)
    torch._foreach_lerp_(gradients, momentums, MUON_MOMENTUM)
    return [gradient.to(compute_dtype) for gradient in gradients]


def _shared_out(
    batch: list[HiddenMatrix],
    compute_dtype: torch.dtype,
    clip: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Iterator[torch.Tensor]:
    """Orthogonalize this rank's matrix of those that every rank has. Yield all results, one at a time."""
    rank = group.rank() if group is not None else 0
    for owner, matrix in enumerate(batch):
        (update,) = _updates([matrix], compute_dtype, clip)
        if owner == rank:
            own = orthogonalize(update)
    for owner, matrix in enumerate(batch):
        result = own if owner == rank else update.new_empty(matrix.shape)
        if group is not None:
            dist.broadcast(result, group=group, group_src=owner)
        yield result


def _exchanged(
    batch: list[HiddenMatrix], updates: list[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Orthogonalize this rank's matrix of sharded ones, between two all-to-alls: to the owners and back."""
    rank, num_ranks = group.rank(), group.size()
    sent = [update.numel() for update in updates] + [0] * (num_ranks - len(updates))
    received, whole = [0] * num_ranks, updates[0].new_empty(0)
    if rank < len(batch):
        num_rows, num_columns = batch[rank].shape
        each = -(-num_rows // num_ranks)  # FSDP2's shards: the last ones may be smaller, or empty
        ends = [min(other * each, num_rows) for other in range(num_ranks + 1)]
        received = [(ends[other + 1] - ends[other]) * num_columns for other in range(num_ranks)]
        whole = whole.new_empty(num_rows, num_columns)
    local = torch.cat([update.view(-1) for update in updates])
    dist.all_to_all_single(whole.view(-1), local, received, sent, group=group)
    if rank < len(batch):
        whole = orthogonalize(whole)
    dist.all_to_all_single(local, whole.view(-1), sent, received, group=group)
    parts = local.split(sent[: len(updates)])
    return [part.view_as(update) for part, update in zip(parts, updates, strict=True)]


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix with orthonormal rows or columns, by Newton-Schulz in its dtype.

    Most singular values of the result lie between 0.7 and 1.2, which is near enough for training.
    """
    first, second, third = _COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    with torch.profiler.record_function(MUON):
        x = matrix.T if is_tall else matrix
        x = x / x.norm().clamp(min=1e-7)  # the iteration needs singular values of at most 1
        for _ in range(_ITERATIONS):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)
            x = torch.addmm(x, polynomial, x, beta=first)
    return x.T.contiguous() if is_tall else x


def ranks_of(param: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share or copy a parameter; None: this process alone."""
    if isinstance(param, DTensor):
        (dimension,) = (index for index, place in enumerate(param.placements) if place.is_shard())
        group = param.device_mesh.get_group(dimension)
    else:
        group = dist.group.WORLD if dist.is_initialized() else None
    return group if group is not None and group.size() > 1 else None


def is_muon(group: dict[str, Any]) -> bool:
    """Return whether a group of an optimizer's parameters is updated by Muon."""
    return "momentum" in group
