"""Bytes per token that a decoder layer keeps for backward, and that its backward needs at worst.

Read off allocation traces of transformers 5.23's Llama and Qwen2 (`slm_toolkit.train --rehearse`), sub-block
by sub-block, and checked against others of them: `bench/memory_accuracy.py`. h: hidden size, q: heads x
head_dim, v: key-value heads x head_dim, i: FFN width, a: heads, S: sequence length; e: bytes of the compute
dtype."""

from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.models import ModelSpec

SOFTWARE = ("2024", "2026")
"""2026: what was traced. 2024: torch 2.3 and transformers 4.4x, the paper's; its fits and OOMs (one A100-80GB
holds slm-2b at batch 16, DDP does not) say that a layer took more than its tensors explain, and its loss
copied logits once more"""
EXTRA_OF_2024 = (
    17.5  # bytes per token, layer and element of h: fitted to the paper's figures 1 to 4, unexplained
)

BF16, AUTOCAST, FP32 = "bf16", "autocast", "fp32"
"""how a step computes: bf16 weights and residual stream; fp32 ones under bf16 autocast (accelerate's DDP);
all fp32"""


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
