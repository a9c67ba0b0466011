"""Bytes per token that decoder layers save for backward and use during backward.

The formulas come from allocation traces of transformers 5.23's Llama and Qwen2 (`slm_toolkit.train
--rehearse`), one sub-block at a time. `bench/memory_accuracy.py` compares them with other traces.

h: hidden size, q: heads x head_dim, v: key-value heads x head_dim, i: FFN width, a: heads, S: sequence
length, e: bytes of the compute dtype, r: LoRA's rank.

With adapters, a frozen matrix does not save its input, and a frozen norm does not save its scaled input:
neither has a weight gradient. LoRA's A saves its input (after dropout, with the dropout mask). LoRA's B saves
its own input, r numbers per token. Modules before the first adapter save nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

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
    ffn_grads: int
    "how many of the three FFN matrices have their gradient already"
    kv_grads: int
    "how many of the key and value matrices"
    query_grads: int
    "how many of the query and output matrices"
    makes_gradient: bool = False
    "True if a weight's gradient has just been computed and is not yet added to others"


@dataclass(frozen=True)
class LayerMemory:
    """Bytes per token of one decoder layer, without the gradient of the residual stream."""

    saved: float
    "saved from forward to backward"
    moments: tuple[Moment, ...]
    "instants of its backward, recomputation included, in order of time; one of them needs the most memory"
    residual: int
    "bytes per element of the residual stream's gradient"


@lru_cache(maxsize=4096)
def layer_memory(
    spec: ModelSpec,
    *,
    seq_len: int,
    compute: str,
    eager: bool,
    fused_norm: bool,
    checkpointing: str,
    compiled: bool,
    float8: bool = False,
) -> LayerMemory:
    """Return the memory of a layer whose weights are all trained.

    `checkpointing` is the mode of this layer: none, full or selective_op. What a compiled layer saves is what
    AOTAutograd's partitioner saves of it (tests/contracts/test_compiled_layers.py; with eager attention it
    saves less): norms save the same tensors as fused norms, and SiLU is recomputed. What its backward uses,
    and that selective_op does not save its last product, fits published runs
    (`bench/published_memory.py`).
    """
    fused = fused_norm or compiled
    kernels = _LayerKernels(seq_len, compute, eager, fused, compiled, float8)
    saved = _saved_by_layer(spec, kernels)
    moments = _moments(spec, kernels, saved)
    h, residual = spec.hidden_size, 2 if compute == BF16 else 4
    if spec.norms != "before":  # backward begins with the norm behind the FFN
        in_norm = saved.everything - saved.norm_behind + _norm_backward(spec, kernels)
        moments.insert(0, Moment("post_feedforward_layernorm", in_norm, 0, 0, 0))
    if checkpointing == "none":
        return LayerMemory(saved.everything, tuple(moments), residual)
    # transformers' bf16 norm copies its input, so the layer's input comes on top of the recomputed tensors
    extra = 2 * h if compute == BF16 and not kernels.fused_norm else 0
    if spec.norms == "after":  # the matrix products save the input itself, or copies under autocast
        extra = 4 * h if compute == AUTOCAST else 0
    kept = residual * h
    if checkpointing == "selective_op":
        kept += _outputs_kept(spec, kernels)
        if not spec.fused_projections:  # backward does not need down's output, but it stays allocated
            extra += kernels.element_bytes * h
    recomputed = (replace(moment, num_bytes=moment.num_bytes + extra) for moment in moments)
    return LayerMemory(kept, tuple(recomputed), residual)


@dataclass(frozen=True)
class _LayerKernels:
    """The kernels and dtypes of one layer."""

    seq_len: int
    compute: str
    eager: bool
    fused_norm: bool
    "also if compiled"
    compiled: bool
    float8: bool
    "torchao's matrix products, where widths fit them"

    @property
    def element_bytes(self) -> int:
        return 4 if self.compute == FP32 else 2


@dataclass(frozen=True)
class _SavedByLayer:
    """Bytes per token that the parts of a layer save, from forward to backward."""

    norm: float
    "the norm in front of attention, and also the one in front of the FFN"
    norm_behind: float
    "the norm behind attention, and also the one behind the FFN; 0 if there are none"
    norms_of_queries: float
    "part of `attention`"
    attention_inputs: float
    attention: float
    ffn_inputs: float
    ffn: float

    @property
    def below_ffn(self) -> float:
        return 2 * self.norm + self.norm_behind + self.attention + self.attention_inputs

    @property
    def everything(self) -> float:
        return self.below_ffn + self.ffn_inputs + self.ffn + self.norm_behind


def _sizes(spec: ModelSpec, kernels: _LayerKernels) -> tuple[int, int, int, int, int, int]:
    """Return h, i, a, q, v and e, as in this file's docstring."""
    a = spec.num_heads
    q, v = a * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden_size, spec.ffn_size, a, q, v, kernels.element_bytes


def _saved_by_layer(spec: ModelSpec, kernels: _LayerKernels) -> _SavedByLayer:
    h, i, _, q, v, e = _sizes(spec, kernels)
    norms = saved_by_norms(spec, kernels.compute, fused=kernels.fused_norm)
    # Under autocast, each matrix product saves a bf16 copy of its input: three products in attention and two
    # in the FFN, or one each.
    copies = (0, 0) if kernels.compute != AUTOCAST else (1, 1) if spec.fused_projections else (3, 2)
    norm, attention_inputs, ffn_inputs = norms.before, 2 * h * copies[0], 2 * h * copies[1]
    if kernels.compute == AUTOCAST and kernels.compiled:
        # in fp32 only the layer's input; the FFN's is the sum of that and of attention's output in bf16. One
        # bf16 copy of each norm's output: (4 + 2) h for two norms, and 2 h twice
        norm, attention_inputs, ffn_inputs = 3 * h + 4, 2 * h, 2 * h
    # The FFN saves gate, silu(gate) (recomputed if compiled), up, and their product. Without a gate it
    # saves up and its GELU (an assumption, never traced).
    ffn = ((4 if spec.gated_ffn else 2) - kernels.compiled) * e * i
    attention = _saved_by_attention(spec, kernels) + norms.of_queries
    if kernels.float8 and kernels.compiled:
        # backward computes the inputs of float8 products again, where it casts them; only attention's output
        # is saved a second time, in float8
        if fits_float8(h, q, v):
            attention += q - e * h
        if fits_float8(h, i):
            ffn -= e * (h + i)
    return _SavedByLayer(norm, norms.after, norms.of_queries, attention_inputs, attention, ffn_inputs, ffn)


def _saved_by_attention(spec: ModelSpec, kernels: _LayerKernels) -> float:
    """Return what attention saves, without the norms of queries and keys.

    It saves the rotated query and key, the value, the output and the softmax's normaliser. Instead of the
    normaliser, eager attention saves the probabilities, (heads x S) per token, in fp32 and in the compute
    dtype, and it saves the repeated keys and values.
    """
    _, _, a, q, v, e = _sizes(spec, kernels)
    seq_len = kernels.seq_len
    scores = (4 if kernels.compute == FP32 else 6) * a * seq_len
    if spec.attention_softcap:  # tanh saves its output
        scores += e * a * seq_len
    attention = 4 * e * q + scores if kernels.eager else _saved_by_flash(spec, e)
    if not kernels.eager and spec.sliding_window is not None and spec.sliding_window < seq_len:
        # SDPA saves the mask in the compute dtype; here every layer has an equal part of those masks
        attention += e * seq_len * spec.num_window_layers / spec.num_layers
    if spec.fused_projections and not kernels.eager and not _pads(spec, e):
        # the value is a view of the whole product, and attention's output, as contiguous as the concatenated
        # query, is copied for the output projection
        attention += e * (q + v) + e * q
    return attention


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
    """Return query, key, value, output and the normaliser. Of a padded output, o_proj's input is a copy."""
    q, v = _widths_in_flash(spec, element_bytes)
    copied = spec.num_heads * spec.head_dim * _pads(spec, element_bytes)
    return element_bytes * (2 * (q + v) + copied) + 4 * spec.num_heads


def _norm_backward(spec: ModelSpec, kernels: _LayerKernels) -> int:
    """Return what a norm's backward uses: transformers' RMSNorm has six fp32 tensors at once."""
    h = spec.hidden_size
    if kernels.compute != BF16:
        return 20 * h + (8 if kernels.fused_norm else 4)
    return 16 * h + 8 if kernels.fused_norm else 24 * h


def _moments(spec: ModelSpec, kernels: _LayerKernels, saved: _SavedByLayer) -> list[Moment]:
    """Return the instants of a layer's backward, without recomputation and without a norm behind the FFN."""
    h, i, a, q, v, e = _sizes(spec, kernels)
    below_ffn, ffn_inputs, seq_len = saved.below_ffn, saved.ffn_inputs, kernels.seq_len
    norm_backward, norm = _norm_backward(spec, kernels), 0 if spec.norms == "after" else saved.norm
    if kernels.eager:
        of_tanh = e * a * seq_len * spec.attention_softcap
        waiting = of_tanh + saved.norms_of_queries
        softmax = (12 * a * seq_len + 3 * e * q + waiting, 8 * a * seq_len + 5 * e * q + waiting)
    else:
        in_kernel = 4 * e * sum(_widths_in_flash(spec, e)) + 4 * a
        softmax = (in_kernel + saved.norms_of_queries,)
        if kernels.compute == AUTOCAST:  # RoPE's backward is in fp32
            softmax += (12 * q + 4 * v,)
    at_product = 2 * e * i  # the product's gradient and that of one factor
    projections = e * (3 * h + q) if kernels.compute != AUTOCAST else 8 * h + 2 * q
    above = saved.norm + saved.attention_inputs  # saved by the first norm
    at_second_norm = norm + saved.norm_behind + saved.attention_inputs + saved.attention + norm_backward
    # an eager cast of down_proj's input: two copies in fp32 and the result, beside two casts of the gradient
    in_cast = e * i + 9 * i + 2 * h
    casts = kernels.float8 and not kernels.compiled and fits_float8(h, i)
    return [
        *([Moment("mlp", below_ffn + ffn_inputs + saved.ffn + in_cast, 0, 0, 0)] if casts else []),
        Moment("mlp", below_ffn + ffn_inputs + saved.ffn + at_product, 1, 0, 0),
        Moment("mlp", below_ffn + ffn_inputs + e * (h + 3 * i), 2, 0, 0, makes_gradient=True),
        Moment("mlp", below_ffn + ffn_inputs * 2 + e * (2 * h + i), 3, 0, 0, makes_gradient=True),
        Moment("post_attention_layernorm", at_second_norm, 3, 0, 0),
        *(Moment("self_attn", above + form, 3, 0, 1) for form in softmax),
        Moment("self_attn", above + projections, 3, 2, 1, makes_gradient=True),
        Moment("input_layernorm", norm_backward, 3, 2, 2),
    ]


def _outputs_kept(spec: ModelSpec, kernels: _LayerKernels) -> float:
    """Return the outputs that selective_op saves: of query, value, gate, down and attention."""
    h, i, a, q, v, e = _sizes(spec, kernels)
    kept_by_attention = 0 if kernels.eager else e * _widths_in_flash(spec, e)[0] + 4 * a
    if spec.fused_projections:
        return e * (q + 2 * v + 2 * i) + kept_by_attention
    return e * (q + v + i + (0 if kernels.compiled else h)) + kept_by_attention


@dataclass(frozen=True)
class SavedByNorms:
    """Bytes per token that a layer's norms save."""

    before: float
    "the norm in front of attention, and also the one in front of the FFN, with the input of the next product"
    after: float
    "the norm behind attention, and also the one behind the FFN; 0 if there are none"
    of_queries: float
    "the norms of queries and keys"


def saved_by_norms(spec: ModelSpec, compute: str, *, fused: bool) -> SavedByNorms:
    """Return what the norms of a layer save for backward.

    transformers' norm saves its input and the normalised input in fp32 (in bf16: an fp32 copy of the input,
    and the normalised input in bf16, or in fp32 if its weight multiplies in fp32), and 1/rms in fp32. The
    next matrix product saves the output; under autocast it saves copies instead. A fused norm saves only its
    input, in the input's dtype, and 1/rms. Without a norm in front, the matrix product saves the residual
    stream.
    """
    h, e = spec.hidden_size, 4 if compute == FP32 else 2
    q, v = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    normalised = 2 if compute == BF16 and not spec.norm_scales_in_fp32 else 4
    output = 0 if compute == AUTOCAST else e
    of_stream = 2 if compute == BF16 else 4  # the residual stream's element
    before = ((of_stream if fused else 4 + normalised) + output) * h + 4
    if spec.norms == "after":
        before = output * h
    # the inputs of these norms are results of matrix products
    normalised = 4 if compute == FP32 or spec.norm_scales_in_fp32 else 2
    per_element = e if fused else 4 + normalised
    after = per_element * h + 4 if spec.norms != "before" else 0
    rows = {"none": 0, "head": spec.num_heads + spec.num_kv_heads, "all_heads": 2}[spec.qk_norm]
    return SavedByNorms(before, after, (per_element * (q + v) + 4 * rows) * (rows > 0))


@dataclass(frozen=True)
class Kernels:
    """The kernels and dtypes of the layers."""

    seq_len: int
    compute: str
    eager: bool
    fused_norm: bool
    keeps_inputs: bool
    "ZeRO-3's linear layers save their input even if their weight is frozen"
    compiled: bool = False
    "Inductor's norms and MLP save what the fused ones do"

    @property
    def casts_each_input(self) -> bool:
        """True if autocast makes a bf16 copy for each reader of a tensor; a compiled layer makes one."""
        return self.compute == AUTOCAST and not self.compiled

    @property
    def element(self) -> int:
        """Bytes per element in matrix products."""
        return 4 if self.compute == FP32 else 2


@dataclass(frozen=True)
class _Widths:
    h: int
    i: int
    a: int
    q: int
    v: int


@dataclass(frozen=True)
class _FrozenNorms:
    """Bytes per token that norms with frozen weights save: their input in fp32 (fused: as it is), and 1/rms.

    A frozen weight needs no normalised input.
    """

    before: float
    behind: float
    "0 if there is none behind attention and FFN"
    of_queries: float
    of_keys: float


def _frozen_norms(spec: ModelSpec, w: _Widths, kernels: "Kernels") -> _FrozenNorms:
    in_front = (2 if kernels.compute == BF16 and kernels.fused_norm else 4) * w.h + 4
    rows = {"none": (0, 0), "head": (spec.num_heads, spec.num_kv_heads), "all_heads": (1, 1)}[spec.qk_norm]
    of_product = kernels.element if kernels.fused_norm else 4  # these norms read results of matrix products
    of_queries, of_keys = (
        (of_product * width + 4 * number) * (number > 0)
        for width, number in zip((w.q, w.v), rows, strict=True)
    )
    return _FrozenNorms(
        before=0 if spec.norms == "after" else in_front,
        behind=0 if spec.norms == "before" else of_product * w.h + 4,
        of_queries=of_queries,
        of_keys=of_keys,
    )


@lru_cache(maxsize=4096)
def frozen_layer_memory(
    spec: ModelSpec, adapters: Adapters, kernels: Kernels, *, checkpointing: str, has_input_gradient: bool
) -> LayerMemory:
    """Return the memory of a layer with frozen weights and trained adapters.

    `checkpointing` is the mode of this layer. `has_input_gradient` is False for the first layer, unless
    it is checkpointed.
    """
    w = _Widths(
        *(spec.hidden_size, spec.ffn_size, spec.num_heads, spec.num_heads * spec.head_dim),
        spec.num_kv_heads * spec.head_dim,
    )
    e, compute = kernels.element, kernels.compute
    residual = 2 if compute == BF16 else 4
    norms = _frozen_norms(spec, w, kernels)
    # If the input has no gradient, the modules before the first adapter save nothing, as in evaluation.
    first_norm = norms.before * has_input_gradient
    first_inputs = _inputs(spec, adapters, ATTENTION_INPUTS, kernels, has_gradient=has_input_gradient)
    reached = _Reached(
        *(has_input_gradient or name in adapters or "qkv_proj" in adapters for name in _ATTENTION[:3])
    )
    of_scores = any(reached)
    of_queries = norms.of_queries * reached.query + norms.of_keys * reached.key
    attention = _attention(spec, w, adapters, kernels, reached) + of_queries
    below = of_scores or "o_proj" in adapters
    # a compiled layer whose fp32 input is saved adds attention's bf16 output again; see `layer_memory`
    adds_again = kernels.compiled and compute == AUTOCAST and has_input_gradient
    behind_attention = norms.behind * below
    second_norm = (2 * w.h + 4 if adds_again else norms.before) * below
    second_inputs = _inputs(spec, adapters, FFN_INPUTS, kernels, has_gradient=below)
    gate, up = (below or name in adapters or "gate_up_proj" in adapters for name in FFN_INPUTS[:2])
    # gate's gradient needs gate and up; up's gradient needs silu(gate), which a compiled layer recomputes
    ffn = (2 * (gate or up) if kernels.compiled else 2 * gate + up) * e * w.i
    product = _product(w, adapters, kernels, has_gradient=gate or up)
    ranks = e * adapters.rank
    of_attention = ranks * sum(name in adapters for name in (*ATTENTION_INPUTS, "o_proj"))
    of_ffn = ranks * sum(name in adapters for name in (*FFN_INPUTS, "down_proj"))
    above = first_norm + first_inputs + of_attention
    at_second = above + attention + behind_attention
    kept = float(at_second + second_norm + second_inputs + ffn + product + of_ffn)
    behind_ffn = norms.behind * (gate or up or "down_proj" in adapters)

    # the gradients of the product, of silu(gate) and of up, after the product is freed
    of_product = 3 * e * w.i - product
    moments = [Moment("mlp", kept + of_product, 1, 0, 0)]
    ln = 16 * w.h + 8 if kernels.fused_norm else 24 * w.h
    if compute != BF16:
        ln = 20 * w.h + (8 if kernels.fused_norm else 4)
    if below:
        moments.append(Moment("post_attention_layernorm", at_second + ln, 3, 0, 0))
        of_output = (3 if "o_proj" in adapters else 1) * e * w.q
        moments.append(Moment("self_attn", above + attention + of_output, 3, 0, 1))
    if of_scores:
        waiting = of_queries + e * w.a * kernels.seq_len * (spec.attention_softcap and kernels.eager)
        forms = _softmax(spec, w, kernels)
        moments += [Moment("self_attn", above + form + waiting, 3, 0, 1) for form in forms]
    if has_input_gradient:
        moments.append(Moment("input_layernorm", ln, 3, 2, 2))
    if behind_ffn:
        moments.insert(0, Moment("post_feedforward_layernorm", kept + ln, 0, 0, 0))
    # The end of forward: down_proj's output is ready, and its adapter's input is being computed.
    is_lora = "down_proj" in adapters
    last = kept + e * w.h * is_lora + _beside_input(w, adapters, kernels) * is_lora
    if compute == AUTOCAST:
        last += 4 * w.h
    else:
        last += e * w.h * (adapters.drops or not second_inputs)
    if spec.norms == "after":  # no norm saves the residual stream, and the FFN's result is still to be added
        last += residual * w.h
    everything = kept + behind_ffn
    if checkpointing == "none":
        moments.insert(0, Moment("mlp", last - residual * w.h, 0, 0, 0))  # no residual gradient exists yet
        return LayerMemory(everything, tuple(moments), residual)
    # transformers' bf16 norm copies its input, and this copy comes on top of the recomputed tensors
    copied = 2 * w.h if compute == BF16 and not kernels.fused_norm and spec.norms != "after" else 0
    saved, extra = float(residual * w.h), copied
    if checkpointing == "selective_op":
        results, unused = _saved_results(spec, e, adapters)
        saved += results + (0 if kernels.eager else e * _widths_in_flash(spec, e)[0] + 4 * w.a)
        extra += unused
    # during recomputation, the gradient of the output is scaled (and cast) already
    last += copied + (2 * e if compute == AUTOCAST else e) * w.h * is_lora
    moments.insert(0, Moment("mlp", last, 0, 0, 0))
    recomputed = (replace(m, num_bytes=m.num_bytes + extra) for m in moments)
    return LayerMemory(saved, tuple(recomputed), residual)


def _inputs(
    spec: ModelSpec, adapters: Adapters, names: tuple[str, ...], kernels: Kernels, *, has_gradient: bool
) -> float:
    """Return the bytes per token saved of the matrices' shared input, h wide."""
    e, h, adapted = kernels.element, spec.hidden_size, [name for name in names if name in adapters]
    shared = e * h * (kernels.keeps_inputs and has_gradient)
    if adapters.drops:
        return shared + (e + 1) * h * len(adapted)
    if kernels.casts_each_input:
        return e * h * len(adapted)
    return shared or e * h * bool(adapted)


def _masks_of_a_layer(spec: ModelSpec, adapters: Adapters) -> float:
    """Return the masks that SDPA saves, as a mean over the layers whose attention saves anything.

    The first layer's attention saves nothing unless it has adapters. Gemma's first layer has a window.
    """
    if any(name in adapters for name in ATTENTION_INPUTS):
        return spec.num_window_layers / spec.num_layers
    first = spec.num_window_layers == spec.num_layers or spec.model_type.startswith("gemma")
    return (spec.num_window_layers - first) / max(1, spec.num_layers - 1)


class _Reached(NamedTuple):
    """Whether the query, key and value have gradients."""

    query: bool
    key: bool
    value: bool


def _attention(spec: ModelSpec, w: _Widths, adapters: Adapters, kernels: Kernels, reached: _Reached) -> float:
    """Return the bytes per token that attention saves: the terms of `layer_memory`, and o_proj's input.

    Eager attention saves of each product only what the gradients need that are computed: keys for the
    query's, queries for the key's, probabilities for the value's.
    """
    e, kept, seq_len, is_kept = kernels.element, 0.0, kernels.seq_len, any(reached)
    is_padded = _pads(spec, e) and not kernels.eager
    if is_kept and kernels.eager:
        scores = reached.query or reached.key
        of_scores = 4 if kernels.compute == FP32 else 4 * scores + 2 * reached.value
        of_scores += e * spec.attention_softcap * scores
        kept = (reached.query + reached.key + scores) * e * w.q + of_scores * w.a * seq_len
    elif is_kept:
        kept = _saved_by_flash(spec, e) - e * w.q * is_padded
        if spec.sliding_window is not None and spec.sliding_window < seq_len:
            kept += e * seq_len * _masks_of_a_layer(spec, adapters)
        if spec.fused_projections and not is_padded:  # see `_saved_by_attention`
            kept += e * (w.q + w.v)
    output = e * w.q  # the flash kernels save it anyway, if they don't pad it
    needs_output = kernels.eager or is_padded or not is_kept
    for_matrix = output * (kernels.keeps_inputs and (kernels.eager or is_padded) and is_kept)
    if "o_proj" not in adapters:
        return kept + for_matrix
    if adapters.drops:
        return kept + for_matrix + output + w.q
    return kept + output * (needs_output or kernels.compute == AUTOCAST)


def _product(w: _Widths, adapters: Adapters, kernels: Kernels, *, has_gradient: bool) -> float:
    """Return the bytes per token saved of down_proj's input."""
    e = kernels.element
    shared = e * w.i * (kernels.keeps_inputs and has_gradient)
    if "down_proj" not in adapters:
        return shared
    if adapters.drops:
        return shared + (e + 1) * w.i
    return e * w.i


def _beside_input(w: _Widths, adapters: Adapters, kernels: Kernels) -> float:
    """Return the extra bytes per token at the input of down_proj's adapter.

    They are the input itself if dropout makes a copy of it, and autocast's temporary fp32 tensors.
    """
    if kernels.casts_each_input:
        return (6 + 4 * adapters.drops) * w.i
    return kernels.element * w.i * adapters.drops


def _softmax(spec: ModelSpec, w: _Widths, kernels: Kernels) -> tuple[float, ...]:
    """Return the bytes per token around the gradients of scores and probabilities, as in `layer_memory`."""
    e = kernels.element
    if kernels.eager:
        of_scores = w.a * kernels.seq_len
        return 12 * of_scores + 3 * e * w.q, 8 * of_scores + 5 * e * w.q
    form = (4.0 * e * sum(_widths_in_flash(spec, e)) + 4 * w.a,)
    return (*form, 12.0 * w.q + 4 * w.v) if kernels.compute == AUTOCAST else form


def _saved_results(spec: ModelSpec, element: int, adapters: Adapters) -> tuple[float, float]:
    """Return the bytes per token that selective_op saves (every second matrix product's output).

    The second number is the part of them that backward does not need.
    """
    results: list[float] = []
    last_needed = 0
    for name, (_, outputs) in matrices_of(spec).items():
        results.append(element * outputs)
        if name in ("up_proj", "gate_up_proj"):
            last_needed = len(results)
        if name in adapters:
            results += [element * adapters.rank, element * outputs]
            last_needed = len(results) - (name == "down_proj")
    saved = dict(list(enumerate(results))[::2])
    return sum(saved.values()), sum(size for index, size in saved.items() if index >= last_needed)


def layers_of(setup: Setup) -> list[LayerMemory]:
    """Return the memory of each decoder layer, the first layer first."""
    spec, config, adapters = setup.spec, setup.config, setup.adapters
    checkpointing = config.gradient_checkpointing
    # selective_layer recomputes every second layer: the second, the fourth, ...
    modes = ("none", "full") if checkpointing == "selective_layer" else (checkpointing, checkpointing)
    shape = {
        "seq_len": config.seq_len,
        "compute": setup.compute,
        "eager": config.attn_implementation == "eager",
        "fused_norm": config.fuses_norm,
    }
    if adapters is None:
        rest = {"compiled": config.compiles, "float8": config.fp8 != "none"}
        pair = [layer_memory(spec, **shape, **rest, checkpointing=mode) for mode in modes]
        return [pair[number % 2] for number in range(spec.num_layers)]
    if config.compiles:
        shape |= {"fused_norm": True, "compiled": True}
    kernels = Kernels(**shape, keeps_inputs=keeps_inputs(setup.strategy))
    return [
        frozen_layer_memory(
            *(spec, adapters, kernels),
            checkpointing=modes[number % 2],
            has_input_gradient=number > 0 or setup.has_input_gradient,
        )
        for number in range(spec.num_layers)
    ]


def keeps_inputs(strategy: Strategy) -> bool:
    """Return whether ZeRO-3 replaces PyTorch's linear layers; the JSON's memory_efficient_linear sets it."""
    return strategy.zero_stage == 3 and strategy.deepspeed.zero_optimization.memory_efficient_linear


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FFN = ("gate_proj", "up_proj", "down_proj")
_ROLES = {
    "qkv_proj": ("q_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"the matrices of Llama's layer that have their gradients at about the same time as a matrix of another layer"


@cache
def _sizes_of_roles(spec: ModelSpec) -> dict[str, float]:
    """Return the elements of a layer's matrices by the names of Llama's."""
    parts = matrices_of(replace(spec, fused_projections=False))
    sizes = {name: inputs * outputs for name, (inputs, outputs) in parts.items()}
    return sizes | {"gate_proj": sizes["gate_proj"] * spec.gated_ffn}


def gradients_made(spec: ModelSpec, adapters: Adapters | None) -> Callable[[Moment], float]:
    """Return a function: the number of a layer's parameters that have a gradient at a moment of backward."""
    if adapters is None:
        sizes = _sizes_of_roles(spec)
    else:
        sizes = dict.fromkeys((*_ATTENTION, *_FFN), 0)
        for name, size in adapter_sizes(spec, adapters).items():
            sizes[_ROLES.get(name, (name,))[0]] += size
    ffn, key_and_value, query_and_output = (
        list(accumulate((sizes[name] for name in reversed(names)), initial=0))  # the order of backward
        for names in (_FFN, _ATTENTION[1:3], _ATTENTION[::3])
    )
    return lambda moment: (
        ffn[moment.ffn_grads] + key_and_value[moment.kv_grads] + query_and_output[moment.query_grads]
    )
