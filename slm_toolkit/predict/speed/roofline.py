"""Seconds of one micro-step's operations on the device, none of them waiting: a roofline over each.

h: hidden size, f: FFN width. Forward and backward together, bf16, one layer, of transformers' Llama in
eager PyTorch unless it says otherwise. A kernel reads its inputs and writes its outputs once: 2 bytes each in
bf16, 4 where the code makes fp32 copies.

Counted by hand from peft 0.21's and bitsandbytes 0.50's code, never timed. Bytes are of bf16, forward and
backward together unless it says otherwise; fp32 is for the caller's slowdown to say.

S: sequence length. Constants that were fitted stand in `software.py`, those counted by hand beside their
use.
"""

from dataclasses import dataclass

from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.loss import chunk_rows
from slm_toolkit.predict.setup.adapters import NF4_BLOCK, Adapters, matrices_of
from slm_toolkit.predict.setup.dtypes import AUTOCAST, FP32
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.predict.speed.matmul import Rates, next_aligned, product_seconds
from slm_toolkit.predict.speed.software import Software


@dataclass(frozen=True)
class LayerTraffic:
    """One layer's element-wise work."""

    bytes_per_token: float
    "forward and backward; a third of it in forward"
    num_kernels: int
    "of forward; backward launches twice as many"
    is_compiled: bool


# RMSNorm: to fp32 6, square 8, mean 4, scale 8, to bf16 6, weight 4 = 36 in forward, 54 in backward; two: 180
_TWO_EAGER_RMS_NORMS = 180
_TWO_FUSED_NORMS = 20  # each reads and writes 2 + 2 in forward, 2 + 2 + 2 in backward
_ROPE_AND_RESIDUAL = 188  # rotate, cos, sin, add on query and key: 132; transposed copies: 32; two adds: 24
_EAGER_SWIGLU = 28  # x f: silu 4, product 6; their backward 10 + 8
_RECOMPUTING_SWIGLU = 32  # silu 4, product 6; backward: silu again 4, then products of two: 6 each
_COMPILED_LLAMA = (60, 12)  # x h, x f: a norm, a residual add and RoPE each in one kernel, SwiGLU in one
_GPT = (86, 12)  # x h, x f: two fused LayerNorms 20, two adds 24, copies 32, biases' gradients 10; GELU 12
_COMPILED_GPT = (44, 6)  # the adds go into the norms; GELU and its backward once each
_COMPILED_KERNELS = 12
_EAGER_LLAMA_KERNELS = 48  # two norms 6 each, projections 7, RoPE 12, copies 6, attention, SwiGLU 2, adds 2
_EAGER_GPT_KERNELS = (
    30  # two norms, projections 4 with biases, copies 8, attention, GELU, adds; casts of weights 8
)
_FUSED_NORM_SAVES = 10


def layer_traffic(
    spec: ModelSpec, *, compiled: bool, fused_norm: bool, fused_mlp: bool = False
) -> LayerTraffic:
    """Of one decoder layer; a compiled one has its norms and its MLP fused anyway."""
    h, f = spec.hidden_size, spec.ffn_size
    if compiled:
        of_h, of_f = _COMPILED_LLAMA if spec.gated_ffn else _COMPILED_GPT
        return LayerTraffic(of_h * h + of_f * f, _COMPILED_KERNELS, is_compiled=True)
    if not spec.gated_ffn:
        return LayerTraffic(_GPT[0] * h + _GPT[1] * f, _EAGER_GPT_KERNELS, is_compiled=False)
    norms = _TWO_FUSED_NORMS if fused_norm else _TWO_EAGER_RMS_NORMS
    swiglu = _RECOMPUTING_SWIGLU if fused_mlp else _EAGER_SWIGLU
    return LayerTraffic(
        (norms + _ROPE_AND_RESIDUAL) * h + swiglu * f,
        _EAGER_LLAMA_KERNELS - _FUSED_NORM_SAVES * fused_norm,
        is_compiled=False,
    )


LOGIT_BYTES = {"hf": 60, "fused_logits": 16, "fused_linear": 12, "fused_kernel": 8, "compiled": 30}
"""moved per logit by the loss. hf: forward: fp32 copy 6, shifted copy 8, log-softmax 12; backward: of the
picked one 4, log-softmax 12, shift 12, to bf16 6. fused_logits: read twice, gradient in place. fused_linear:
the same in chunks, of which a part stays in cache. fused_kernel: flash-attn's, bf16 read and written, twice.
compiled: the whole loss by Inductor"""


# LoRA, of a matrix's outputs: scaled 4, added 6; backward: scaled 4. Of its inputs: two gradients added 6.
_LORA_BYTES_OF_OUTPUTS, _LORA_BYTES_OF_INPUTS = 14, 6
_DROPOUT_BYTES = 10  # of the inputs: read 2, written 2, a mask of 1, and the same in backward
_DEFENSIVE_CLONE_BYTES = 4  # of the outputs, where the base is in 4 bits
_IA3_BYTES = (
    16  # of what is scaled: 4; backward: 4, and 8 for the scale's own gradient, made whole and summed
)
_LORA_KERNELS, _IA3_KERNELS = 4, 1  # of forward, a matrix: two products, scale, add; scale
# Per weight: 4 bits read; of its block's scale 8 bits read and 32 written, 32 read and written as the scales'
# mean is added, 32 read; bf16 written. The product reads that, as it reads any weight.
_UNPACKED_BYTES = 0.5 + (1 + 4 + 8 + 4) / NF4_BLOCK + 2
_UNPACKING_KERNELS = 3  # a matrix: the scales, their mean added, the weights


@dataclass(frozen=True)
class AdapterWork:
    """Of one decoder layer."""

    forward_seconds: float
    "of A and B"
    backward_seconds: float
    "of both their gradients"
    bytes_per_token: float
    "of element-wise kernels, forward and backward; a third of it in forward"
    num_kernels: int
    "of forward; backward launches twice as many"
    unpacking_seconds: float
    "of all frozen matrices, each time that a pass goes through the layer"


def adapter_work(
    spec: ModelSpec, adapters: Adapters, *, tokens: int, rates: Rates, element_bytes: int
) -> AdapterWork:
    """LoRA's matrices are thin: what they move, not what they multiply, takes their time."""
    matrices = matrices_of(spec)
    forward = backward = moved = 0.0
    for name in adapters.targets:
        inputs, outputs = matrices[name]
        if not adapters.rank:
            moved += _IA3_BYTES * (inputs if name == "down_proj" else outputs)
            continue
        for width, height in ((inputs, adapters.rank), (adapters.rank, outputs)):
            seconds = product_seconds(
                *(rates,),
                rows=tokens,
                inputs=width,
                outputs=height,
                padded=False,
                element_bytes=element_bytes,
            )
            forward += seconds.forward
            backward += seconds.backward
        moved += _LORA_BYTES_OF_OUTPUTS * outputs + _LORA_BYTES_OF_INPUTS * inputs
        moved += _DROPOUT_BYTES * inputs * adapters.drops
        moved += _DEFENSIVE_CLONE_BYTES * outputs * adapters.is_quantized
    kernels = (_LORA_KERNELS + adapters.drops if adapters.rank else _IA3_KERNELS) * len(adapters.targets)
    unpacking = 0.0
    if adapters.is_quantized:
        size = sum(inputs * outputs for inputs, outputs in matrices.values())
        unpacking = _UNPACKED_BYTES * size / rates.memory_bytes
        kernels += _UNPACKING_KERNELS * len(matrices)
    return AdapterWork(forward, backward, moved, kernels, unpacking)


NO_ADAPTERS = AdapterWork(0.0, 0.0, 0.0, 0, 0.0)


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


def micro_step_work(setup: Setup, rates: Rates, software: Software, loss_kernel: str) -> Work:
    """Forward and backward of one micro-step; `loss_kernel`: a key of LOGIT_BYTES."""
    spec, config, adapters, compute = setup.spec, setup.config, setup.adapters, setup.compute
    tokens, compiled = setup.num_tokens, config.torch_compile
    element_bytes = 4 if compute == FP32 else 2
    if compute == FP32:
        rates = _fp32_rates(rates, setup.gpu)
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
        spec.num_layers * seconds for seconds in _attention(setup, rates, software)
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
    num_cast = (setup.weights.total + setup.weights.trained) * (compute == AUTOCAST)
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


def _attention(setup: Setup, rates: Rates, software: Software) -> tuple[float, float]:
    """Forward and backward seconds of one layer's attention, projections not counted."""
    spec, config, tokens = setup.spec, setup.config, setup.num_tokens
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
