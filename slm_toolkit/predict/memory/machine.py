"""Memory that a run needs besides its tensors, on the GPU and in a node's RAM, and how likely the run fits.

The constants come from other people's measurements and from replays (`allocator.py`), except for GPUs with
rows in `hardware/calibration.csv`. Allocated bytes are in use by tensors; reserved bytes are what PyTorch's
allocator has taken from the GPU; the CUDA context is in neither.
"""

from math import erf

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.predict.memory.peak import MemoryEstimate
from slm_toolkit.predict.setup.setup import Setup

CUDA_CONTEXT_BYTES = 500_000_000  # per process; unverified (0.3 GB and more since CUDA 11.7: pytorch#107667)
NCCL_BYTES_OF_TWO = 544 * 2**20  # NVIDIA/nccl#964 of 2023-08: one all-reduce between 2 A100s over NVLink
NCCL_BYTES_OF_MORE = 688 * 2**20  # the same among 3 or 4 A100s; unverified on other GPUs and over a network
# forward's and backward's threads have one cuBLAS workspace each; PyTorch's CUBLAS_WORKSPACE_CONFIG defaults
WORKSPACE_BYTES = 2 * 8_519_680  # Ampere and Ada: :4096:2:16:8, 8.125 MiB (discuss.pytorch.org 178671)
WORKSPACE_BYTES_FROM_HOPPER = 2 * 32 * 2**20  # :4096:8 (pytorch#120925); seen on an H100 (results/h100-80gb)
FROM_HOPPER = ("h100-80gb", "h100-80gb-pcie", "h200", "gh200", "b200", "b300")

# fitted to replays of traced steps with `allocator.py` (results/memory/development.csv, 2026-11-25)
ROUNDING = 0.03  # fraction of allocated: blocks of 512 bytes, rests of segments
NOT_REUSED = 0.8  # fraction of the bytes that other instants need, and that the peak leaves unused
NEEDED_SLACK = 0.65  # median fraction of the slack without which a replayed step runs out of memory

STATE = ("parameters", "master_weights", "gradients", "optimizer")

COVERAGE = 0.9
"fraction of other people's runs whose memory lies in a printed range"
OUTSIDE_ERROR = 0.2
"""half of a printed range, as a fraction of its middle. 23 published peaks lie within 0.11
(`bench/published_memory.py`). The median of 42 others, which were checked blind, was about 0.10 (issue 26):
0.24 for COVERAGE of normal errors. 0.2 covers that fraction of all 65"""
SURE = 0.9
"a verdict is certain from this probability on"


def context_bytes(*, num_gpus: int, calibration: Calibration = NOT_CALIBRATED) -> int:
    """Return a process's bytes outside PyTorch's allocator: CUDA's context, and NCCL's buffers if any."""
    context = round(calibration.cuda_context_bytes or CUDA_CONTEXT_BYTES)
    if num_gpus == 1:
        return context
    return context + (NCCL_BYTES_OF_TWO if num_gpus == 2 else NCCL_BYTES_OF_MORE)


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the bytes of cuBLAS's workspaces, which PyTorch's allocator allocates; 0 without a GPU."""
    if gpu is None:
        return 0
    return WORKSPACE_BYTES_FROM_HOPPER if gpu.name in FROM_HOPPER else WORKSPACE_BYTES


def allocator_slack(setup: Setup, memory: MemoryEstimate, *, allocated: int) -> int:
    """Return the bytes that PyTorch's allocator holds unused when it has reserved the most.

    They are rounding, blocks that other instants of the step need and whose sizes suit nothing at the peak,
    and blocks of other streams: only FSDP allocates in other streams, and a stream does not use another
    stream's blocks. Gradients of other engines are freed in small blocks side by side, which are reused.
    """
    unused = {part: memory.largest[part] - memory.parts[part] for part in memory.parts}
    mixed = unused["activations"] + unused["logits_and_loss"] + unused["temporary"]
    of_streams = 0.0
    if setup.strategy.is_fsdp:  # reduce-scatter's output is the sharded gradient
        sharded = setup.weights.trained / setup.gpu_state_ranks * setup.dtypes.kept_gradient
        accumulates = setup.config.gradient_accumulation_steps > 1  # the other gradients are not sharded
        of_streams = unused["gathered_parameters"]
        of_streams += sharded if accumulates else min(sharded, unused["gradients"])
    return round(ROUNDING * allocated + NOT_REUSED * mixed + of_streams)


def needed_bytes(allocated: int, slack: int) -> int:
    """Return the bytes without which a step runs out of memory, although the allocator frees what it can.

    With fewer bytes than allocated + slack, it frees all segments without a block in use, and tries again.
    """
    return allocated + round(NEEDED_SLACK * slack)


def probability_that_fits(num_bytes: int, usable: int) -> float:
    """Return the probability that a run takes at most `usable` bytes, if `num_bytes` are expected.

    The error is taken as normally distributed, with COVERAGE of it within OUTSIDE_ERROR.
    """
    deviation = OUTSIDE_ERROR / 1.644854  # standard deviations that hold COVERAGE of a normal distribution
    return (1 + erf((usable / num_bytes - 1) / deviation / 2**0.5)) / 2


def verdict_of(probability: float) -> str:
    """Return the verdict of a probability: fits, may fit, unlikely to fit or does not fit."""
    if probability >= 0.5:
        return "fits" if probability >= SURE else "may fit"
    return "unlikely to fit" if probability >= 1 - SURE else "does not fit"


# RAM of a node: to build the model, and for offloaded state. These formulas come from the engines' code and
# were not measured.

PROCESS_BYTES = round(0.75 * 2**30)
"RSS of a training process without its model, with torch and the engine loaded; measured on CPU 2026-11-20"


def host_bytes(setup: Setup, *, zero_init: bool | None = None) -> int:
    """Return the peak RAM of one node: while every rank builds the model in fp32, or with offloaded state.

    With zero3_init_flag a rank builds one layer at a time, but rank 0 draws random weights of the whole
    model; `zero_init` overrides the strategy's own flag. DeepSpeed's offload to cpu takes master weights,
    moments and fp32 gradients of the rank's share; to nvme it takes only its pinned buffers (deepspeed
    0.19.8, runtime/zero/offload_config.py and runtime/swap_tensor).
    """
    spec, weights = setup.spec, setup.weights
    if zero_init is None:
        zero_init = setup.placement.zero_init
    trained = weights.trained if weights.is_frozen else 0  # adapters come on top of the model
    building = 4 * ((spec.largest_layer_params if zero_init else spec.num_params) + trained)
    is_drawn = spec.path is None or spec.path.endswith(".json")
    of_rank_0 = 4 * spec.num_params if zero_init and is_drawn else 0
    of_rank = PROCESS_BYTES + max(building, round(_offloaded_bytes(setup)))
    return setup.ranks_per_node * of_rank + of_rank_0


def _offloaded_bytes(setup: Setup) -> float:
    """Return the RAM of one rank's share of the offloaded training state."""
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
