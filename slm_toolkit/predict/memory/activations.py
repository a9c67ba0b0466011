"""Bytes per token that decoder layers keep for backward and need in it, trained whole or by adapters.

Read off allocation traces of transformers 5.23's Llama and Qwen2 (`slm_toolkit.train --rehearse`), sub-block
by sub-block, and checked against others of them: `bench/memory_accuracy.py`. h: hidden size, q: heads x
head_dim, v: key-value heads x head_dim, i: FFN width, a: heads, S: sequence length; e: bytes of the compute
dtype.

A frozen matrix keeps no input, a frozen norm no scaled one: neither has a gradient to make of it. Beside an
adapter LoRA's A keeps the matrix's input (after dropout, with its mask) and B the r numbers per token between
them; IA3 keeps what it multiplies. What no adapter lies below keeps nothing. Read off traces, and held to
others, as `activations.py` is, whose letters these are: `bench/memory_accuracy.py`. r: LoRA's rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import ATTENTION, FFN, Adapters, adapter_sizes, matrices_of
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, FP32, Setup
from slm_toolkit.strategy.strategy import Strategy

SOFTWARE = ("2024", "2026")
"""2026: what was traced. 2024: torch 2.3 and transformers 4.4x, the paper's; its fits and OOMs (one A100-80GB
holds slm-2b at batch 16, DDP does not) say that a layer took more than its tensors explain, and its loss
copied logits once more"""
EXTRA_OF_2024 = (
    17.5  # bytes per token, layer and element of h: fitted to the paper's figures 1 to 4, unexplained
)


@dataclass(frozen=True)
class Moment:
    """An instant of a layer's backward: bytes per token beside what the layers below keep, and its
    progress."""

    where: str
    num_bytes: float
    ffn_grads: int
    "of the three FFN matrices, how many gradients are made"
    kv_grads: int
    "of key and value"
    query_grads: int
    "of query and output"


@dataclass(frozen=True)
class Arrival:
    """The gradient of a module's weight in a layer's backward: bytes per token beside it, and below."""

    place: str
    when_made: float
    in_hook: float
    "what the product read is gone"


@dataclass(frozen=True)
class LayerMemory:
    """One decoder layer. Bytes per token, the gradient of the residual stream not counted."""

    saved: float
    "kept from forward to backward"
    moments: tuple[Moment, ...]
    "of its backward, recomputation included, in order of time; one of them holds most"
    residual: int
    "bytes of the residual stream's gradient"
    arrivals: tuple[Arrival, ...] = ()
    "in order of time; none where adapters alone are trained"


@lru_cache(maxsize=4096)
def layer_memory(
    spec: ModelSpec,
    *,
    seq_len: int,
    compute: str,
    eager: bool,
    fused_norm: bool,
    fused_mlp: bool,
    checkpointing: str,
    compiled: bool,
    software: str,
) -> LayerMemory:
    """`checkpointing` is what this very layer does: none, full or selective_op.

    `compiled`, unlike the rest, was never traced: that Inductor's norms keep what fused ones do, that SiLU is
    computed again and selective_op's last product dropped, fits published runs (`bench/published_memory.py`).
    """
    fused_norm = fused_norm or compiled
    h, i, a = spec.hidden_size, spec.ffn_size, spec.num_heads
    q, v = a * spec.head_dim, spec.num_kv_heads * spec.head_dim
    e = 4 if compute == FP32 else 2
    residual = 2 if compute == BF16 else 4
    # A norm keeps: its input and the scaled input, both in fp32 where it is transformers' own (bf16: an fp32
    # copy, the scaled one in bf16), its output for the next matrix product, and 1/rms in fp32. A fused one
    # keeps its input as it is. Under autocast each product that reads the output keeps a bf16 copy instead:
    # three in attention, two in the FFN.
    if compute == BF16:
        norm = (4 if fused_norm else 8) * h + 4
        attention_inputs = ffn_inputs = 0
    elif compute == AUTOCAST:
        norm = (4 if fused_norm else 8) * h + 4
        attention_inputs, ffn_inputs = 6 * h, 4 * h
    else:
        norm = (8 if fused_norm else 12) * h + 4
        attention_inputs = ffn_inputs = 0
    # Attention keeps rotated query, key, value and output, and the softmax's normaliser; eager: scores and
    # probabilities, (heads x S) per token, the latter in fp32 and in the compute dtype, and repeated keys
    # and values.
    scores = (4 if compute == FP32 else 6) * a * seq_len
    attention = 4 * e * q + scores if eager else 2 * e * (q + v) + 4 * a
    # gate, its SiLU (a fused one makes it again), up, their product; without a gate (a hypothesis, never
    # traced) up and its GELU
    ffn = ((3 if fused_mlp or compiled else 4) if spec.gated_ffn else (1 if compiled else 2)) * e * i
    in_ffn = 2 if fused_mlp and spec.gated_ffn and not compiled else 3  # beside up's gradients: no gate
    below_ffn = 2 * norm + attention + attention_inputs
    extra_of_software = EXTRA_OF_2024 * h if software == "2024" else 0
    everything = below_ffn + ffn_inputs + ffn + extra_of_software

    ln = 16 * h + 8 if fused_norm else 24 * h  # transformers' RMSNorm backward: six fp32 tensors at once
    if compute != BF16:
        ln = 20 * h + (8 if fused_norm else 4)
    if eager:
        softmax = (12 * a * seq_len + 3 * e * q, 8 * a * seq_len + 5 * e * q)
    else:
        softmax = (4 * e * (q + v) + 4 * a,)
        if compute == AUTOCAST:  # RoPE's backward is in fp32
            softmax += (12 * q + 4 * v,)
    projections = e * (3 * h + q) if compute != AUTOCAST else 8 * h + 2 * q
    above = norm + attention_inputs  # what the first norm keeps
    moments = [
        Moment("mlp", below_ffn + ffn_inputs + ffn + 2 * e * i, 1, 0, 0),
        Moment("mlp", below_ffn + ffn_inputs + e * (h + in_ffn * i), 2, 0, 0),
        Moment("mlp", below_ffn + ffn_inputs * 2 + e * (2 * h + i), 3, 0, 0),
        Moment("post_attention_layernorm", norm + attention_inputs + attention + ln, 3, 0, 0),
        *(Moment("self_attn", above + form, 3, 0, 1) for form in softmax),
        Moment("self_attn", above + projections, 3, 2, 1),
        Moment("input_layernorm", ln, 3, 2, 2),
    ]
    of_norm = (2 if fused_norm else 6) * h + 4  # its weight's gradient is made before the six tensors
    arrivals = [
        Arrival("down_proj", below_ffn + ffn_inputs + ffn + e * i, below_ffn + ffn_inputs + ffn),
        Arrival("up_proj", moments[1].num_bytes, moments[1].num_bytes - e * i),
        Arrival("gate_proj", moments[2].num_bytes, below_ffn + ffn_inputs),
        Arrival("post_attention_layernorm", norm + attention + of_norm, norm + attention + of_norm),
        Arrival("o_proj", norm + attention + e * q, norm + attention + e * q),
        Arrival("v_proj", norm + e * (q + 2 * v + h), norm + e * (q + v + h)),
        Arrival("k_proj", norm + e * (q + 3 * h), norm + e * (q + h)),
        Arrival("q_proj", norm + e * (q + 2 * h), norm),
        Arrival("input_layernorm", of_norm, of_norm),
    ]
    if checkpointing == "none":
        return LayerMemory(everything, tuple(moments), residual, tuple(arrivals))
    # transformers' bf16 norm copies its input, so the layer's own input comes on top of what is recomputed
    own_input = 2 * h if compute == BF16 and not fused_norm else 0
    saved, extra = residual * h, own_input
    if checkpointing == "selective_op":  # query, value, gate and down of the matrix products, attention
        kept_by_attention = 0 if eager else e * q + 4 * a
        saved += e * (q + v + i + (0 if compiled else h)) + kept_by_attention
        extra += e * h  # backward has no use for down, but it is kept
    recomputed = (Moment(moment.where, moment.num_bytes + extra, *_progress(moment)) for moment in moments)
    arrivals = [Arrival(one.place, one.when_made + extra, one.in_hook + extra) for one in arrivals]
    return LayerMemory(saved, tuple(recomputed), residual, tuple(arrivals))


def _progress(moment: Moment) -> tuple[int, int, int]:
    return moment.ffn_grads, moment.kv_grads, moment.query_grads


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


def layers_of(setup: Setup) -> list[LayerMemory]:
    """Each decoder layer, the first one first."""
    spec, config, adapters = setup.spec, setup.config, setup.adapters
    checkpointing = config.gradient_checkpointing
    # of every pair the second is computed again: the second, the fourth, ...
    modes = ("none", "full") if checkpointing == "selective_layer" else (checkpointing, checkpointing)
    shape = {
        "seq_len": config.seq_len,
        "compute": setup.compute,
        "eager": config.attn_implementation == "eager",
        "fused_norm": config.norm_kernel == "fused",
        "fused_mlp": config.mlp_kernel == "fused",
    }
    if adapters is None:
        rest = {"compiled": config.torch_compile, "software": setup.software}
        pair = [layer_memory(spec, **shape, **rest, checkpointing=mode) for mode in modes]
        return [pair[number % 2] for number in range(spec.num_layers)]
    kernels = Kernels(**shape, keeps_inputs=keeps_inputs(setup.strategy))
    return [
        frozen_layer_memory(
            *(spec, adapters, kernels),
            checkpointing=modes[number % 2],
            has_input_gradient=number > 0 or checkpointing != "none",
        )
        for number in range(spec.num_layers)
    ]


def keeps_inputs(strategy: Strategy) -> bool:
    """ZeRO-3 puts a linear layer of its own in place of PyTorch's, unless the JSON says otherwise."""
    return strategy.zero_stage == 3 and strategy.deepspeed.zero_optimization.memory_efficient_linear


def gradients_made(spec: ModelSpec, adapters: Adapters | None) -> Callable[[Moment], float]:
    """How many of a layer's parameters have a gradient already at a moment of its backward."""
    if adapters is None:
        sizes = {name: inputs * outputs for name, (inputs, outputs) in matrices_of(spec).items()}
        sizes["gate_proj"] *= spec.gated_ffn
    else:
        sizes = dict.fromkeys(matrices_of(spec), 0) | adapter_sizes(spec, adapters)
    ffn, key_and_value, query_and_output = (
        list(accumulate((sizes[name] for name in reversed(names)), initial=0))  # backward goes so
        for names in (FFN, ATTENTION[1:3], ATTENTION[::3])
    )
    return lambda moment: (
        ffn[moment.ffn_grads] + key_and_value[moment.kv_grads] + query_and_output[moment.query_grads]
    )
