"""DeepSpeed's own memory estimate, by a copy of its arithmetic.

It counts model states only: neither activations, nor logits, nor communication buffers.
"""

from dataclasses import dataclass

_BUFFER_FACTOR = 1.5  # its default additional_buffer_factor


@dataclass(frozen=True)
class DeepSpeedNeeds:
    """Memory of ZeRO-2 or ZeRO-3 as DeepSpeed estimates it."""

    gpu_bytes: int
    "per GPU"
    host_bytes_per_node: int


def deepspeed_needs(
    num_params: int,
    largest_layer_params: int,
    *,
    zero_stage: int | None,
    num_gpus_per_node: int,
    num_nodes: int,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    zero_init: bool = False,
) -> DeepSpeedNeeds | None:
    """Return DeepSpeed's estimate without importing DeepSpeed; None for stages without an estimator.

    It repeats DeepSpeed's rules: stage 2 ignores offload_params and zero_init; stage 3 ignores offload_params
    without offload_optimizer; stage 2 with offload_optimizer does not divide host bytes by the nodes. The
    floating-point operations are in DeepSpeed's order, so the results are equal to the byte.
    """
    num_gpus = num_nodes * num_gpus_per_node
    # 18 = 2 + 4 gradients in 16 and 32 bits + 4 master weights + 8 optimizer states
    states = int(18 * num_params / num_gpus)
    whole_model_per_rank = 4 * num_gpus_per_node  # without zero_init each rank builds the model in fp32
    if zero_stage == 2:
        gpu_bytes = 2 * num_params + (0 if offload_optimizer else states)
        host_bytes = num_params * (max(4 * num_gpus, 16) if offload_optimizer else whole_model_per_rank)
    elif zero_stage == 3:
        gpu_bytes = 4 * largest_layer_params  # gathered: parameters and gradients in 16 bits
        if not offload_optimizer:
            gpu_bytes += states
            host_bytes = (largest_layer_params if zero_init else num_params) * whole_model_per_rank
        else:
            gpu_bytes += 0 if offload_params else int(2 * num_params / num_gpus)
            of_node = (18 if offload_params else 16) * (1 / num_nodes)  # 18 without the 2 on the GPUs
            host_bytes = num_params * (of_node if zero_init else max(whole_model_per_rank, of_node))
    else:
        return None
    return DeepSpeedNeeds(gpu_bytes, int(host_bytes * _BUFFER_FACTOR))
