"""What the optimizer's step allocates beside its state: casts of gradients, a foreach kernel's temporary."""

from functools import lru_cache

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.adapters import Weights
from slm_toolkit.predict.engine_bytes import Dtypes

CHUNK_ELEMENTS = 2**25
"of gradients that `run/optimizer.py` casts at a time: a test compares the two"


def optimizer_temporary(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    numerics: str,
    engine: str,
    optim: str,
    num_shards: int,
) -> float:
    """Bytes on one rank. foreach AdamW makes one tensor per parameter that it updates, the fused one none.

    The toolkit's own AdamW (not in `stock`, not under DeepSpeed) goes through the parameters in chunks.
    """
    foreach = optim == "adamw_torch"
    if engine == "deepspeed" or numerics == "stock":
        updated = dtypes.master or dtypes.parameter
        return weights.trained / num_shards * updated * foreach
    elements = largest_chunk(spec, num_shards, weights.adapter_shapes)
    cast = dtypes.master if dtypes.master else 0
    temporary = (dtypes.master or dtypes.parameter) * foreach
    return elements * (cast + temporary)


@lru_cache(maxsize=4096)
def largest_chunk(spec: ModelSpec, num_shards: int, adapter_shapes: tuple[tuple[int, int], ...] = ()) -> int:
    """Elements of the largest run of parameters below CHUNK_ELEMENTS, in the model's order."""
    if adapter_shapes:
        shares = [-(-rows // num_shards) * columns for rows, columns in adapter_shapes] * spec.num_layers
    else:
        h, kv, q = spec.hidden_size, spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
        layer = [h * q, h * kv, h * kv, h * q, *[h * spec.ffn_size] * 3]
        matrices = [spec.embedding_params, *layer * spec.num_layers]
        if not spec.tied:
            matrices.append(spec.embedding_params)
        shares = [-(-size // num_shards) for size in matrices]
    largest = run = 0
    for share in shares:
        if run and run + share > CHUNK_ELEMENTS:
            largest, run = max(largest, run), 0
        run += share
    return max(largest, run)
