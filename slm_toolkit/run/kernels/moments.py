"""An optimizer's moments between steps: in the dtype of the weights, in bf16, or in 8 bits.

8 bits are those of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): one byte per element,
and an fp32 scale for each block of 256 elements. Blocks begin where this rank's stretch of a tensor begins.
Moments that were not changed become the same bytes again (in blocks above 1e-38). PyTorch's operations do it
on every device, and `adamw_kernel.py` on a GPU: bitsandbytes 0.50 has kernels, but that for CPUs turns zeros
into 2e-5 of a block's largest.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

FIRST, SECOND = "exp_avg", "exp_avg_sq"
MOMENTS = (FIRST, SECOND)
BLOCK_ELEMENTS = 256
SCALES = "_scales"
"ends the name of the scales of a moment in 8 bits"
_EXPONENTS = 7
"powers of ten that a byte's values go through, up to 1"
DROPPED_BITS = 14
"of an fp32 number's 32; the others are its index in a table: sign, exponent and 9 bits of its fraction"
_KEPT_BITS = 32 - DROPPED_BITS
_INDEX_BITS = 2**_KEPT_BITS - 1
"clears the bits that shifting a negative number right fills with ones"
_TABLES: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def create_moment(state: dict[str, Any], kind: str, param: torch.Tensor, dtype: torch.dtype) -> None:
    """Add a moment of zeros to a parameter's state. dtype uint8: in 8 bits, with scales."""
    state[kind] = torch.zeros_like(param, dtype=dtype)
    if dtype == torch.uint8:
        num_blocks = -(-local_part(param).numel() // BLOCK_ELEMENTS)
        state[kind + SCALES] = torch.zeros(num_blocks, device=param.device)


def read_moment(state: dict[str, Any], kind: str, stretch: slice | None, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's elements of a moment (of the flattened tensor's `stretch`) in `dtype`.

    They share memory with the state if it has the dtype. A stretch begins where a block does.
    """
    kept = _part(state[kind], stretch)
    if kept.dtype != torch.uint8:
        return kept.to(dtype)
    if not kept.numel():
        return torch.empty_like(kept, dtype=dtype)
    value_of, _ = tables_of(kind, kept.device)
    values = value_of.index_select(0, kept.view(-1).int()).view_as(kept)
    for blocks, scales in zip(_blocks(values), _scales(state, kind, stretch), strict=True):
        blocks.mul_(scales.unsqueeze(1))
    return values.to(dtype)


def write_moment(state: dict[str, Any], kind: str, stretch: slice | None, moment: torch.Tensor) -> None:
    """Keep what `read_moment` returned, in the state's dtype, and a step changed."""
    kept = _part(state[kind], stretch)
    if kept.dtype == torch.uint8 and kept.numel():
        _, byte_of = tables_of(kind, kept.device)
        wide = moment.float()
        shares = torch.empty_like(wide)
        for blocks, into, scales in zip(
            _blocks(wide), _blocks(shares), _scales(state, kind, stretch), strict=True
        ):
            torch.linalg.vector_norm(blocks, float("inf"), dim=1, out=scales)
            torch.div(blocks, scales.unsqueeze(1), out=into)
        bits = shares.view(-1).view(torch.int32).bitwise_right_shift_(DROPPED_BITS).bitwise_and_(_INDEX_BITS)
        torch.index_select(byte_of, 0, bits, out=kept.view(-1))
    elif kept.dtype != moment.dtype:
        kept.copy_(moment)


@contextmanager
def unpacked(state: dict[str, Any]) -> Iterator[None]:
    """Inside, moments in 8 bits are fp32 tensors of the same shape, to be read or written."""
    with ExitStack() as packing:
        for kind in [kind for kind in MOMENTS if kind + SCALES in state]:
            packed = {name: state[name] for name in (kind, kind + SCALES)}
            state[kind] = read_moment(state, kind, None, torch.float32)
            packing.callback(_pack, state, kind, packed)
        yield


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor as a view; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pack(state: dict[str, Any], kind: str, packed: dict[str, torch.Tensor]) -> None:
    moment = state[kind]
    state.update(packed)
    write_moment(state, kind, None, moment)


def _part(tensor: torch.Tensor, stretch: slice | None) -> torch.Tensor:
    local = local_part(tensor)
    return local if stretch is None else local.view(-1)[stretch]


def _scales(state: dict[str, Any], kind: str, stretch: slice | None) -> list[torch.Tensor]:
    """Return the scales of a stretch's whole blocks, and of the rest of one, if there is a rest."""
    scales, num_elements = state[kind + SCALES], local_part(state[kind]).numel()
    start, stop = (0, num_elements) if stretch is None else (stretch.start, stretch.stop)
    first, end = start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)
    num_whole = (stop - start) // BLOCK_ELEMENTS
    return [
        part for part in (scales[first : first + num_whole], scales[first + num_whole : end]) if len(part)
    ]


def _blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of a contiguous tensor's whole blocks, a row each, and of the rest, if there is one."""
    flat = tensor.view(-1)
    num_whole = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    parts = (flat[:num_whole].view(-1, BLOCK_ELEMENTS), flat[num_whole:].unsqueeze(0))
    return [part for part in parts if part.numel()]


def tables_of(kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the value of each byte, and the byte of each share of a block's largest element.

    A value is a power of ten from 1e-6 to 1 times a fraction, which has a bit more for each power. Shares
    have the byte of the nearest value, rounded at a five-hundredth of the share. A second moment that is not
    0 does not become 0: AdamW divides by its root, and the first moment may be there still.
    """
    if (kind, device) not in _TABLES:
        positive = [0.0]
        for exponent in range(_EXPONENTS):
            num_fractions = 2 ** (exponent + (kind == SECOND))
            edges = [0.1 + 0.9 * index / num_fractions for index in range(num_fractions + 1)]
            positive += [10.0 ** (exponent + 1 - _EXPONENTS) * sum(pair) / 2 for pair in pairwise(edges)]
        if kind == SECOND:
            values = torch.tensor([*positive, 1.0])
        else:  # 1 and -1, so that a block's largest element is kept as it is
            positive[-1] = 1.0
            values = torch.tensor([*positive, *[-value for value in positive[1:]]])
        order = values.argsort(stable=True)
        middles = values[order][:-1] / 2 + values[order][1:] / 2
        bits = torch.arange(2**_KEPT_BITS, dtype=torch.int32) << DROPPED_BITS | 1 << (DROPPED_BITS - 1)
        shares = bits.view(torch.float32).nan_to_num(1.0).clamp(-1, 1)
        byte_of = order[torch.bucketize(shares, middles)].to(torch.uint8)
        if kind == SECOND:
            byte_of[1 : len(byte_of) // 2].clamp_(min=1)  # the indices of positive shares
        _TABLES[kind, device] = values.to(device), byte_of.to(device)
    return _TABLES[kind, device]
