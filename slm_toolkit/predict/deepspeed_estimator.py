"""DeepSpeed's own memory estimate, by a copy of its arithmetic or by its installed functions.

Both count model states only: neither activations, nor logits, nor communication buffers.
"""

from dataclasses import dataclass

ESTIMATOR_VERSION = (
    "0.19.8"  # source of the arithmetic: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py
)


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
    additional_buffer_factor: float = 1.5,
) -> DeepSpeedNeeds | None:
    """Return DeepSpeed's estimate without importing DeepSpeed; None for stages without an estimator.

    It repeats DeepSpeed's rules: stage 2 ignores offload_params and zero_init; stage 3 ignores offload_params
    without offload_optimizer; stage 2 with offload_optimizer does not divide host bytes by the nodes.
    """
    states = num_params, num_gpus_per_node, num_nodes
    if zero_stage == 2:
        return _zero_2_needs(*states, offload_optimizer, additional_buffer_factor)
    if zero_stage == 3:
        offloads = offload_optimizer, offload_params
        return _zero_3_needs(*states, largest_layer_params, *offloads, zero_init, additional_buffer_factor)
    return None


def live_deepspeed_needs(
    num_params: int,
    largest_layer_params: int,
    *,
    zero_stage: int | None,
    num_gpus_per_node: int,
    num_nodes: int,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    zero_init: bool = False,
    additional_buffer_factor: float = 1.5,
) -> DeepSpeedNeeds | None:
    """Return the same estimate from the functions of the installed DeepSpeed, of any version.

    Its `*_all_live` functions count 0 parameters in a meta model, so this calls the plain ones.
    """
    if zero_stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        host_bytes, gpu_bytes = estimate_zero2_model_states_mem_needs(
            num_params,
            num_gpus_per_node=num_gpus_per_node,
            num_nodes=num_nodes,
            cpu_offload=offload_optimizer,
            additional_buffer_factor=additional_buffer_factor,
        )
    elif zero_stage == 3:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        host_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            num_params,
            largest_layer_params,
            num_gpus_per_node=num_gpus_per_node,
            num_nodes=num_nodes,
            cpu_offload=offload_optimizer,
            cpu_offload_params=offload_params,
            zero_init=zero_init,
            additional_buffer_factor=additional_buffer_factor,
        )
    else:
        return None
    return DeepSpeedNeeds(gpu_bytes, host_bytes)


def _zero_2_needs(
    num_params: int,
    num_gpus_per_node: int,
    num_nodes: int,
    offload_optimizer: bool,
    additional_buffer_factor: float,
) -> DeepSpeedNeeds:
    """Follow estimate_zero2_model_states_mem_needs of stage_1_and_2.py; factors are bytes per parameter."""
    num_gpus = num_nodes * num_gpus_per_node
    parameters = 2 * num_params
    if offload_optimizer:
        gpu_bytes = parameters
        host_bytes = num_params * max(4 * num_gpus, 16)
    else:
        # 18 = 2 + 4 gradients in 16 and 32 bits + 4 master weights + 8 optimizer states
        gpu_bytes = parameters + int(18 * num_params / num_gpus)
        host_bytes = num_params * 4 * num_gpus_per_node
    return DeepSpeedNeeds(gpu_bytes, int(host_bytes * additional_buffer_factor))


def _zero_3_needs(
    num_params: int,
    num_gpus_per_node: int,
    num_nodes: int,
    largest_layer_params: int,
    offload_optimizer: bool,
    offload_params: bool,
    zero_init: bool,
    additional_buffer_factor: float,
) -> DeepSpeedNeeds:
    """Follow estimate_zero3_model_states_mem_needs of stage3.py; factors are bytes per parameter.

    The floating-point operations are in DeepSpeed's order, so the results are equal to the byte.
    """
    num_gpus = num_nodes * num_gpus_per_node
    share_of_node = 1 / num_nodes
    largest_layer = 4 * largest_layer_params  # gathered: parameters and gradients in 16 bits
    whole_model_per_rank = 4 * num_gpus_per_node  # without zero_init each rank builds the model in fp32
    if offload_optimizer:
        # 18 = 2 + 4 gradients + 4 master weights + 8 optimizer states; 16 = 18 without the 2 on the GPUs
        states = 18 if offload_params else 16
        gpu_bytes = largest_layer if offload_params else largest_layer + int(2 * num_params / num_gpus)
        if zero_init:
            host_bytes = num_params * states * share_of_node
        else:
            host_bytes = num_params * max(whole_model_per_rank, states * share_of_node)
    else:
        gpu_bytes = largest_layer + int(18 * num_params / num_gpus)
        built_on_host = largest_layer_params if zero_init else num_params
        host_bytes = built_on_host * whole_model_per_rank
    return DeepSpeedNeeds(gpu_bytes, int(host_bytes * additional_buffer_factor))
