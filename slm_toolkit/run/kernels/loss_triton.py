"""The arithmetic of a fused loss in one Triton kernel, which replaces logits by their gradient.

One pass over a row finds its maximum and the sum of its exponentials together (Milakov and Gimelshein,
"Online normalizer calculation for softmax", arXiv 1805.02867), so a vocabulary may have any size. A second
pass writes the gradient.

Import this file only where a GPU is: Triton comes with PyTorch's builds for CUDA and ROCm.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
"logits of a row that a program reads at once"
_NO_LABEL = tl.constexpr(-100)


def triton_chunk_losses_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor,
    *,
    with_gradient: bool,
) -> torch.Tensor:
    """Do what `loss_kernels._chunk_losses_` does: return each row's fp32 loss of logits [rows, V].

    With `with_gradient`, overwrites the logits with the gradient of the losses' sum divided by `num_items`.
    """
    assert logits.stride(1) == 1, logits.stride()
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    _losses[(len(logits),)](
        *(logits, targets, num_items, losses, logits.stride(0)),
        NUM_COLUMNS=logits.shape[1],
        WITH_GRADIENT=with_gradient,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return losses


@triton.jit
def _losses(
    logits,
    targets,
    num_items,
    losses,
    stride,
    NUM_COLUMNS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == _NO_LABEL:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, NUM_COLUMNS, BLOCK):
                index = start + columns
                tl.store(logits + index, 0.0, mask=index < NUM_COLUMNS)
        return
    label = tl.load(logits + target).to(tl.float32)  # before another warp can write its gradient there
    top = -float("inf")  # of the columns so far
    total = 0.0  # of their exponentials, relative to `top`
    for start in range(0, NUM_COLUMNS, BLOCK):
        index = start + columns
        values = tl.load(logits + index, mask=index < NUM_COLUMNS, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(values, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(values - higher), axis=0)
        top = higher
    tl.store(losses + row, tl.log(total) - (label - top))
    if WITH_GRADIENT:
        share = 1.0 / tl.load(num_items).to(tl.float32)
        for start in range(0, NUM_COLUMNS, BLOCK):
            index = start + columns
            mask = index < NUM_COLUMNS
            values = tl.load(logits + index, mask=mask, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(values - top) / total - tl.where(index == target, 1.0, 0.0)
            tl.store(logits + index, (gradient * share).to(logits.dtype.element_ty), mask=mask)
