"""Muon, the same under every engine: it updates hidden matrices by their orthogonalized momentum.

The algorithm is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). Updates are as large as
AdamW's ("Muon is Scalable for LLM Training", arXiv 2502.16982), so both optimizers have one learning rate and
weight decay; torch.optim.Muon calls it match_rms_adamw. Orthogonalizing needs whole matrices: of every W
matrices, each of W ranks assembles one from the stretches of all ranks, orthogonalizes it, and sends the
stretches back. Under ZeRO-1 and 2 most matrices lie on one rank as a whole.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor

MUON_MOMENTUM = 0.95  # Jordan's and PyTorch's default
MOMENTUM = "momentum_buffer"
"name of the momentum in an optimizer's state"
MUON = "slm_toolkit::muon"
"name under which a profile shows the orthogonalization of a matrix"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz's quintic iteration, from Jordan's post
_ITERATIONS = 5


@dataclass(frozen=True)
class Matrix:
    """A hidden matrix, and which of its flattened elements each rank has."""

    num_rows: int
    num_columns: int
    bounds: tuple[int, ...] | None
    "rank r has the elements from bounds[r] to bounds[r + 1]; None: every rank has all"
    owner: int | None = None
    "the rank that orthogonalizes it; None: ranks take turns"

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    def size_on(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def scale(self) -> float:
        """The factor on the learning rate with which an update is as large as AdamW's."""
        return 0.2 * math.sqrt(max(self.num_rows, self.num_columns))


@dataclass(frozen=True)
class LocalMatrix:
    """This rank's elements of a matrix, as 1-D tensors that share memory with the training state."""

    matrix: Matrix
    gradient: torch.Tensor
    momentum: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Muon:
    """The update of all hidden matrices. compute_dtype: that of the Newton-Schulz iteration."""

    compute_dtype: torch.dtype

    def step(
        self,
        parts: list[LocalMatrix],
        process_group: torch.distributed.ProcessGroup | None,
        *,
        lr: float,
        weight_decay: float,
        clip: torch.Tensor | None = None,
    ) -> None:
        """Update this rank's weights and momentums. `clip`: a factor on the gradients.

        process_group: the ranks among which the matrices are sharded or copied; None: this process alone.
        """
        num_ranks = process_group.size() if process_group is not None else 1
        for batch in _batches(parts, num_ranks):
            self._step_together(batch, process_group, lr, weight_decay, clip)

    def _step_together(
        self,
        by_owner: dict[int, LocalMatrix],
        process_group: torch.distributed.ProcessGroup | None,
        lr: float,
        weight_decay: float,
        clip: torch.Tensor | None,
    ) -> None:
        """Do `step` for at most one matrix of each owner."""
        parts = list(by_owner.values())
        matrices = {owner: part.matrix for owner, part in by_owner.items()}
        # stretches are small, and launching a kernel for each would take longer than the kernel
        together = [[part] for part in parts] if parts[0].matrix.bounds is None else [parts]
        updates = chain.from_iterable(self._updates_of(some, clip) for some in together)
        stretches = _orthogonalized(matrices, updates, process_group)
        torch._foreach_mul_([part.weights for part in parts], 1 - lr * weight_decay)
        for part, stretch in zip(parts, stretches, strict=True):
            part.weights.add_(stretch, alpha=-lr * part.matrix.scale)

    def _updates_of(self, parts: list[LocalMatrix], clip: torch.Tensor | None) -> Iterable[torch.Tensor]:
        """Add gradients to momentums; return Nesterov's updates. Overwrites gradients of the same dtype."""
        momentums = [part.momentum for part in parts]
        gradients = [part.gradient.to(part.momentum.dtype) for part in parts]
        if clip is not None:
            torch._foreach_mul_(gradients, clip)
        torch._foreach_lerp_(momentums, gradients, 1 - MUON_MOMENTUM)
        torch._foreach_lerp_(gradients, momentums, MUON_MOMENTUM)
        return [gradient.to(self.compute_dtype) for gradient in gradients]


def _batches(parts: list[LocalMatrix], num_ranks: int) -> Iterator[dict[int, LocalMatrix]]:
    """Yield the matrices in batches with at most one matrix of each owner, in the order of the owners."""
    of_owner: list[list[LocalMatrix]] = [[] for _ in range(num_ranks)]
    for index, part in enumerate(parts):
        of_owner[index % num_ranks if part.matrix.owner is None else part.matrix.owner].append(part)
    for batch in zip_longest(*of_owner):
        yield {owner: part for owner, part in enumerate(batch) if part is not None}


def _orthogonalized(
    matrices: dict[int, Matrix],
    updates: Iterable[torch.Tensor],
    process_group: torch.distributed.ProcessGroup | None,
) -> Iterator[torch.Tensor]:
    """Yield this rank's stretch of each matrix after its owner, the key, has orthogonalized the whole."""
    if process_group is None:
        yield from (
            orthogonalize(update.view(matrix.num_rows, -1)).view(-1)
            for matrix, update in zip(matrices.values(), updates, strict=True)
        )
    elif any(matrix.bounds is None for matrix in matrices.values()):
        yield from _shared_out(matrices, updates, process_group)
    else:
        yield from _exchanged(matrices, updates, process_group)


def _shared_out(
    matrices: dict[int, Matrix],
    updates: Iterable[torch.Tensor],
    process_group: torch.distributed.ProcessGroup,
) -> Iterator[torch.Tensor]:
    """Do `_orthogonalized` for matrices that every rank has: the owner sends its result to all."""
    for owner, update in zip(matrices, updates, strict=True):
        if owner == process_group.rank():
            own = orthogonalize(update.view(matrices[owner].num_rows, -1)).view(-1)
    for owner, matrix in matrices.items():
        is_own = owner == process_group.rank()
        result = own if is_own else update.new_empty(matrix.num_elements)
        torch.distributed.broadcast(result, group=process_group, group_src=owner)
        yield result


def _exchanged(
    matrices: dict[int, Matrix],
    updates: Iterable[torch.Tensor],
    process_group: torch.distributed.ProcessGroup,
) -> Iterator[torch.Tensor]:
    """Do `_orthogonalized` for sharded matrices: two all-to-alls, to the owners and back, if needed."""
    rank, num_ranks = process_group.rank(), process_group.size()
    own = matrices.get(rank)
    sent = [matrices[other].size_on(rank) if other in matrices else 0 for other in range(num_ranks)]
    received = [own.size_on(other) if own is not None else 0 for other in range(num_ranks)]
    local = torch.cat(list(updates))
    # every rank knows whether all matrices lie on their owners, as most do under ZeRO-1 and 2
    is_split = any(matrix.size_on(owner) < matrix.num_elements for owner, matrix in matrices.items())
    whole = local
    if is_split:
        whole = local.new_empty(sum(received))
        torch.distributed.all_to_all_single(whole, local, received, sent, group=process_group)
    if own is not None:
        whole = orthogonalize(whole.view(own.num_rows, -1)).view(-1)
    if is_split:
        torch.distributed.all_to_all_single(local, whole, sent, received, group=process_group)
    else:
        local = whole
    yield from local.split([sent[owner] for owner in matrices])


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


def of_parameter(param: torch.Tensor) -> tuple[Matrix, torch.distributed.ProcessGroup | None]:
    """Return a parameter as a matrix, with its process group, under DDP, FSDP2 or in one process."""
    num_rows, num_columns = param.shape
    if not isinstance(param, DTensor):
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        return Matrix(num_rows, num_columns, None), group if group and group.size() > 1 else None
    (dimension,) = (index for index, place in enumerate(param.placements) if place.is_shard())
    group = param.device_mesh.get_group(dimension)
    if group.size() == 1:
        return Matrix(num_rows, num_columns, None), None
    rows_each = -(-num_rows // group.size())
    bounds = [min(rank * rows_each, num_rows) * num_columns for rank in range(group.size() + 1)]
    return Matrix(num_rows, num_columns, tuple(bounds)), group


class ZeroMuonAndAdamW(torch.optim.AdamW):
    """AdamW for DeepSpeed's ZeRO-1, 2 and 3, with Muon for the groups that have a `momentum`.

    DeepSpeed puts this rank's part of a group into one flat tensor, and reduces, clips and casts gradients.
    """

    def __init__(self, groups: list[dict[str, Any]], *, muon: Muon, **options: Any) -> None:
        """`options` are AdamW's."""
        super().__init__(groups, **options)
        self.muon = muon
        self._hidden = [param for group in self.param_groups if is_muon(group) for param in group["params"]]
        self._layouts: dict[torch.Tensor, list[tuple[Matrix, int, int]]] = {}
        "of a flat tensor: each matrix with a part in it, and that part's start and size"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the groups that DeepSpeed has put into `param_groups`."""
        assert closure is None
        groups = self.param_groups
        for group in filter(is_muon, groups):
            for flat in group["params"]:
                self._step_by_muon(flat, group)
        self.param_groups = [group for group in groups if not is_muon(group)]
        super().step()
        self.param_groups = groups

    def _step_by_muon(self, flat: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum_of(flat)
        parts = [
            LocalMatrix(matrix, *(tensor.narrow(0, start, size) for tensor in (flat.grad, momentum, flat)))
            for matrix, start, size in self._layout(flat)
        ]
        world = torch.distributed.group.WORLD
        self.muon.step(
            parts,
            world if world.size() > 1 else None,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )

    def momentum_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the momentum of a flat tensor; create it before the first step."""
        state = self.state[flat]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(flat)
        return state[MOMENTUM]

    def _layout(self, flat: torch.Tensor) -> list[tuple[Matrix, int, int]]:
        if flat not in self._layouts:
            is_zero_3 = hasattr(self._hidden[0], "ds_tensor")
            layout = self._zero_3_layout(flat) if is_zero_3 else self._zero_1_and_2_layout(flat)
            self._layouts[flat] = layout
        return self._layouts[flat]

    def _zero_3_layout(self, flat: torch.Tensor) -> list[tuple[Matrix, int, int]]:
        """Every rank has an equal shard of each parameter; a flat tensor has the shards of one sub-group."""
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        layout, end = [], 0
        while end < flat.numel():
            param = self._hidden.pop(0)  # DeepSpeed steps the sub-groups in the order of the parameters
            shard, whole = param.ds_tensor.ds_numel, param.ds_numel
            bounds = tuple(min(other * shard, whole) for other in range(num_ranks + 1))
            layout.append((Matrix(*param.ds_shape, bounds), end, bounds[rank + 1] - bounds[rank]))
            end += shard
        assert end == flat.numel(), "a sub-group ends within a parameter"
        return layout

    def _zero_1_and_2_layout(self, flat: torch.Tensor) -> list[tuple[Matrix, int, int]]:
        """A group's parameters lie one after the other in a flat buffer; every rank has a partition of it."""
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        partition, layout = flat.numel(), []
        ends = accumulate((param.numel() for param in self._hidden), initial=0)
        for param, (start, end) in zip(self._hidden, pairwise(ends), strict=True):
            cuts = [min(max(other * partition, start), end) - start for other in range(num_ranks + 1)]
            size = cuts[rank + 1] - cuts[rank]
            place = start + cuts[rank] - rank * partition if size else 0
            # most matrices lie on one rank, which then needs nothing of the others
            owner = max(range(num_ranks), key=lambda other: cuts[other + 1] - cuts[other])
            layout.append((Matrix(*param.shape, tuple(cuts), owner), place, size))
            mapping = param._hp_mapping
            if size and (mapping is None or mapping.hp_fragment_address.start != place):
                raise ValueError(
                    "--optim muon: DeepSpeed has put the parameters in another order\n"
                    "hint: remove round_robin_gradients from the DeepSpeed JSON"
                )
        return layout


def is_muon(group: dict[str, Any]) -> bool:
    """Return whether a group of an optimizer's parameters is updated by Muon."""
    return "momentum" in group
