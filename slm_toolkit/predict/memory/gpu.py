"""What a GPU adds to a step's bytes (context, workspace, the allocator's slack), and whether that fits.

Constants here are other people's but for GPUs with rows in `hardware/calibration.csv`. allocated is what
PyTorch's allocator has given out, reserved what it holds; the context lies outside both.

A run fits where its peak allocated is within what is usable: the GPU's memory less the context. It is tight
where a tenth more activations and logits would not fit, or where the reserved middle does not: the allocator
gives back before it fails. The optimizer's step has no activations and so no such margin.
"""

from dataclasses import dataclass

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.predict.memory.peak import MemoryEstimate
from slm_toolkit.predict.setup.setup import Setup

CUDA_CONTEXT_BYTES = 500_000_000  # per process; unverified (0.3 GB and more since CUDA 11.7: pytorch#107667)
NCCL_BYTES_OF_TWO = 544 * 2**20  # NVIDIA/nccl#964 of 2023-08: one all-reduce between 2 A100s over NVLink
NCCL_BYTES_OF_MORE = 688 * 2**20  # the same among 3 or 4 A100s; unverified on other GPUs and over a network
# forward's and backward's thread have a cuBLAS workspace each; PyTorch's CUBLAS_WORKSPACE_CONFIG defaults
WORKSPACE_BYTES = 2 * 8_519_680  # Ampere and Ada: :4096:2:16:8, 8.125 MiB (discuss.pytorch.org 178671)
WORKSPACE_BYTES_FROM_HOPPER = 32 * 2**20  # :4096:8, as NVIDIA recommends (pytorch#120925); unverified
FROM_HOPPER = ("h100-80gb", "h100-80gb-pcie", "h200", "gh200", "b200", "b300")

# of torchtitan's and torchao's published tables (reserved) against our allocated, 2026-11-20
ROUNDING = 0.03  # of allocated: 512 bytes and 2 MiB segments
LOGITS_NOT_REUSED = 4  # bytes x vocabulary x tokens: transformers' loss leaves one fp32 block nobody fits in
BAND_BELOW, BAND_ABOVE = 0.02, 0.05  # of what is allocated beside the training state, which is exact
MARGIN = 0.10  # on activations and logits, before a run is called tight
STATE = ("parameters", "master_weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Band:
    """Bytes: at least, expected, at most."""

    low: int
    middle: int
    high: int


def context_bytes(*, num_gpus: int, calibration: Calibration = NOT_CALIBRATED) -> int:
    """What a process holds outside PyTorch's allocator: CUDA's context, and NCCL's buffers among several."""
    context = round(calibration.cuda_context_bytes or CUDA_CONTEXT_BYTES)
    if num_gpus == 1:
        return context
    return context + (NCCL_BYTES_OF_TWO if num_gpus == 2 else NCCL_BYTES_OF_MORE)


def workspace_bytes(gpu: Gpu | None) -> int:
    """cuBLAS's, which PyTorch's allocator gives out; 0 where no GPU is named."""
    if gpu is None:
        return 0
    return WORKSPACE_BYTES_FROM_HOPPER if gpu.name in FROM_HOPPER else WORKSPACE_BYTES


def allocated_band(parts: dict[str, int]) -> Band:
    """Around the sum of the parts: the training state is exact, the rest may be off."""
    middle = sum(parts.values())
    rest = middle - sum(parts[name] for name in STATE)
    return Band(middle - round(BAND_BELOW * rest), middle, middle + round(BAND_ABOVE * rest))


def reserved_band(allocated: int, slack: int) -> Band:
    """Around allocated + slack; low: rounding alone, high: half as much slack again, and 5 % of allocated."""
    middle = allocated + slack
    low = min(middle, allocated + round(ROUNDING * allocated))
    return Band(low, middle, middle + round(slack / 2 + BAND_ABOVE * allocated))


def allocator_slack(setup: Setup, memory: MemoryEstimate, *, allocated: int) -> int:
    """What the allocator keeps and nobody uses at the peak.

    Blocks of freed gradients (unless the optimizer's step, which has them, is the peak), a block of logits
    that transformers' loss leaves, and rounding.
    """
    gradients = 0.0
    if setup.placement.optimizer_device == "none" and memory.peak_instant != "optimizer step":
        shards = 1 if setup.strategy.is_replicated else setup.shard_ranks
        gradients = setup.weights.trained / shards * setup.dtypes.kept_gradient
    is_hf = setup.config.loss_kernel == "hf"
    of_loss = LOGITS_NOT_REUSED * setup.spec.vocab_size * setup.num_tokens if is_hf else 0
    return round((setup.calibration.slack_factor or 1.0) * (gradients + of_loss + ROUNDING * allocated))


def verdict_of(parts: dict[str, int], *, allocated: int, reserved: int, usable: int) -> str:
    """fits, tight or does not fit: see the module's docstring."""
    if allocated > usable:
        return "does not fit"
    margin = MARGIN * (parts["activations"] + parts["logits_and_loss"])
    return "tight" if allocated + margin > usable or reserved > usable else "fits"
