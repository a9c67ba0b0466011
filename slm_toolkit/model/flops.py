"""Floating-point operations of training, per token, and what share of a GPU's peak a rate is."""

from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec


def flops_per_token(spec: ModelSpec, *, seq_len: int, adapter_params: int | None = None) -> float:
    """Forward and backward of one token, PaLM's convention (arXiv 2204.02311, appendix B): 6 N + 12 L H S.

    N counts the weights that take part in a matrix product, so the output head but not the input embedding; H
    is the width of all heads together. The attention term counts the whole square, not its causal half.
    Recomputation is never counted: it is work, but no progress. `adapter_params`: those of adapters beside
    frozen weights, of which no gradient is made: then 4 N + 6 N_adapters + 12 L H S.
    """
    attention = 12.0 * spec.num_layers * spec.num_heads * spec.head_dim * seq_len
    return flops_per_token_without_attention(spec, adapter_params=adapter_params) + attention


def flops_per_token_without_attention(spec: ModelSpec, *, adapter_params: int | None = None) -> float:
    """The other convention, 6 N with the same N (Kaplan et al., arXiv 2001.08361, section 2.1).

    4 N + 6 N_adapters where the N are frozen: 2 N forward, 2 N for the gradients of activations.
    """
    matmul_params = spec.num_layers * spec.matmul_params_per_layer + spec.embedding_params  # the head
    if adapter_params is None:
        return 6.0 * matmul_params
    return 4.0 * matmul_params + 6.0 * adapter_params


def model_flops_utilization(
    spec: ModelSpec,
    *,
    seq_len: int,
    gpu: Gpu,
    tokens_per_second_per_gpu: float,
    adapter_params: int | None = None,
) -> float:
    """MFU, PaLM's convention: a fraction of the dense bf16 peak, recomputation not counted."""
    per_token = flops_per_token(spec, seq_len=seq_len, adapter_params=adapter_params)
    flops = per_token * tokens_per_second_per_gpu
    return flops / gpu.dense_bf16_flops_per_second
