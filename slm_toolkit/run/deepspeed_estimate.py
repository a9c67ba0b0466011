"""What DeepSpeed's own memory estimator says of a model: its functions, our parameter counts."""

from slm_toolkit.models import ModelSpec


def deepspeed_estimate(
    num_params: int,
    largest_layer_params: int,
    *,
    zero_stage: int | None,
    num_gpus_per_node: int,
    num_nodes: int,
) -> dict[str, int] | None:
    """Bytes per GPU and per node's host for ZeRO-2 and ZeRO-3 without offload; None for any other stage.

    DeepSpeed counts model states only, fp32 gradients included, neither activations nor logits. Its
    `*_all_live` functions count nothing on a meta model, so the plain ones are called.
    """
    if zero_stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        cpu, gpu = estimate_zero2_model_states_mem_needs(
            num_params, num_gpus_per_node, num_nodes, cpu_offload=False
        )
    elif zero_stage == 3:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
            *(num_params, largest_layer_params, num_gpus_per_node, num_nodes),
            cpu_offload=False,
            cpu_offload_params=False,
            zero_init=False,
        )
    else:
        return None
    return {"gpu_bytes": int(gpu), "cpu_bytes": int(cpu)}


def deepspeed_estimate_of(
    spec: ModelSpec, *, zero_stage: int | None, world_size: int, local: int
) -> dict | None:
    """`deepspeed_estimate` for a run of `world_size` ranks, `local` of them on each node."""
    return deepspeed_estimate(
        spec.num_params,
        spec.largest_layer_params,
        zero_stage=zero_stage,
        num_gpus_per_node=local,
        num_nodes=world_size // local,
    )
