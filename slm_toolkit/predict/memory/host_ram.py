"""RAM that a strategy takes of a node: for building the model, and for what is offloaded.

All of it is a hypothesis: read off the engines' code, not measured.
"""

from slm_toolkit.predict.setup.setup import Setup

PROCESS_BYTES = round(0.75 * 2**30)
"RSS of a training process without its model, torch and engine loaded; measured on CPU 2026-11-20"


def host_bytes(setup: Setup, *, zero_init: bool | None = None) -> int:
    """RAM of one node at its worst: while every rank builds the model in fp32, or with what is offloaded.

    With zero3_init_flag a rank builds a layer at a time, but rank 0 draws random weights whole; `zero_init`
    assumes that flag, or its absence, in place of the strategy's own.
    DeepSpeed on cpu: master weights, moments and fp32 gradients of the rank's share. On nvme: its pinned
    buffers only (deepspeed 0.19.8, runtime/zero/offload_config.py and runtime/swap_tensor).
    """
    spec, weights = setup.spec, setup.weights
    if zero_init is None:
        zero_init = setup.placement.zero_init
    trained = weights.trained if weights.is_frozen else 0  # beside the model
    building = 4 * ((spec.largest_layer_params if zero_init else spec.num_params) + trained)
    is_drawn = spec.path is None or spec.path.endswith(".json")
    of_rank_0 = 4 * spec.num_params if zero_init and is_drawn else 0
    of_rank = PROCESS_BYTES + max(building, round(_offloaded_bytes(setup)))
    return setup.ranks_per_node * of_rank + of_rank_0


def _offloaded_bytes(setup: Setup) -> float:
    """RAM that one rank's share of the offloaded training state takes."""
    placement = setup.placement
    if placement.optimizer_device == "none" and placement.parameter_device == "none":
        return 0
    dtypes, weights = setup.dtypes, setup.weights
    share = weights.trained / setup.shard_ranks
    of_optimizer = of_parameters = 0.0
    if placement.optimizer_device == "cpu":
        gradient = 4 if setup.strategy.is_deepspeed else dtypes.kept_gradient
        of_optimizer = share * (dtypes.master + dtypes.moments + gradient)
    elif placement.optimizer_device == "nvme":
        zero = setup.strategy.deepspeed.zero_optimization
        of_optimizer = zero.offload_optimizer.buffer_count * min(share, zero.sub_group_size) * 4
    if placement.parameter_device == "cpu":
        of_parameters = weights.total / setup.shard_ranks * dtypes.parameter
    elif placement.parameter_device == "nvme":
        buffers = setup.strategy.deepspeed.zero_optimization.offload_param
        of_parameters = buffers.buffer_count * buffers.buffer_size * dtypes.parameter
    return of_optimizer + of_parameters
