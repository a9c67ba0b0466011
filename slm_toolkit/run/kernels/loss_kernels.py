"""Losses that save fewer bytes for backward than transformers' loss, by computing in chunks.

In the byte counts below, N is the tokens of a micro-step, V the vocabulary size and h the hidden size. e is
the bytes of an element in the compute dtype: 2 in bf16, 4 in fp32.
"""

from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from slm_toolkit.config.loss_chunks import tokens_of_chunk, tokens_of_probabilities

IGNORE_INDEX = -100
"the label of a token without loss, same as in transformers"
Arithmetic = Literal["pytorch", "triton", "nothing"]
"""what computes a chunk's losses from its logits: PyTorch's operations, or `loss_triton.py`. nothing: on fake
tensors, in the place of a kernel that allocates nothing"""


class LossHead(torch.nn.Linear):
    """An output head that returns the loss if it has labels. It computes it in chunks of tokens.

    The head's forward computes the loss, because FSDP2 and ZeRO-3 gather the head's weight only for its
    forward. transformers then calls the loss `logits`, and `loss_of_head` returns it.

    Peak memory in forward, in addition to hidden states [N, h] and weight [V, h]: their gradients, N x h x e
    and V x h x e bytes, the only tensors saved for backward; one chunk of logits, `tokens_of_chunk` x
    V x e bytes, which all chunks share; and at most 64 MiB of fp32 probabilities (none in fp32 or by Triton).
    Backward allocates nothing: it scales both gradients in place. Under autocast, hidden states and weight
    are first copied to bf16, as for every matrix product.

    The matrix product itself adds each chunk's gradient of the weight to the sum, in the weight's dtype. So
    the sum is rounded once per chunk. In bf16 the error of 16,384 tokens in one chunk is 0.21 %, in chunks of
    4,096 tokens 0.29 %, of 1,024 0.49 %, of 256 (a CPU's) 0.94 %; all gradients have an error of 1 % in bf16
    anyway. A sum in fp32 would take V x h x 4 bytes more.
    """

    labels: torch.Tensor | None = None
    "labels of the current forward pass"
    last_loss: torch.Tensor | None = None
    "the loss in fp32, before an engine's output cast rounds it"
    num_items: torch.Tensor | None = None
    "divisor of the summed loss; None: the number of tokens with a label"
    arithmetic: Arithmetic = "pytorch"
    "what computes the loss between the matrix products"
    has_chunks_of_cpu: bool = False
    "whether the chunks are as small as a CPU's caches"
    is_plain = False
    "whether PyTorch's own operations compute the loss after all"
    vocab_size: int | None = None
    "tokens, if the columns after them are padding (`run/model/padding.py`), which get the logit -inf"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels, self.labels = self.labels, None
        if labels is None or (self.is_plain and torch.is_grad_enabled()):
            self.last_loss = None
            return super().forward(hidden)
        weight, device_type = self.weight, hidden.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast(device_type, enabled=False):
            targets = _next_tokens(labels).to(hidden.device)
            num_items = _num_valid(targets) if self.num_items is None else self.num_items
            if self.is_plain:
                self.last_loss = _plain_sum(hidden, weight[: self.vocab_size], targets) / num_items
                return self.last_loss
            rest = (targets, num_items, torch.is_grad_enabled())
            loss = _FusedLinearLoss.apply(hidden, weight, self, *rest)
        self.last_loss = loss.detach()
        return loss


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        head: LossHead,
        targets: torch.Tensor,
        num_items: torch.Tensor,
        with_gradient: bool,
    ) -> torch.Tensor:
        sizes = dict(zip(("vocab_size", "hidden_size"), weight.shape, strict=True))
        flat = hidden.flatten(0, -2)
        rows = tokens_of_chunk(len(flat), **sizes, on_cpu=head.has_chunks_of_cpu)
        grad_hidden = torch.empty_like(flat) if with_gradient else None
        # a frozen head needs no gradient
        grad_weight = torch.zeros_like(weight) if with_gradient and ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        buffer = flat.new_empty(rows, len(weight))
        for start in range(0, len(flat), rows):
            chunk, part = flat[start : start + rows], targets[start : start + rows]
            logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
            if head.vocab_size is not None:
                logits[:, head.vocab_size :] = -torch.inf
            total += _sum_of_losses_(
                logits,
                part,
                num_items,
                arithmetic=head.arithmetic,
                with_gradient=with_gradient,
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
        return grad_hidden.mul_(upstream), grad_weight, None, None, None, None


def give_labels_to_head(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook that passes the labels to the head, because transformers' forward does not."""
    model.get_output_embeddings().labels = kwargs.get("labels")


def loss_of_head(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `logits`, which is the loss that LossHead computed; replaces transformers' loss function.

    If plain operations are to compute it, they are logits, and transformers' function gets them.
    """
    if logits.dim() == 0:
        return logits
    return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch)


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the label that each token predicts, as one dimension; a sequence's last token has none."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].reshape(-1)


def _num_valid(targets: torch.Tensor) -> torch.Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def _plain_sum(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the fp32 cross-entropy summed over the tokens with a label, a few tokens at a time."""
    rows = tokens_of_probabilities(len(targets), vocab_size=len(weight))
    total = torch.zeros((), device=hidden.device)
    for part, target in zip(hidden.flatten(0, -2).split(rows), targets.split(rows), strict=True):
        logits = functional.linear(part, weight).float()
        total += functional.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def _sum_of_losses_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_items: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    with_gradient: bool,
) -> torch.Tensor:
    """Return the fp32 cross-entropy summed over valid rows of logits [rows, V].

    Overwrites the logits: `with_gradient`, by the gradient of that sum divided by `num_items`.
    """
    if arithmetic == "nothing":
        return logits.new_empty(len(logits), dtype=torch.float32).sum()
    if arithmetic == "triton":
        from slm_toolkit.run.kernels.loss_triton import triton_chunk_losses_  # needs Triton

        return triton_chunk_losses_(logits, targets, num_items, with_gradient=with_gradient).sum()
    rows = tokens_of_probabilities(len(logits), vocab_size=logits.shape[1])
    total = torch.zeros((), device=logits.device)
    for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
        total += _chunk_losses_(part, target, num_items, with_gradient=with_gradient).sum()
    return total


def _chunk_losses_(
    logits: torch.Tensor, targets: torch.Tensor, num_items: torch.Tensor, *, with_gradient: bool
) -> torch.Tensor:
    """Return each row's loss, 0 without a label. Computes in fp32: a copy, unless logits are fp32."""
    valid = (targets != IGNORE_INDEX).unsqueeze(1)
    target = targets.clamp(min=0).unsqueeze(1)
    wide = logits.float()
    top = wide.amax(dim=1, keepdim=True)
    picked = wide.gather(1, target) - top
    wide.sub_(top).exp_()  # probabilities, not yet divided by their sum
    partition = wide.sum(dim=1, keepdim=True)
    if with_gradient:
        share = valid / num_items
        wide.mul_(share / partition)
        # near p = 1, bf16 has no digits left for the target's p - 1, so it is rounded last
        logits.copy_(wide.scatter_(1, target, (picked.exp() / partition - 1) * share))
    return ((partition.log() - picked) * valid).squeeze(1)
