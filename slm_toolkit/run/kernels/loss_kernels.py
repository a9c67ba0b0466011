"""Losses that keep less for backward than transformers' own: logits in chunks, or never whole.

In the counts of bytes below, N is the tokens of a micro-step, V the vocabulary, h the hidden size and e the
bytes of an element of the compute dtype: 2 in bf16, 4 in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from slm_toolkit.config.loss_chunks import LossChunks

IGNORE_INDEX = -100
"label of a token that has no loss, as transformers has it"
_BY_RULE = LossChunks()
_Chunk = Callable[..., torch.Tensor]
"`_chunk_losses_`, as it is or compiled"


def fused_logits_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    *,
    num_items_in_batch: torch.Tensor | None = None,
    compiled: bool = False,
    chunks: LossChunks = _BY_RULE,
) -> torch.Tensor:
    """transformers' causal LM loss over logits [batch, tokens, V], of which it keeps one copy, not three.

    Peak: the logits, N x V x e bytes, and one chunk of fp32 probabilities, at most 64 MiB whatever N is (none
    in fp32; on a CPU, where torch converts dtypes apart, another as large). Forward saves the logits' own
    storage, which then holds their gradient: who reads the logits of a training step reads that. Backward
    allocates nothing. Without gradients, as in evaluation, the logits stay what they are. `compiled`: one
    kernel of torch.compile's reads the logits twice and writes their gradient, with no fp32 copy of a chunk.
    """
    targets = _next_tokens(labels).to(logits.device)
    num_items = _num_valid(targets) if num_items_in_batch is None else num_items_in_batch
    return _FusedLogitsLoss.apply(
        logits, targets, num_items, torch.is_grad_enabled(), _chunk_kernel(compiled), chunks
    )


@torch.no_grad()
def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The fp32 loss of each token, labels' shape, 0 where it has none; one pass over the logits."""
    losses = torch.empty(labels.numel(), device=logits.device, dtype=torch.float32)
    targets, flat = _next_tokens(labels).to(logits.device), logits.reshape(-1, logits.shape[-1])
    one = torch.ones((), device=logits.device)
    _sum_of_losses_(
        *(flat, targets, one),
        chunks=_BY_RULE,
        kernel=_chunk_losses_,
        with_gradient=False,
        token_losses=losses,
    )
    return losses.view(labels.shape)


class LossHead(torch.nn.Linear):
    """An output head that gives the loss, not logits, where it has labels: logits are never whole.

    It is the head's own forward that does it, because FSDP2 and ZeRO-3 gather the head's weight for that
    alone. transformers then calls the loss `logits`, and `_loss_of_head` hands it on.

    Peak in forward, beside hidden states [N, h] and weight [V, h]: their gradients, N x h x e and V x h x e
    bytes, which are all that is kept for backward; one chunk of logits, `LossChunks.of_logits` x V x e; and
    of its fp32 probabilities at most 64 MiB, as in `fused_logits_loss` (none in fp32, none where compiled).
    Both buffers serve every chunk. Backward allocates nothing: it scales both gradients in place and hands
    them on.
    Under autocast, bf16 copies of hidden states and weight come first, as for any matrix product there.

    The gradient of the weight is summed over chunks in the weight's dtype, by the matrix product itself,
    which rounds once per chunk, V / h times at most: in bf16 its error is 0.3 to 0.6 %, where one product's
    is 0.15 %, beside the 1 % that bf16 costs all gradients. An fp32 sum would take V x h x 4 bytes more.
    """

    labels: torch.Tensor | None = None
    "of the forward pass that runs"
    last_loss: torch.Tensor | None = None
    "in fp32, before an engine's output cast rounds it"
    num_items: torch.Tensor | None = None
    "what the sum over tokens is divided by; None: tokens with a label"
    token_losses: torch.Tensor | None = None
    "where it is a tensor, of one value per token, the next forward writes each token's loss into it"
    compiled: bool = False
    "whether the arithmetic between the matrix products is torch.compile's"
    chunks: LossChunks = _BY_RULE

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels, self.labels = self.labels, None
        losses, self.token_losses = self.token_losses, None
        if labels is None:
            return super().forward(hidden)
        weight, device_type = self.weight, hidden.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast(device_type, enabled=False):
            targets = _next_tokens(labels).to(hidden.device)
            num_items = _num_valid(targets) if self.num_items is None else self.num_items
            kernel, with_gradient = _chunk_kernel(self.compiled), torch.is_grad_enabled()
            sums = (targets, num_items, with_gradient, kernel, self.chunks, losses)
            loss = _FusedLinearLoss.apply(hidden, weight, *sums)
        self.last_loss = loss.detach()
        return loss


class _FusedLogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        num_items: torch.Tensor,
        with_gradient: bool,
        kernel: _Chunk,
        chunks: LossChunks,
    ) -> torch.Tensor:
        flat = logits.view(-1, logits.shape[-1])
        total = _sum_of_losses_(
            flat, targets, num_items, chunks=chunks, kernel=kernel, with_gradient=with_gradient
        )
        if with_gradient:
            ctx.save_for_backward(logits)  # by now their gradient
        return total / num_items

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_logits,) = ctx.saved_tensors
        return grad_logits.mul_(upstream), None, None, None, None, None


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        num_items: torch.Tensor,
        with_gradient: bool,
        kernel: _Chunk,
        chunks: LossChunks,
        token_losses: torch.Tensor | None,
    ) -> torch.Tensor:
        vocab_size, hidden_size = weight.shape
        flat = hidden.reshape(-1, hidden_size)
        rows = chunks.of_logits(len(flat), vocab_size=vocab_size, hidden_size=hidden_size)
        grad_hidden = torch.empty_like(flat) if with_gradient else None
        # a frozen head has no gradient, nor the memory for one
        grad_weight = torch.zeros_like(weight) if with_gradient and ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        buffer = flat.new_empty(rows, vocab_size)
        wide = _fp32_buffer(buffer, chunks, kernel)
        for start in range(0, len(flat), rows):
            chunk, part = flat[start : start + rows], targets[start : start + rows]
            logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
            total += _sum_of_losses_(
                logits,
                part,
                num_items,
                chunks=chunks,
                kernel=kernel,
                with_gradient=with_gradient,
                wide=wide,
                token_losses=None if token_losses is None else token_losses[start : start + rows],
            )
            if with_gradient:
                torch.mm(logits, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), chunk)
        if with_gradient:
            ctx.save_for_backward(grad_hidden.view(hidden.shape), grad_weight)
        return total / num_items

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight.mul_(upstream)
        return grad_hidden.mul_(upstream), grad_weight, None, None, None, None, None, None


def give_labels_to_head(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: labels reach the head beside transformers' forward, which keeps them for itself."""
    model.get_output_embeddings().labels = kwargs.get("labels")


def loss_of_head(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """transformers' loss function where the head has computed the loss: what it calls logits is that."""
    assert logits.dim() == 0, logits.shape
    return logits


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The label that each token predicts, flat; the last of a sequence predicts none, as in transformers."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].reshape(-1)


def _num_valid(targets: torch.Tensor) -> torch.Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def _sum_of_losses_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor,
    *,
    chunks: LossChunks,
    kernel: _Chunk,
    with_gradient: bool,
    wide: torch.Tensor | None = None,
    token_losses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy in fp32, summed over valid rows of logits [rows, V]; `wide`: see `_chunk_losses_`.

    With `with_gradient`, the logits become the gradient of that sum over `num_items`. `token_losses` takes
    each row's loss.
    """
    rows = chunks.of_probabilities(len(logits), vocab_size=logits.shape[1])
    if wide is None and not with_gradient and kernel is _chunk_losses_:
        wide = torch.empty_like(logits[:rows], dtype=torch.float32)  # the logits must stay what they are
    elif wide is None:
        wide = _fp32_buffer(logits[:rows], chunks, kernel)
    total = torch.zeros((), device=logits.device, dtype=torch.float32)
    for start in range(0, len(logits), rows):
        part = logits[start : start + rows]
        losses = kernel(
            part,
            targets[start : start + rows],
            num_items,
            None if wide is None else wide[: len(part)],
            with_gradient=with_gradient,
        )
        total += losses.sum()
        if token_losses is not None:
            token_losses[start : start + rows] = losses
    return total


def _fp32_buffer(logits: torch.Tensor, chunks: LossChunks, kernel: _Chunk) -> torch.Tensor | None:
    """Where probabilities of a chunk of logits can stand in fp32; None: they are fp32, or compiled away."""
    if logits.dtype == torch.float32 or kernel is not _chunk_losses_:
        return None
    rows = chunks.of_probabilities(len(logits), vocab_size=logits.shape[1])
    return logits.new_empty(rows, logits.shape[1], dtype=torch.float32)


def _chunk_losses_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor,
    wide: torch.Tensor | None,
    *,
    with_gradient: bool,
) -> torch.Tensor:
    """Each row's loss, 0 without a label; `wide` takes the fp32 probabilities, without it fp32 logits do."""
    valid = (targets != IGNORE_INDEX).unsqueeze(1)
    target = targets.clamp(min=0).unsqueeze(1)
    top = logits.amax(dim=1, keepdim=True).float()
    picked = logits.gather(1, target).float() - top
    if wide is None:
        unscaled = logits.sub_(top)
    elif logits.is_cuda:
        unscaled = torch.sub(logits, top, out=wide)
    else:  # a CPU would convert the logits apart, in a temporary as large
        unscaled = wide.copy_(logits).sub_(top)
    unscaled.exp_()  # probabilities, but for their sum
    partition = unscaled.sum(dim=1, keepdim=True)
    if with_gradient:
        share = valid / num_items
        if logits.is_cuda:
            torch.mul(unscaled, share / partition, out=logits)
        else:
            logits.copy_(unscaled.mul_(share / partition))
        # p - 1 of the target in fp32, then rounded: bf16 has no digits left for it near p = 1
        logits.scatter_(1, target, ((picked.exp() / partition - 1) * share).to(logits.dtype))
    return ((partition.log() - picked) * valid).squeeze(1)


def _compiled_chunk_losses_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor,
    wide: torch.Tensor | None,
    *,
    with_gradient: bool,
) -> torch.Tensor:
    """The same as one would write it down, for torch.compile to make two passes over the logits of."""
    valid = (targets != IGNORE_INDEX).unsqueeze(1)
    exact = logits.float()
    top = exact.amax(dim=1, keepdim=True)
    partition = (exact - top).exp().sum(dim=1, keepdim=True)
    of_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    # no gather: torch 2.11's compiler moves it behind copy_, where logits are gradients already
    picked = (torch.where(of_target, exact, 0).sum(dim=1, keepdim=True) - top) * valid
    if with_gradient:
        share = valid / num_items
        logits.copy_(((exact - top).exp() / partition - of_target.float()) * share)
    return ((partition.log() - picked) * valid).squeeze(1)


@functools.cache
def _chunk_kernel(compiled: bool) -> _Chunk:
    return torch.compile(_compiled_chunk_losses_, dynamic=False) if compiled else _chunk_losses_
