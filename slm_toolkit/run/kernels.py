"""Loss and RMSNorm kernels that keep less for backward than transformers' own, put in place of those.

In the counts of bytes below, N is the tokens of a micro-step, V the vocabulary, h the hidden size and e the
bytes of an element of the compute dtype: 2 in bf16, 4 in fp32.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

IGNORE_INDEX = -100
"label of a token that has no loss, as transformers has it"
NUM_CHUNK_ELEMENTS = 2**24
"of fp32 probabilities at once: 2^24 x 4 bytes = 64 MiB, large enough to keep a GPU busy, small beside logits"
_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm")


def use_kernels(model: PreTrainedModel, *, loss_kernel: str, norm_kernel: str) -> None:
    """Put the kernels asked for into `model`, in place: names in the state dict stay, tied weights too.

    Raises ValueError where the model's head or norms are not what the kernels compute.
    """
    if loss_kernel == "fused_logits":
        model.loss_function = fused_logits_loss
    elif loss_kernel == "fused_linear":
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(
                f"--loss_kernel fused_linear: the head of {type(model).__name__} is {head}, no plain matrix\n"
                "hint: --loss_kernel fused_logits works with every head"
            )
        head.__class__ = LossHead
        model.register_forward_pre_hook(_give_labels_to_head, with_kwargs=True)
        model.loss_function = _loss_of_head
    if norm_kernel == "fused":
        norms = [module for module in model.modules() if type(module).__name__ in _NORMS]
        if not norms:
            raise ValueError(
                f"--norm_kernel fused: {type(model).__name__} has none of {', '.join(_NORMS)}\n"
                "hint: --norm_kernel hf"
            )
        for module in norms:
            module.__class__ = FusedRMSNorm


def fused_logits_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """transformers' causal LM loss over logits [batch, tokens, V], of which it keeps one copy, not three.

    Peak: the logits, N x V x e bytes, and one chunk of fp32 probabilities, at most 64 MiB whatever N is (none
    in fp32; on a CPU, where torch converts dtypes apart, another as large). Forward saves the logits' own
    storage, which then holds their gradient: who reads the logits of a training step reads that. Backward
    allocates nothing. Without gradients, as in evaluation, the logits stay what they are.
    """
    return _FusedLogitsLoss.apply(logits, _next_tokens(labels).to(logits.device), torch.is_grad_enabled())


class LossHead(torch.nn.Linear):
    """An output head that gives the loss, not logits, where it has labels: logits are never whole.

    It is the head's own forward that does it, because FSDP2 and ZeRO-3 gather the head's weight for that
    alone. transformers then calls the loss `logits`, and `_loss_of_head` hands it on.

    Peak in forward, beside hidden states [N, h] and weight [V, h]: their gradients, N x h x e and V x h x e
    bytes, which are all that is kept for backward; one chunk of logits, `chunk_rows` x V x e, between one and
    two times as large as the hidden states; and of its fp32 probabilities at most 64 MiB, as in
    `fused_logits_loss`. Backward allocates nothing: it scales both gradients in place and hands them on.
    Under autocast, bf16 copies of hidden states and weight come first, as for any matrix product there.

    The gradient of the weight is summed over chunks in the weight's dtype, by the matrix product itself,
    which rounds once per chunk, V / h times at most: in bf16 its error is 0.3 to 0.6 %, where one product's
    is 0.15 %, beside the 1 % that bf16 costs all gradients. An fp32 sum would take V x h x 4 bytes more.
    """

    labels: torch.Tensor | None = None
    "of the forward pass that runs"
    last_loss: torch.Tensor | None = None
    "in fp32, before an engine's output cast rounds it"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels, self.labels = self.labels, None
        if labels is None:
            return super().forward(hidden)
        weight, device_type = self.weight, hidden.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast(device_type, enabled=False):
            targets = _next_tokens(labels).to(hidden.device)
            loss = _FusedLinearLoss.apply(hidden, weight, targets, torch.is_grad_enabled())
        self.last_loss = loss.detach()
        return loss


def chunk_rows(*, num_tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Tokens whose logits are made at once: so many that those take about the hidden states' memory.

    That many chunks are V / h, as in Liger Kernel (arXiv 2410.10989, section 3.2). Rounded up to a power of
    two, for the GPU's tiles: V = 32000, h = 768, N = 16384 give 42 chunks, so 391 rows, so 512.
    """
    num_chunks = -(-vocab_size // hidden_size)
    rows = -(-num_tokens // num_chunks)
    return 1 << (rows - 1).bit_length()


class FusedRMSNorm(torch.nn.Module):
    """transformers' RMSNorm, which keeps its input in its own dtype for backward, and 4 bytes per row.

    transformers' own keeps, per element, an fp32 copy of the input (4 bytes) and the normalised input in its
    dtype: 6 bytes in bf16, 8 in fp32. Here 2 and 4, of the residual stream, which mostly lives anyway.
    On a GPU this is torch's own kernel, which rounds once where transformers rounds twice and needs no fp32
    copies. Elsewhere they exist while it runs: up to 10 bytes per element in forward, 12 in backward.
    """

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype:
            return functional.rms_norm(
                hidden_states, self.weight.shape, self.weight, eps=self.variance_epsilon
            )
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class _FusedLogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, with_gradient: bool) -> torch.Tensor:
        loss = _mean_loss_(logits.view(-1, logits.shape[-1]), targets, with_gradient=with_gradient)
        if with_gradient:
            ctx.save_for_backward(logits)  # by now their gradient
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        return grad_logits.mul_(upstream), None, None


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_gradient: bool
    ) -> torch.Tensor:
        vocab_size, hidden_size = weight.shape
        flat = hidden.reshape(-1, hidden_size)
        rows = chunk_rows(num_tokens=len(flat), vocab_size=vocab_size, hidden_size=hidden_size)
        num_valid = _num_valid(targets)
        grad_hidden = torch.empty_like(flat) if with_gradient else None
        grad_weight = torch.zeros_like(weight) if with_gradient else None
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        for start in range(0, len(flat), rows):
            chunk = flat[start : start + rows]
            logits = chunk @ weight.t()
            total += _sum_of_losses_(
                logits, targets[start : start + rows], num_valid, with_gradient=with_gradient
            )
            if with_gradient:
                torch.mm(logits, weight, out=grad_hidden[start : start + rows])
                grad_weight.addmm_(logits.t(), chunk)
            del logits  # or the next chunk's would lie beside it
        if with_gradient:
            ctx.save_for_backward(grad_hidden.view(hidden.shape), grad_weight)
        return total / num_valid

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(upstream), grad_weight.mul_(upstream), None, None


class _RMSNorm(torch.autograd.Function):
    """Normalised in fp32, rounded to the input's dtype, then times the weight, as transformers does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = hidden.float()
        rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, rstd)
        return weight * (wide * rstd).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """With x̂ = x·rstd and g = upstream·weight: dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ upstream·x̂."""
        hidden, weight, rstd = ctx.saved_tensors
        normed = hidden.float() * rstd
        rows = tuple(range(hidden.dim() - 1))
        grad_weight = (upstream * normed.to(hidden.dtype)).sum(dim=rows).to(weight.dtype)
        wide = (upstream * weight).float()
        projection = (wide * normed).mean(dim=-1, keepdim=True)
        grad_hidden = wide.sub_(normed.mul_(projection)).mul_(rstd)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def _give_labels_to_head(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: labels reach the head beside transformers' forward, which keeps them for itself."""
    model.get_output_embeddings().labels = kwargs.get("labels")


def _loss_of_head(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """transformers' loss function where the head has computed the loss: what it calls logits is that."""
    assert logits.dim() == 0, logits.shape
    return logits


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The label that each token predicts, flat; the last of a sequence predicts none, as in transformers."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].reshape(-1)


def _num_valid(targets: torch.Tensor) -> torch.Tensor:
    return (targets != IGNORE_INDEX).sum()


def _mean_loss_(logits: torch.Tensor, targets: torch.Tensor, *, with_gradient: bool) -> torch.Tensor:
    num_valid = _num_valid(targets)
    return _sum_of_losses_(logits, targets, num_valid, with_gradient=with_gradient) / num_valid


def _sum_of_losses_(
    logits: torch.Tensor, targets: torch.Tensor, num_valid: torch.Tensor, *, with_gradient: bool
) -> torch.Tensor:
    """Cross-entropy in fp32, summed over valid rows of logits [rows, V].

    With `with_gradient`, the logits become the gradient of that sum's share in the mean over `num_valid`.
    """
    rows = max(1, NUM_CHUNK_ELEMENTS // logits.shape[1])
    total = torch.zeros((), device=logits.device, dtype=torch.float32)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        total += _sum_of_chunk_(logits[part], targets[part], num_valid, with_gradient=with_gradient)
    return total


def _sum_of_chunk_(
    logits: torch.Tensor, targets: torch.Tensor, num_valid: torch.Tensor, *, with_gradient: bool
) -> torch.Tensor:
    valid = (targets != IGNORE_INDEX).unsqueeze(1)
    target = targets.clamp(min=0).unsqueeze(1)
    top = logits.amax(dim=1, keepdim=True).float()
    picked = logits.gather(1, target).float() - top
    in_place = with_gradient and logits.dtype == torch.float32
    unscaled = (logits.sub_(top) if in_place else logits - top).exp_()  # probabilities, but for their sum
    partition = unscaled.sum(dim=1, keepdim=True)
    if with_gradient:
        share = valid / num_valid.clamp(min=1)
        torch.mul(unscaled, share / partition, out=logits)
        # p - 1 of the target in fp32, then rounded: bf16 has no digits left for it near p = 1
        logits.scatter_(1, target, ((picked.exp() / partition - 1) * share).to(logits.dtype))
    return ((partition.log() - picked) * valid).sum()
