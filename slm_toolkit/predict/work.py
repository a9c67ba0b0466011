"""Seconds of one micro-step's operations on the device, none of them waiting: a roofline over each.

S: sequence length. Constants that were fitted stand in `software.py`, those counted by hand in `kernels.py`,
`adapter_speed.py` or beside their use.
"""

from dataclasses import dataclass

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import Gpu
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.activations import AUTOCAST, FP32
from slm_toolkit.predict.adapter_speed import NO_ADAPTERS, adapter_work
from slm_toolkit.predict.adapters import Adapters, weights_of
from slm_toolkit.predict.kernels import LOGIT_BYTES, layer_traffic
from slm_toolkit.predict.loss_memory import chunk_rows
from slm_toolkit.predict.matmul import Rates, next_aligned, product_seconds
from slm_toolkit.predict.software import Software

_FLASH_BACKWARD = 2.5  # of forward: five products for two (Dao, arXiv 2307.08691, section 3)
_AUTOCAST_SLOWDOWN = 1.5  # of element-wise kernels over an fp32 residual stream; hand count
_COMPILED_AUTOCAST_SLOWDOWN = 1.2  # with the casts inside other kernels; hand count
_AUTOCAST_CAST_BYTES = 6  # per parameter: each weight to bf16 for forward; as many for a gradient to fp32
_FP32_SHARE = 0.85  # of the fp32 peak; unverified
_SELECTIVE_RECOMPUTED = 0.5
_LAYERS_AGAIN = {"none": 0.0, "full": 1.0, "selective_layer": 0.5, "selective_op": 1.0}
"share of forward's kernels that checkpointing launches again"
_SCORE_KERNELS = 6  # of eager attention beside the one of a fused kernel: two products, scale, mask, softmax
_HEAD_KERNELS = 40  # of embedding, final norm, head and loss, forward and backward


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-step on the device."""

    matmul: float
    attention: float
    memory_traffic: float
    dequantization: float
    recomputation: float
    misaligned: float
    num_kernels: int

    @property
    def total(self) -> float:
        on_weights = self.matmul + self.dequantization
        return on_weights + self.attention + self.memory_traffic + self.recomputation


def micro_step_work(
    spec: ModelSpec,
    adapters: Adapters | None,
    config: RunConfig,
    rates: Rates,
    software: Software,
    compute: str,
    gpu: Gpu,
    loss_kernel: str,
) -> Work:
    tokens = config.per_device_train_batch_size * config.seq_len
    element_bytes = 4 if compute == FP32 else 2
    compiled = config.torch_compile
    if compute == FP32:
        rates = _fp32_rates(rates, gpu)
    is_frozen, beside = adapters is not None, NO_ADAPTERS
    if is_frozen:
        beside = adapter_work(spec, adapters, tokens=tokens, rates=rates, element_bytes=element_bytes)
    products = _products(
        spec, tokens, rates, padded=compiled, element_bytes=element_bytes, is_frozen=is_frozen
    )
    forward, backward, aligned = (spec.num_layers * seconds for seconds in products)
    chunk = tokens
    if loss_kernel == "fused_linear":
        chunk = chunk_rows(num_tokens=tokens, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
    head, ideal_head = (
        tokens
        / chunk
        * sum(
            _forward_and_backward(
                *(rates, is_frozen),
                rows=chunk,
                inputs=spec.hidden_size,
                outputs=width,
                padded=loss_kernel == "compiled",
                element_bytes=element_bytes,
            )
        )
        for width in (spec.vocab_size, next_aligned(spec.vocab_size))
    )
    misaligned = forward + backward + head - aligned - ideal_head
    forward += spec.num_layers * beside.forward_seconds
    backward += spec.num_layers * beside.backward_seconds
    attention_forward, attention_backward = (
        spec.num_layers * seconds for seconds in _attention(spec, config, tokens, rates, software)
    )
    traffic = layer_traffic(
        spec,
        compiled=compiled,
        fused_norm=config.norm_kernel == "fused",
        fused_mlp=config.mlp_kernel == "fused",
    )
    slowdown = software.compiled_slowdown if traffic.is_compiled else software.eager_slowdown
    slowdown *= _slowdown_of(compute, compiled)
    per_token = traffic.bytes_per_token + beside.bytes_per_token
    elementwise = spec.num_layers * slowdown * per_token * tokens / rates.memory_bytes
    logits = tokens * spec.vocab_size * LOGIT_BYTES[loss_kernel] / rates.loss_bytes(loss_kernel)
    weights = weights_of(spec, adapters)
    num_cast = (weights.total + weights.trained) * (compute == AUTOCAST)
    casts = num_cast * _AUTOCAST_CAST_BYTES / rates.memory_bytes

    unpacking = spec.num_layers * beside.unpacking_seconds
    layer_forward = forward + attention_forward + elementwise / 3 + unpacking
    again = {
        "none": 0.0,
        "full": layer_forward,
        "selective_layer": layer_forward / 2,
        # all but attention, and every second product
        "selective_op": _SELECTIVE_RECOMPUTED * (forward + unpacking) + elementwise / 3,
    }[config.gradient_checkpointing]
    of_scores = _SCORE_KERNELS if config.attn_implementation == "eager" and not compiled else 0
    forward_kernels = spec.num_layers * (traffic.num_kernels + beside.num_kernels + of_scores)
    kernels = 3 * forward_kernels + _HEAD_KERNELS
    return Work(
        matmul=forward + backward + head,
        attention=attention_forward + attention_backward,
        memory_traffic=elementwise + logits + casts,
        dequantization=2 * unpacking,  # forward and backward
        recomputation=again,
        misaligned=misaligned,
        num_kernels=kernels + round(_LAYERS_AGAIN[config.gradient_checkpointing] * forward_kernels),
    )


def _slowdown_of(compute: str, compiled: bool) -> float:
    if compute == AUTOCAST:
        return _COMPILED_AUTOCAST_SLOWDOWN if compiled else _AUTOCAST_SLOWDOWN
    return 2.0 if compute == FP32 else 1.0


def _products(
    spec: ModelSpec, tokens: int, rates: Rates, *, padded: bool, element_bytes: int, is_frozen: bool
) -> tuple[float, float, float]:
    """Forward and backward seconds of one layer's matrix products, and both if all widths were aligned."""
    h, f = spec.hidden_size, spec.ffn_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    # GPT's query, key and value are one matrix, Llama's are three
    qkv = ((h, query, 1), (h, key, 2)) if spec.gated_ffn else ((h, query + 2 * key, 1),)
    shapes = (*qkv, (query, h, 1), (h, f, spec.num_ffn_matrices - 1), (f, h, 1))
    forward = backward = aligned = 0.0
    for inputs, outputs, count in shapes:
        size = {"rows": tokens, "element_bytes": element_bytes, "padded": padded}
        of_forward, of_backward = _forward_and_backward(
            rates, is_frozen, inputs=inputs, outputs=outputs, **size
        )
        ideal = {"inputs": next_aligned(inputs), "outputs": next_aligned(outputs)}
        forward += count * of_forward
        backward += count * of_backward
        aligned += count * sum(_forward_and_backward(rates, is_frozen, **ideal, **size))
    return forward, backward, aligned


def _forward_and_backward(
    rates: Rates,
    is_frozen: bool,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    padded: bool,
    element_bytes: int,
) -> tuple[float, float]:
    """A frozen matrix has no gradient, its input has."""
    seconds = product_seconds(
        *(rates,), rows=rows, inputs=inputs, outputs=outputs, padded=padded, element_bytes=element_bytes
    )
    return seconds.forward, seconds.input_gradient if is_frozen else seconds.backward


def _attention(
    spec: ModelSpec, config: RunConfig, tokens: int, rates: Rates, software: Software
) -> tuple[float, float]:
    """Forward and backward seconds of one layer's attention, projections not counted."""
    width = spec.num_heads * spec.head_dim
    if config.attn_implementation != "eager":
        flop = 2.0 * config.seq_len * tokens * width  # half of 4 S T width: causal
        shape = {"head_dim": spec.head_dim, "seq_len": config.seq_len}
        backward = rates.flash_seconds("backward", _FLASH_BACKWARD * flop, **shape)
        return rates.flash_seconds("forward", flop, **shape), backward
    scores = tokens * config.seq_len * spec.num_heads
    per_score = software.compiled_score_bytes if config.torch_compile else software.score_bytes
    moved = scores * per_score / rates.memory_bytes
    products = 4.0 * config.seq_len * tokens * width / rates.matmul_flops  # the whole square
    return moved + products, 2 * (moved + products)


def _fp32_rates(rates: Rates, gpu: Gpu) -> Rates:
    """Without tensor cores alignment matters little."""
    rate = gpu.fp32_flops_per_second * _FP32_SHARE
    return Rates(rate, 1.0, rate / 2, rates.memory_bytes, rates.num_sms)
