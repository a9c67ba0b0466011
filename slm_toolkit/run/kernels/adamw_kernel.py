"""AdamW's update of all tensors in one Triton kernel, which reads and writes each number once.

A bf16 parameter with an fp32 master costs 28 bytes: the gradient (2), the master and both moments (12) are
read; these three (12) and the parameter (2) are written. One operation after the other takes 48: a cast, the
clipping, the update and a copy.

Import this file only where a GPU is: Triton comes with PyTorch's builds for CUDA and ROCm.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
"elements that one program updates"
_NUM_COLUMNS = tl.constexpr(6)  # of the table of tensors: five pointers and the size


class AdamWKernel:
    """Does steps of AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2).

    Keeps a table on the device with each block's tensor and first element, 16 bytes per BLOCK elements.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(
        self,
        gradients: list[torch.Tensor],
        masters: list[torch.Tensor],
        moments: list[torch.Tensor],
        squares: list[torch.Tensor],
        weights: list[torch.Tensor],
        *,
        steps: list[torch.Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip: torch.Tensor | None,
        found_inf: torch.Tensor,
    ) -> None:
        """Do one step. Each list has a tensor per parameter; those of a parameter have the same elements.

        Gradients and weights are bf16, fp16 or fp32, alike in all parameters; masters and moments are fp32.
        `weights` get the rounded masters, and are the masters themselves where weights are fp32. On the
        device, too, are the scalars: `steps`, the number of this step; `clip`, a factor of the gradients;
        `found_inf`, not 0 where nothing may change.
        """
        gradients = [gradient.contiguous() for gradient in gradients]
        lists = (gradients, masters, moments, squares, weights)
        assert all(tensor.is_contiguous() for tensors in lists for tensor in tensors)
        device, sizes = masters[0].device, tuple(master.numel() for master in masters)
        if sizes not in self._blocks:
            blocks = ((number, start) for number, size in enumerate(sizes) for start in range(0, size, BLOCK))
            self._blocks[sizes] = _table(list(blocks), device)
        blocks, pointers = self._blocks[sizes], [map(torch.Tensor.data_ptr, tensors) for tensors in lists]
        tensors = list(zip(*pointers, sizes, strict=True))
        steps = torch.stack(steps).double()
        corrections = torch.stack([1 - betas[0] ** steps, (1 - betas[1] ** steps).sqrt()], dim=1).float()
        _update[(len(blocks),)](
            *(_table(tensors, device), blocks, corrections),
            *(found_inf if clip is None else clip, found_inf),
            *(1 - betas[0], betas[1], 1 - betas[1], lr, 1 - lr * weight_decay, eps),  # rounded as by torch
            GRADIENT=_TYPES[gradients[0].dtype],
            WEIGHT=_TYPES[weights[0].dtype],
            CLIPS=clip is not None,
            ROUNDS=weights[0].dtype != masters[0].dtype,
            ALIGNED=not any(number % 16 for row in tensors for number in row),
            BLOCK=BLOCK,
            num_warps=8,
        )


def _table(rows: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device; the pinned memory is only reused when the copy is done."""
    table = torch.tensor(rows, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _update(
    tensors,
    blocks,
    corrections,
    clip,
    found_inf,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    lr,
    decay,
    eps,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    CLIPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    block = blocks + 2 * tl.program_id(0)
    tensor, start = tl.load(block), tl.multiple_of(tl.load(block + 1), BLOCK)
    row = tensors + tensor * _NUM_COLUMNS
    size = tl.load(row + _NUM_COLUMNS - 1)
    gradients = tl.load(row).to(tl.pointer_type(GRADIENT))
    masters = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    moments = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    squares = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    weights = tl.load(row + 4).to(tl.pointer_type(WEIGHT))
    if ALIGNED:  # so that a thread reads and writes several numbers at once
        size = tl.multiple_of(size, 16)
        gradients, masters = tl.multiple_of(gradients, 16), tl.multiple_of(masters, 16)
        moments, squares = tl.multiple_of(moments, 16), tl.multiple_of(squares, 16)
        weights = tl.multiple_of(weights, 16)
    index = start + tl.arange(0, BLOCK)
    mask = index < size
    gradients, masters, weights = gradients + index, masters + index, weights + index
    moments, squares = moments + index, squares + index

    gradient = tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
    if CLIPS:
        gradient = gradient * tl.load(clip)
    master = tl.load(masters, mask=mask, other=0.0)
    moment = tl.load(moments, mask=mask, other=0.0)
    square = tl.load(squares, mask=mask, other=0.0)
    moment = moment + one_minus_beta1 * (gradient - moment)
    square = square * beta2 + one_minus_beta2 * (gradient * gradient)
    correction1 = tl.load(corrections + tensor * 2)
    correction2 = tl.load(corrections + tensor * 2 + 1)
    master = master * decay
    master = master - lr / correction1 * (moment / (tl.sqrt(square) / correction2 + eps))
    tl.store(masters, master, mask=mask)
    tl.store(moments, moment, mask=mask)
    tl.store(squares, square, mask=mask)
    if ROUNDS:
        tl.store(weights, master.to(WEIGHT), mask=mask)
