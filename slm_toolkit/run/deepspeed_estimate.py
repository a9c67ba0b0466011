"""What DeepSpeed's own estimator says of a run, for its record."""

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.deepspeed_estimator import live_deepspeed_needs


def deepspeed_estimate_of(
    spec: ModelSpec, *, zero_stage: int | None, world_size: int, local: int
) -> dict[str, int] | None:
    """Bytes per GPU and per node's host, for `local` ranks on each node; None for other than ZeRO-2 and 3."""
    needs = live_deepspeed_needs(
        spec.num_params,
        spec.largest_layer_params,
        zero_stage=zero_stage,
        num_gpus_per_node=local,
        num_nodes=world_size // local,
    )
    return {"gpu_bytes": needs.gpu_bytes, "cpu_bytes": needs.host_bytes_per_node} if needs else None
