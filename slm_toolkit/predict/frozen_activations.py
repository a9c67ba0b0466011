"""Bytes per token that a decoder layer keeps for backward, and that it needs there, under `--peft`.

A frozen matrix keeps no input, a frozen norm no scaled one: neither has a gradient to make of it. Beside an
adapter LoRA's A keeps the matrix's input (after dropout, with its mask) and B the r numbers per token between
them; IA3 keeps what it multiplies. What no adapter lies below keeps nothing. Read off traces, and held to
others, as `activations.py` is, whose letters these are: `bench/memory_accuracy.py`. r: LoRA's rank.
"""

from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.activations import AUTOCAST, BF16, FP32, LayerMemory, Moment
from slm_toolkit.predict.adapters import ATTENTION, FFN, Adapters, matrices_of


@dataclass(frozen=True)
class Kernels:
    """How the layers of a step compute."""

    seq_len: int
    compute: str
    eager: bool
    fused_norm: bool
    fused_mlp: bool
    keeps_inputs: bool
    "ZeRO-3's linear layers keep their input for a gradient that nobody asks for"

    @property
    def element(self) -> int:
        """Bytes in matrix products."""
        return 4 if self.compute == FP32 else 2


@dataclass(frozen=True)
class _Widths:
    h: int
    i: int
    a: int
    q: int
    v: int


@lru_cache(maxsize=4096)
def frozen_layer_memory(
    spec: ModelSpec, adapters: Adapters, kernels: Kernels, *, checkpointing: str, has_input_gradient: bool
) -> LayerMemory:
    """`checkpointing` is what this very layer does. `has_input_gradient`: not in a first layer, unless any is
    checkpointed: then transformers asks for the embedding's, to have something to go back to."""
    w = _Widths(
        *(spec.hidden_size, spec.ffn_size, spec.num_heads, spec.num_heads * spec.head_dim),
        spec.num_kv_heads * spec.head_dim,
    )
    e, compute = kernels.element, kernels.compute
    residual = 2 if compute == BF16 else 4
    norm = (2 if compute == BF16 and kernels.fused_norm else 4) * w.h + 4
    # Without a gradient to hand on, what lies before the first adapter is computed as if in evaluation.
    first_norm = norm * has_input_gradient
    first_inputs = _inputs(w, adapters, ATTENTION[:3], kernels, has_gradient=has_input_gradient)
    of_scores = has_input_gradient or any(name in adapters for name in ATTENTION[:3])
    attention = _attention(w, adapters, kernels, is_kept=of_scores)
    below = of_scores or "o_proj" in adapters
    second_norm = norm * below
    second_inputs = _inputs(w, adapters, FFN[:2], kernels, has_gradient=below)
    gate, up = (below or name in adapters for name in FFN[:2])
    # for gate's gradient gate and up, for up's the SiLU, which a fused one makes again
    ffn = (2 * (gate or up) if kernels.fused_mlp else 2 * gate + up) * e * w.i
    product = _product(w, adapters, kernels, has_gradient=gate or up)
    ranks = e * adapters.rank
    of_attention = ranks * sum(name in adapters for name in ATTENTION)
    of_ffn = ranks * sum(name in adapters for name in FFN)
    above = first_norm + first_inputs + of_attention
    kept = float(above + attention + second_norm + second_inputs + ffn + product + of_ffn)

    # the gradients of the product, of the SiLU and of up, once the product is gone
    of_product = 3 * e * w.i - product
    if "down_proj" in adapters and not adapters.rank:  # the scale's own, made whole, while all is there
        of_product = (12 if compute == AUTOCAST else 3 * e) * w.i
    moments = [Moment("mlp", kept + of_product, 1, 0, 0)]
    ln = 16 * w.h + 8 if kernels.fused_norm else 24 * w.h
    if compute != BF16:
        ln = 20 * w.h + (8 if kernels.fused_norm else 4)
    if below:
        moments.append(Moment("post_attention_layernorm", above + attention + ln, 3, 0, 0))
        of_output = (3 if "o_proj" in adapters else 1) * e * w.q
        moments.append(Moment("self_attn", above + attention + of_output, 3, 0, 1))
    if of_scores:
        moments += [Moment("self_attn", above + form, 3, 0, 1) for form in _softmax(w, kernels)]
    if has_input_gradient:
        moments.append(Moment("input_layernorm", ln, 3, 2, 2))
    # The last thing that forward does: the matrix is done, and what its adapter takes is made of its input.
    is_lora = "down_proj" in adapters and adapters.rank > 0
    last = kept + e * w.h * is_lora + _beside_input(w, adapters, compute) * is_lora
    if compute == AUTOCAST:
        last += 4 * w.h
    else:
        last += e * w.h * (adapters.drops or not second_inputs)
    if checkpointing == "none":
        moments.insert(0, Moment("mlp", last - residual * w.h, 0, 0, 0))  # nobody has a gradient yet
        return LayerMemory(kept, tuple(moments), residual)
    # transformers' bf16 norm copies its input, so what it copied comes on top of what is recomputed
    copied = 2 * w.h if compute == BF16 and not kernels.fused_norm else 0
    saved, extra = float(residual * w.h), copied
    if checkpointing == "selective_op":
        results, unused = _saved_results(spec, e, adapters)
        saved += results + (0 if kernels.eager else e * w.q + 4 * w.a)
        extra += unused
    # computed again for a gradient that is scaled (and cast) already
    last += copied + (2 * e if compute == AUTOCAST else e) * w.h * is_lora
    moments.insert(0, Moment("mlp", last, 0, 0, 0))
    recomputed = (
        Moment(m.where, m.num_bytes + extra, m.ffn_grads, m.kv_grads, m.query_grads) for m in moments
    )
    return LayerMemory(saved, tuple(recomputed), residual)


def _inputs(
    w: _Widths, adapters: Adapters, names: tuple[str, ...], kernels: Kernels, *, has_gradient: bool
) -> float:
    """What is kept of the input of matrices that share one, h wide; of IA3 of their output, too."""
    e, having = kernels.element, [name for name in names if name in adapters]
    shared = e * w.h * (kernels.keeps_inputs and has_gradient)
    if not adapters.rank:
        outputs = {"q_proj": w.q, "k_proj": w.v, "v_proj": w.v, "gate_proj": w.i, "up_proj": w.i}
        return shared + e * sum(outputs[name] for name in having)
    if adapters.drops:
        return shared + (e + 1) * w.h * len(having)
    if kernels.compute == AUTOCAST:  # each casts it for itself
        return e * w.h * len(having)
    return shared or e * w.h * bool(having)


def _attention(w: _Widths, adapters: Adapters, kernels: Kernels, *, is_kept: bool) -> float:
    """Rotated query, key, value, output and the softmax's normaliser; eager: scores and probabilities."""
    e, kept = kernels.element, 0.0
    if is_kept and kernels.eager:
        kept = 3 * e * w.q + (4 if kernels.compute == FP32 else 6) * w.a * kernels.seq_len
    elif is_kept:
        kept = 2 * e * (w.q + w.v) + 4 * w.a
    own = e * w.q  # of the output, which the flash kernels keep anyway
    has_own = kernels.eager or not is_kept
    for_matrix = own * (kernels.keeps_inputs and kernels.eager and is_kept)
    if "o_proj" not in adapters:
        return kept + for_matrix
    if not adapters.rank:
        return kept + for_matrix + e * w.h
    if adapters.drops:
        return kept + for_matrix + own + w.q
    return kept + own * (has_own or kernels.compute == AUTOCAST)


def _product(w: _Widths, adapters: Adapters, kernels: Kernels, *, has_gradient: bool) -> float:
    """What is kept of the input of down_proj."""
    e = kernels.element
    shared = e * w.i * (kernels.keeps_inputs and has_gradient)
    if "down_proj" not in adapters:
        return shared
    if not adapters.rank:
        return shared + (4 if kernels.compute == AUTOCAST else e) * w.i
    if adapters.drops:
        return shared + (e + 1) * w.i
    return e * w.i


def _beside_input(w: _Widths, adapters: Adapters, compute: str) -> float:
    """Of down_proj's adapter: the input itself, where something made of it is kept; autocast's detour to
    fp32."""
    if compute == AUTOCAST:
        return (6 + 4 * adapters.drops) * w.i
    return (4 if compute == FP32 else 2) * w.i * adapters.drops


def _softmax(w: _Widths, kernels: Kernels) -> tuple[float, ...]:
    """Around the gradient of scores and probabilities, as `layer_memory` has it."""
    e = kernels.element
    if kernels.eager:
        of_scores = w.a * kernels.seq_len
        return 12 * of_scores + 3 * e * w.q, 8 * of_scores + 5 * e * w.q
    form = (4.0 * e * (w.q + w.v) + 4 * w.a,)
    return (*form, 12.0 * w.q + 4 * w.v) if kernels.compute == AUTOCAST else form


def _saved_results(spec: ModelSpec, element: int, adapters: Adapters) -> tuple[float, float]:
    """Of selective_op: what every second matrix product gives, and of that what backward has no use for."""
    results: list[float] = []
    last_needed = 0
    for name, (_, outputs) in matrices_of(spec).items():
        results.append(element * outputs)
        if name == "up_proj":
            last_needed = len(results)
        if adapters.rank and name in adapters:
            results += [element * adapters.rank, element * outputs]
            last_needed = len(results) - (name == "down_proj")
    saved = dict(list(enumerate(results))[::2])
    return sum(saved.values()), sum(size for index, size in saved.items() if index >= last_needed)
