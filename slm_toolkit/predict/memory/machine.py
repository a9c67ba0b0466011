"""Memory that a run needs besides its tensors, on the GPU and in a node's RAM, and whether the run fits.

The constants come from other people's measurements, except for GPUs with rows in `hardware/calibration.csv`.
Allocated bytes are in use by tensors; reserved bytes are what PyTorch's allocator has taken from the GPU; the
CUDA context is in neither.

A run fits if its peak allocated bytes are at most the usable bytes: the GPU's memory minus the context. It is
tight if 10 % more activations and logits would not fit, or if the expected reserved bytes do not fit: the
allocator releases unused blocks before it fails. A peak in the optimizer's step has no activations, and so no
margin.
"""

from dataclasses import dataclass

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.predict.memory.peak import MemoryEstimate
from slm_toolkit.predict.setup.setup import Setup

CUDA_CONTEXT_BYTES = 500_000_000  # per process; unverified (0.3 GB and more since CUDA 11.7: pytorch#107667)
NCCL_BYTES_OF_TWO = 544 * 2**20  # NVIDIA/nccl#964 of 2023-08: one all-reduce between 2 A100s over NVLink
NCCL_BYTES_OF_MORE = 688 * 2**20  # the same among 3 or 4 A100s; unverified on other GPUs and over a network
# forward's and backward's threads have one cuBLAS workspace each; PyTorch's CUBLAS_WORKSPACE_CONFIG defaults
WORKSPACE_BYTES = 2 * 8_519_680  # Ampere and Ada: :4096:2:16:8, 8.125 MiB (discuss.pytorch.org 178671)
WORKSPACE_BYTES_FROM_HOPPER = 32 * 2**20  # :4096:8, as NVIDIA recommends (pytorch#120925); unverified
FROM_HOPPER = ("h100-80gb", "h100-80gb-pcie", "h200", "gh200", "b200", "b300")

# from torchtitan's and torchao's published reserved bytes and our allocated bytes, 2026-11-20
ROUNDING = 0.03  # fraction of allocated: blocks of 512 bytes and segments of 2 MiB
LOGITS_NOT_REUSED = 4  # bytes x vocabulary x tokens: transformers' loss leaves one fp32 block unused
BAND_BELOW, BAND_ABOVE = (
    0.02,
    0.05,
)  # fraction of the allocated bytes without the training state, which is exact
MARGIN = 0.10  # on activations and logits, before a run is called tight
STATE = ("parameters", "master_weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Band:
    """Bytes: at least, expected, at most."""

    low: int
    middle: int
    high: int


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


def allocated_band(parts: dict[str, int]) -> Band:
    """Return the sum of the parts with its error band: the training state is exact, other parts are not."""
    middle = sum(parts.values())
    rest = middle - sum(parts[name] for name in STATE)
    return Band(middle - round(BAND_BELOW * rest), middle, middle + round(BAND_ABOVE * rest))


def reserved_band(allocated: int, slack: int) -> Band:
    """Return allocated + slack with its band: low has rounding only; high adds slack / 2 + 5 %."""
    middle = allocated + slack
    low = min(middle, allocated + round(ROUNDING * allocated))
    return Band(low, middle, middle + round(slack / 2 + BAND_ABOVE * allocated))


def allocator_slack(setup: Setup, memory: MemoryEstimate, *, allocated: int) -> int:
    """Return the bytes that the allocator holds unused at the peak.

    They are rounding, a block of logits that transformers' loss leaves, and blocks of freed gradients. At a
    peak in the optimizer's step the gradients are not freed yet.
    """
    gradients = 0.0
    if setup.placement.optimizer_device == "none" and memory.peak_instant != "optimizer step":
        shards = 1 if setup.strategy.is_replicated else setup.shard_ranks
        gradients = setup.weights.trained / shards * setup.dtypes.kept_gradient
    is_hf = setup.config.loss_kernel == "hf"
    of_loss = LOGITS_NOT_REUSED * setup.spec.vocab_size * setup.num_tokens if is_hf else 0
    return round((setup.calibration.slack_factor or 1.0) * (gradients + of_loss + ROUNDING * allocated))


def verdict_of(parts: dict[str, int], *, allocated: int, reserved: int, usable: int) -> str:
    """Return "fits", "tight" or "does not fit", as the module's docstring defines them."""
    if allocated > usable:
        return "does not fit"
    margin = MARGIN * (parts["activations"] + parts["logits_and_loss"])
    return "tight" if allocated + margin > usable or reserved > usable else "fits"


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
