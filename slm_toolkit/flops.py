"""Floating-point operations of training, per token, and what share of a GPU's peak a rate is."""

from slm_toolkit.hardware import Gpu
from slm_toolkit.models import ModelSpec


def flops_per_token(spec: ModelSpec, *, seq_len: int) -> float:
    """Forward and backward of one token, PaLM's convention (arXiv 2204.02311, appendix B): 6 N + 12 L H S.

    N counts the weights that take part in a matrix product, so the output head but not the input embedding; H
    is the width of all heads together. The attention term counts the whole square, not its causal half.
    Recomputation is never counted: it is work, but no progress.
    """
    attention = 12.0 * spec.num_layers * spec.num_heads * spec.head_dim * seq_len
    return flops_per_token_without_attention(spec) + attention


def flops_per_token_without_attention(spec: ModelSpec) -> float:
    """The other convention, 6 N with the same N (Kaplan et al., arXiv 2001.08361, section 2.1)."""
    matmul_params = spec.num_layers * spec.matmul_params_per_layer + spec.embedding_params  # the head
    return 6.0 * matmul_params


def model_flops_utilization(
    spec: ModelSpec, *, seq_len: int, gpu: Gpu, tokens_per_second_per_gpu: float
) -> float:
    """MFU, PaLM's convention: a fraction of the dense bf16 peak, recomputation not counted."""
    flops = flops_per_token(spec, seq_len=seq_len) * tokens_per_second_per_gpu
    return flops / gpu.dense_bf16_flops_per_second
