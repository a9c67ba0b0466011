"""Bytes per token that decoder layers save for backward and use during backward.

The formulas come from allocation traces of transformers 5.23's Llama and Qwen2 (`slm_toolkit.train
--rehearse`), one sub-block at a time. `bench/memory_accuracy.py` compares them with other traces.

h: hidden size, q: heads x head_dim, v: key-value heads x head_dim, i: FFN width, a: heads, S: sequence
length, e: bytes of the compute dtype, r: LoRA's rank.

With adapters, a frozen matrix does not save its input, and a frozen norm does not save its scaled input:
neither has a weight gradient. LoRA's A saves its input (after dropout, with the dropout mask). LoRA's B saves
its own input, r numbers per token. Modules before the first adapter save nothing.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from slm_toolkit.config.run_config import fits_float8
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import (
    ATTENTION_INPUTS,
    FFN_INPUTS,
    Adapters,
    adapter_sizes,
    matrices_of,
)
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, FP32, Setup
from slm_toolkit.strategy.strategy import Strategy


@dataclass(frozen=True)
class Moment:
    """An instant of a layer's backward.

    Its bytes per token come on top of the saved activations of the layers below.
    """

    where: str
    num_bytes: float
    stage: int
    "how many items of `gradients_made` exist"


@dataclass(frozen=True)
class LayerMemory:
    """Bytes per token of one decoder layer, without the gradient of the residual stream."""

    saved: float
    "saved from forward to backward"
    moments: tuple[Moment, ...]
    "instants of its backward, recomputation included, in order of time; one of them needs the most memory"
    residual: int
    "bytes per element of the residual stream's gradient"


@dataclass(frozen=True)
class Kernels:
    """The kernels and dtypes of the layers."""

    seq_len: int
    compute: str
    eager: bool
    fused_norm: bool
    "also if compiled: Inductor's norms save what the fused ones do"
    compiled: bool = False
    float8: bool = False
    "torchao's matrix products, where widths fit them"
    keeps_inputs: bool = False
    "ZeRO-3's linear layers save their input even if their weight is frozen"

    @property
    def casts_each_input(self) -> bool:
        """True if autocast makes a bf16 copy for each reader of a tensor; a compiled layer makes one."""
        return self.compute == AUTOCAST and not self.compiled

    @property
    def element(self) -> int:
        """Bytes per element in matrix products."""
        return 4 if self.compute == FP32 else 2

    @property
    def residual(self) -> int:
        """Bytes per element of the residual stream."""
        return 2 if self.compute == BF16 else 4


@lru_cache(maxsize=4096)
def layer_memory(
    spec: ModelSpec,
    kernels: Kernels,
    adapters: Adapters | None = None,
    *,
    checkpointing: str,
    has_input_gradient: bool = True,
) -> LayerMemory:
    """Return the memory of a layer; with adapters, its own weights are frozen.

    `checkpointing` is the mode of this layer: none, full or selective_op. `has_input_gradient` is False for
    the first layer with adapters, unless it is checkpointed. What a compiled layer saves is what
    AOTAutograd's partitioner saves of it (tests/contracts/test_compiled_layers.py; with eager attention it
    saves less). What its backward uses, and that selective_op does not save its last product, fits published
    runs (`bench/published_memory.py`).
    """
    h, e, residual = spec.hidden_size, kernels.element, kernels.residual
    saved = _saved_by_layer(spec, kernels, adapters, has_input_gradient)
    moments = _moments(spec, kernels, adapters, saved)
    end = _end_of_forward(spec, kernels, adapters, saved) if adapters else 0.0
    if checkpointing == "none":
        return LayerMemory(saved.everything, tuple(moments), residual)
    # transformers' bf16 norm copies its input, so the layer's input comes on top of the recomputed tensors
    extra = 2 * h * (kernels.compute == BF16 and not kernels.fused_norm and spec.norms != "after")
    if adapters:  # the gradient of down_proj's output is scaled (and cast) already
        scaled = (2 * e if kernels.compute == AUTOCAST else e) * h * ("down_proj" in adapters)
        moments.append(Moment("mlp", end + extra + scaled, 0))
    kept = float(residual * h)
    if checkpointing == "selective_op":
        outputs, unused = _saved_outputs(spec, e, adapters)
        kept += outputs - unused * (kernels.compiled and not adapters)
        kept += 0 if kernels.eager else e * _widths_in_flash(spec, e)[0] + 4 * spec.num_heads
        extra += unused
    recomputed = (replace(moment, num_bytes=moment.num_bytes + extra) for moment in moments)
    return LayerMemory(kept, tuple(recomputed), residual)


@dataclass(frozen=True)
class _SavedByLayer:
    """Bytes per token that the parts of a layer save, from forward to backward."""

    above: float
    "by the norm in front of attention, for its products' inputs, and by its adapters"
    attention: float
    waiting: float
    "part of `attention`: by the norms of queries and keys"
    second_norm: float
    "by the norm behind attention, and by the norm in front of the FFN"
    norm_behind: float
    "by the norm behind attention, also the one behind the FFN; 0 if there are none"
    ffn_inputs: float
    ffn: float
    product: float
    "for down_proj's input"
    has_scores: bool
    "whether queries, keys or values have gradients"
    has_input_gradient: bool

    @property
    def below_ffn(self) -> float:
        return self.above + self.attention + self.second_norm

    @property
    def before_last_norm(self) -> float:
        return self.below_ffn + self.ffn_inputs + self.ffn + self.product

    @property
    def everything(self) -> float:
        return self.before_last_norm + self.norm_behind


def _saved_by_layer(
    spec: ModelSpec, kernels: Kernels, adapters: Adapters | None, has_input_gradient: bool
) -> _SavedByLayer:
    """Return what a layer saves.

    transformers' norm saves its input and the normalised input in fp32 (in bf16: an fp32 copy of the input,
    and the normalised input in bf16, or in fp32 if its weight multiplies in fp32), and 1/rms in fp32. A fused
    norm saves only its input, in the input's dtype, and 1/rms. A frozen weight needs no normalised input. If
    the layer's input has no gradient, the modules before the first adapter save nothing, as in evaluation.
    """
    h, i, _, q, v, e = _sizes(spec, kernels)
    trained = adapters.targets if adapters else tuple(matrices_of(spec))
    is_compiled_autocast = kernels.compiled and kernels.compute == AUTOCAST
    of_weight = 0 if adapters else 4 if kernels.compute == FP32 or spec.norm_scales_in_fp32 else 2
    of_stream = kernels.residual
    if not kernels.fused_norm:
        of_stream = 4 + max(of_weight, kernels.residual * (not adapters))
    of_product = e if kernels.fused_norm else 4 + of_weight  # other norms read results of matrix products
    norm = (of_stream * h + 4) * (spec.norms != "after")
    behind = (of_product * h + 4) * (spec.norms != "before")
    rows = {"none": (0, 0), "head": (spec.num_heads, spec.num_kv_heads), "all_heads": (1, 1)}[spec.qk_norm]
    reached = tuple(
        has_input_gradient or name in trained or "qkv_proj" in trained for name in ATTENTION_INPUTS[:3]
    )
    waiting = sum(
        (of_product * width + 4 * number) * (number > 0) * is_reached
        for width, number, is_reached in zip((q, v), rows, reached[:2], strict=True)
    )
    below = any(reached) or "o_proj" in trained
    gate, up = (below or name in trained or "gate_up_proj" in trained for name in FFN_INPUTS[:2])
    # gate's gradient needs gate and up; up's gradient needs silu(gate), which a compiled layer recomputes.
    # Without a gate, up and its GELU are saved (an assumption, never traced)
    ffn = 2 * gate * spec.gated_ffn + up
    ffn = e * i * (min(2 * spec.gated_ffn, ffn) if kernels.compiled else ffn)
    attention = _attention(spec, kernels, adapters, reached) + waiting
    if kernels.float8 and kernels.compiled:
        # backward computes the inputs of float8 products again, where it casts them; only attention's output
        # is saved a second time, in float8
        attention += (q - e * h) * fits_float8(h, q, v)
        ffn -= e * (h + i) * fits_float8(h, i)
    # compiled under autocast: the FFN's input is the sum of the layer's and of attention's output in bf16
    second = 2 * h + 4 if is_compiled_autocast and has_input_gradient else norm
    of_ranks = e * adapters.rank if adapters else 0
    return _SavedByLayer(
        above=norm * has_input_gradient
        + _inputs(spec, kernels, adapters, ATTENTION_INPUTS, has_gradient=has_input_gradient)
        + of_ranks * sum(name in trained for name in (*ATTENTION_INPUTS, "o_proj")),
        attention=attention,
        waiting=waiting,
        second_norm=(second + behind) * below,
        norm_behind=behind * (gate or up or "down_proj" in trained),
        ffn_inputs=_inputs(spec, kernels, adapters, FFN_INPUTS, has_gradient=below),
        ffn=ffn + of_ranks * sum(name in trained for name in (*FFN_INPUTS, "down_proj")),
        product=_product(spec, kernels, adapters, has_gradient=gate or up),
        has_scores=any(reached),
        has_input_gradient=has_input_gradient,
    )


def _sizes(spec: ModelSpec, kernels: Kernels) -> tuple[int, int, int, int, int, int]:
    """Return h, i, a, q, v and e, as in this file's docstring."""
    a = spec.num_heads
    q, v = a * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden_size, spec.ffn_size, a, q, v, kernels.element


def _inputs(
    spec: ModelSpec,
    kernels: Kernels,
    adapters: Adapters | None,
    names: tuple[str, ...],
    *,
    has_gradient: bool,
) -> float:
    """Return the bytes per token saved of the matrices' shared input, h wide."""
    trained = adapters.targets if adapters else matrices_of(spec)
    e, h, number = kernels.element, spec.hidden_size, sum(name in trained for name in names)
    shared = e * h * (kernels.keeps_inputs and has_gradient)
    if adapters and adapters.drops:
        return shared + (e + 1) * h * number
    if kernels.casts_each_input:
        return e * h * number
    return shared or e * h * bool(number)


def _product(spec: ModelSpec, kernels: Kernels, adapters: Adapters | None, *, has_gradient: bool) -> float:
    """Return the bytes per token saved of down_proj's input."""
    e, i = kernels.element, spec.ffn_size
    shared = e * i * (kernels.keeps_inputs and has_gradient)
    if adapters and adapters.drops and "down_proj" in adapters:
        return shared + (e + 1) * i
    return e * i if not adapters or "down_proj" in adapters else shared


def _attention(
    spec: ModelSpec, kernels: Kernels, adapters: Adapters | None, reached: tuple[bool, ...]
) -> float:
    """Return the bytes per token that attention saves, without the norms of queries and keys.

    It saves the rotated query and key, the value, the output and the softmax's normaliser. Eager attention
    saves of each product what the gradients need that are computed: repeated keys for the query's, queries
    for the key's, probabilities (heads x S per token, in fp32 and in the compute dtype) for the value's.
    """
    _, _, a, q, v, e = _sizes(spec, kernels)
    kept, seq_len, is_kept = 0.0, kernels.seq_len, any(reached)
    is_padded = _pads(spec, e) and not kernels.eager
    is_copied = spec.fused_projections and not kernels.eager and not is_padded
    if is_kept and kernels.eager:
        query, key, value = reached
        scores = query or key
        of_scores = 4 if kernels.compute == FP32 else 4 * scores + 2 * value
        of_scores += e * spec.attention_softcap * scores  # tanh saves its output
        kept = (query + key + scores) * e * q + of_scores * a * seq_len
    elif is_kept:
        kept = _saved_by_flash(spec, e)
        if spec.sliding_window is not None and spec.sliding_window < seq_len:
            # SDPA saves the mask in the compute dtype; here every layer has an equal part of those masks
            kept += e * seq_len * spec.num_window_layers / spec.num_layers
        kept += e * (q + v) * is_copied  # the value is a view of the whole product
    output = e * q  # the flash kernels save it anyway, if they don't pad it
    for_matrix = output * (kernels.keeps_inputs and (kernels.eager or is_padded) and is_kept)
    if adapters and "o_proj" not in adapters:
        return kept + for_matrix
    if adapters and adapters.drops:
        return kept + for_matrix + output + q
    is_cast = adapters is not None and kernels.compute == AUTOCAST
    # as contiguous as a concatenated query, the output is copied for the output projection
    return kept + output * (kernels.eager or is_padded or not is_kept or is_cast or is_copied)


HEAD_MULTIPLE = 8
"FlashAttention's kernels in 16 bits need heads of such a width: `pad_last_dim` in torch's attention.cpp"


def _pads(spec: ModelSpec, element_bytes: int) -> bool:
    """Return whether SDPA pads the heads on a GPU."""
    return element_bytes == 2 and spec.head_dim % HEAD_MULTIPLE > 0


def _widths_in_flash(spec: ModelSpec, element_bytes: int) -> tuple[int, int]:
    """Return q and v in the attention kernel, which may pad each head."""
    head = spec.head_dim + _pads(spec, element_bytes) * (-spec.head_dim % HEAD_MULTIPLE)
    return spec.num_heads * head, spec.num_kv_heads * head


def _saved_by_flash(spec: ModelSpec, element_bytes: int) -> int:
    """Return query, key, value, output and the normaliser."""
    return 2 * element_bytes * sum(_widths_in_flash(spec, element_bytes)) + 4 * spec.num_heads


def _moments(
    spec: ModelSpec, kernels: Kernels, adapters: Adapters | None, saved: _SavedByLayer
) -> list[Moment]:
    """Return the instants of a layer's backward, without recomputation."""
    h, i, a, q, _, e = _sizes(spec, kernels)
    norm, above = norm_backward(h, kernels.compute, fused=kernels.fused_norm), saved.above
    # the gradients of the product, of silu(gate) and of up, after the product is freed
    moments = [Moment("mlp", saved.before_last_norm + 3 * e * i - saved.product, 1)]
    if saved.norm_behind:  # backward begins with the norm behind the FFN
        moments.append(Moment("post_feedforward_layernorm", saved.before_last_norm + norm, 0))
    if kernels.float8 and not kernels.compiled and fits_float8(h, i):
        # the cast of down_proj's input: two copies in fp32 and the result, beside two of the gradient
        moments.append(Moment("mlp", saved.before_last_norm + e * i + 9 * i + 2 * h, 0))
    if saved.has_scores:
        of_flash, of_eager = (
            4 * e * sum(_widths_in_flash(spec, e)) + 4 * a,
            12 * a * kernels.seq_len + 3 * e * q,
        )
        form = of_eager if kernels.eager else of_flash
        moments.append(Moment("self_attn", above + form + saved.waiting, 2))
    if saved.has_input_gradient:
        moments.append(Moment("input_layernorm", norm, 3))
    return moments


def norm_backward(width: int, compute: str, *, fused: bool) -> int:
    """Return the bytes per token of a norm's backward: transformers' has six fp32 tensors at once."""
    if compute != BF16:
        return 20 * width + 8
    return 16 * width + 8 if fused else 24 * width


def _end_of_forward(spec: ModelSpec, kernels: Kernels, adapters: Adapters, saved: _SavedByLayer) -> float:
    """Return the bytes per token when down_proj's output is ready, and its adapter's input is computed.

    Beside that input lives its copy by dropout, and autocast's temporary fp32 tensors.
    """
    h, i, e, is_lora = spec.hidden_size, spec.ffn_size, kernels.element, "down_proj" in adapters
    beside = (6 + 4 * adapters.drops) * i if kernels.casts_each_input else e * i * adapters.drops
    return saved.before_last_norm + kernels.residual * h + (e * h + beside) * is_lora


def _saved_outputs(spec: ModelSpec, element: int, adapters: Adapters | None) -> tuple[float, float]:
    """Return the bytes per token that selective_op saves (every second matrix product's output).

    The second number is the part of them that backward does not need.
    """
    outputs: list[float] = []
    last_needed = 0
    for name, (_, width) in matrices_of(spec).items():
        outputs.append(element * width)
        if name in ("up_proj", "gate_up_proj"):
            last_needed = len(outputs)
        if adapters and name in adapters:
            outputs += [element * adapters.rank, element * width]
            last_needed = len(outputs) - (name == "down_proj")
    return sum(outputs[::2]), sum(outputs[last_needed + last_needed % 2 :: 2])


def layers_of(setup: Setup) -> list[LayerMemory]:
    """Return the memory of each decoder layer, the first layer first."""
    spec, config, adapters = setup.spec, setup.config, setup.adapters
    kernels = Kernels(
        config.seq_len,
        setup.compute,
        eager=config.attn_implementation == "eager",
        fused_norm=config.fuses_norm or config.compiles,
        compiled=config.compiles,
        float8=config.fp8 != "none",
        keeps_inputs=adapters is not None and keeps_inputs(setup.strategy),
    )
    # selective_layer recomputes every second layer: the second, the fourth, ...
    mode = config.gradient_checkpointing
    modes = ("none", "full") if mode == "selective_layer" else (mode, mode)
    return [
        layer_memory(
            *(spec, kernels, adapters),
            checkpointing=modes[number % 2],
            has_input_gradient=number > 0 or setup.has_input_gradient,
        )
        for number in range(spec.num_layers)
    ]


def keeps_inputs(strategy: Strategy) -> bool:
    """Return whether ZeRO-3 replaces PyTorch's linear layers; the JSON's memory_efficient_linear sets it."""
    return strategy.zero_stage == 3 and strategy.deepspeed.zero_optimization.memory_efficient_linear


@lru_cache(maxsize=4096)
def gradients_made(spec: ModelSpec, adapters: Adapters | None) -> tuple[int, ...]:
    """Return the number of a layer's parameters that have a gradient at each `Moment.stage`."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in matrices_of(spec).items()}
    if adapters:
        sizes = adapter_sizes(spec, adapters)
    everything = sum(sizes.values())
    before_attention = everything - sum(sizes.get(name, 0) for name in ATTENTION_INPUTS)
    return 0, sizes.get("down_proj", 0), before_attention, everything
