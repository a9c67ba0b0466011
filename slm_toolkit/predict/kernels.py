"""Bytes that element-wise kernels move per token and how many kernels a layer launches, counted by hand.

h: hidden size, f: FFN width. Forward and backward together, bf16, one layer, of transformers' Llama in
eager PyTorch unless it says otherwise. A kernel reads its inputs and writes its outputs once: 2 bytes each in
bf16, 4 where the code makes fp32 copies.
"""

from dataclasses import dataclass

from slm_toolkit.models import ModelSpec


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
