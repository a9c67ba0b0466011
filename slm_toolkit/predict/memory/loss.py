"""Bytes of the final norm, logits, loss and their gradients at the instants that may be the peak."""

from dataclasses import dataclass, replace

from slm_toolkit.config.loss_chunks import tokens_of_chunk, tokens_of_probabilities
from slm_toolkit.predict.memory.activations import norm_backward
from slm_toolkit.predict.setup.setup import BF16, FP32, Setup


@dataclass(frozen=True)
class LossMemory:
    """Bytes in use at three instants."""

    forward: float
    backward: float
    norm: float
    freed_logits: float = 0.0
    "bf16 logits that are freed before the loss's backward, and whose block is too small for fp32 logits"


def loss_memory(setup: Setup) -> LossMemory:
    """Return the bytes of the setup's loss, and of the tanh that may cap the logits and saves its output."""
    memory, spec = _loss_memory(setup), setup.spec
    if spec.after_head != "softcap":
        return memory
    of_tanh = spec.vocab_size * setup.num_tokens * (4 if setup.compute == FP32 else 2)
    return replace(memory, forward=memory.forward + of_tanh, backward=memory.backward + of_tanh)


def _loss_memory(setup: Setup) -> LossMemory:
    """Return the bytes of the setup's loss kernel. h: hidden size, V: vocabulary, T: tokens.

    transformers' loss makes an fp32 copy of the logits, their log-softmax and its gradient. A frozen
    norm and head save neither the scaled input nor the norm's output, which lives until forward ends.
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
    norm = norm_backward(h, compute, fused=config.fuses_norm) * T
    if config.fuses_loss:
        chunk = tokens_of_chunk(T, vocab_size=V, hidden_size=h)
        stores_fp32_probabilities = e == 2 and not (config.compiles or config.uses_triton)
        wide = tokens_of_probabilities(chunk, vocab_size=V) * V * stores_fp32_probabilities
        gradients = e * h * T + weight_gradient
        buffers = chunk * V * e + 4 * wide
        return LossMemory((kept + output) * T + gradients + buffers, kept * T + gradients, norm)
    if (own := setup.own_loss) is not None:
        forward, backward = (kept + output) * T + own.forward * V * T, kept * T + own.backward * V * T
        return LossMemory(forward, backward, norm)
    in_forward = (kept + output) * T + (8 if compute == FP32 else 10) * V * T
    backward = kept * T + 12 * V * T
    return LossMemory(in_forward, backward, norm, freed_logits=2 * V * T * (compute != FP32))
