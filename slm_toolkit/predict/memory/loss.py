"""Bytes of the final norm, logits, loss and their gradients at the instants that may be the peak."""

from dataclasses import dataclass, replace

from slm_toolkit.config.loss_chunks import tokens_of_chunk, tokens_of_probabilities
from slm_toolkit.predict.memory.activations import keeps_inputs, norm_backward
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, FP32, Setup


@dataclass(frozen=True)
class LossMemory:
    """Bytes saved by the final norm, and bytes in use at four instants."""

    final_norm: float
    forward: float
    backward: float
    head: float
    norm: float
    freed_logits: float = 0.0
    "bf16 logits that are freed before the loss's backward, and whose block is too small for fp32 logits"


def loss_memory(setup: Setup) -> LossMemory:
    """Return the bytes of the setup's loss, and of what the model does with the head's logits before it.

    While the logits are scaled or capped, they exist twice, and so do their gradients. tanh saves its output.
    """
    memory, spec = _loss_memory(setup), setup.spec
    if spec.after_head == "nothing":
        return memory
    of_logits = spec.vocab_size * setup.num_tokens * (4 if setup.compute == FP32 else 2)
    of_tanh = of_logits * (spec.after_head == "softcap")
    twice = memory.final_norm + 2 * of_logits
    return replace(
        memory,
        forward=max(memory.forward + of_tanh, twice),
        backward=max(memory.backward, twice) + of_tanh,
    )


def _loss_memory(setup: Setup) -> LossMemory:
    """Return the bytes of the setup's loss kernel. h: hidden size, V: vocabulary, T: tokens.

    transformers' loss makes an fp32 copy of the logits, their log-softmax and its gradient. A frozen
    norm and head save neither the scaled input nor the norm's output, which lives until forward ends;
    ZeRO-3's linear layers save that output (see `activations.Kernels`).
    """
    config, compute, is_frozen = setup.config, setup.compute, setup.weights.is_frozen
    h, V, T = setup.spec.hidden_size, setup.spec.vocab_size, setup.num_tokens
    e, stream = 4 if compute == FP32 else 2, 2 if compute == BF16 else 4
    # saved by the final norm; it saves its input, the normalised input, and its output
    kept = stream if config.fuses_norm else 4
    weight_gradient, output = 0, stream * h
    if not is_frozen:
        normalised = max(stream, 4 if setup.spec.norm_scales_in_fp32 else 2)
        kept += e + normalised * (not config.fuses_norm)
        weight_gradient, output = V * h * e, 0
    kept = kept * h + 4
    if is_frozen and keeps_inputs(setup.strategy) and not config.fuses_loss:
        kept, output = kept + output, 0
    norm = norm_backward(h, compute, fused=config.fuses_norm)
    if config.fuses_loss:
        chunk = tokens_of_chunk(T, vocab_size=V, hidden_size=h)
        stores_fp32_probabilities = e == 2 and not config.uses_triton
        wide = tokens_of_probabilities(chunk, vocab_size=V) * V * stores_fp32_probabilities
        gradients = e * h * T + weight_gradient
        # under autocast the norm's output in fp32 lives beside its bf16 copy
        cast = (2 if is_frozen else 4) * h * (compute == AUTOCAST)
        buffers = chunk * V * e + 4 * wide
        in_forward = (kept + output + cast) * T + gradients + buffers
        after = kept * T + gradients
        return LossMemory(kept * T, in_forward, after, after, norm * T)
    if (own := setup.own_loss) is not None:
        forward, backward = (kept + output) * T + own.forward * V * T, kept * T + own.backward * V * T
        return LossMemory(kept * T, forward, backward, kept * T + e * (V + h) * T, norm * T)
    in_forward = (kept + output) * T + (8 if compute == FP32 else 10) * V * T
    backward = kept * T + 12 * V * T
    head = kept * T + e * V * T + e * h * T
    freed_logits = 2 * V * T * (compute != FP32)
    return LossMemory(kept * T, in_forward, backward, head, norm * T, freed_logits)
