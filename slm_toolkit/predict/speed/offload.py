"""Seconds that offload adds to a step, as a range: bytes over PCIe, through host memory and on disks.

Nothing here was measured by us. A host differs more from the next than a GPU does, so each rate is a range.
Bytes follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py and stage3.py, swap_tensor) and FSDP2 of torch
2.13 (CPUOffloadPolicy).

s: the offloaded parameters of a rank, with gradients; m: micro-steps.
"""

from dataclasses import dataclass

from slm_toolkit.predict.setup.setup import Setup


@dataclass(frozen=True)
class Range:
    """Bytes per second, or seconds; `low` is the smaller number."""

    low: float
    middle: float
    high: float


NO_OFFLOAD = Range(0.0, 0.0, 0.0)
PCIE_4, PCIE_5 = 31e9, 63e9
"bytes per second of 16 lanes, one way (stas00/ml-engineering @744d01e, network/README.md)"
PCIE_SHARE = Range(0.35, 0.80, 0.90)
"""of that rate, from pinned memory. Middle: 24.8 of 31 GB/s on 8 A100; low: 11 with both directions busy
(both in NVIDIA's forum, topic 352186); high: what packets' headers leave"""
GH200_LINK = 450e9  # NVLink-C2C, one way: data sheet of NVIDIA's GH200, 900 GB/s in both directions
HOST_MEMORY = Range(40e9, 205e9, 490e9)
"""bytes per second of a node. Low: two channels of a desktop, or few threads. Middle: half of the 410 GB/s of
two EPYC 7742 (8 channels DDR4-3200 each), because ranks are not bound to a socket: binding makes a step 1.3
times as fast (DeepSpeed PR 7474). High: 0.8 of the 614 GB/s of two Xeon 8480 (8 channels DDR5-4800 each)"""
DISKS = Range(2e9, 5e9, 28e9)
"""bytes per second of a node. Low: the most of AWS's gp3 volume (2025). Middle: one PCIe 4 drive, which reads
6.9 and writes 4.1 GB/s (data sheet of Samsung's PM9A3). High: a DGX-2 (DeepSpeed, SC21-ZeRO-Infinity.pdf)"""


@dataclass(frozen=True)
class OffloadBytes:
    """Bytes of one step."""

    over_pcie_in_backward: float
    "per rank: gradients to the host, and parameters to the GPU; compute can hide them"
    over_pcie_after_step: float
    "per rank: updated parameters to the GPU; nothing hides them"
    in_host_memory: float
    "per node: what AdamW, clipping and casts read and write"
    on_disks: float
    "per node, read and written"


def offload_bytes(setup: Setup, *, optimizer_bytes_per_parameter: float) -> OffloadBytes:
    """Return the bytes that the strategy's offload moves in one step."""
    placement, dtypes, weights, strategy = setup.placement, setup.dtypes, setup.weights, setup.strategy
    micro_steps, ranks = setup.config.gradient_accumulation_steps, setup.ranks_per_node
    fraction = offloaded_fraction(setup)
    states = fraction * weights.trained / setup.shard_ranks
    parameters = weights.total / setup.shard_ranks * dtypes.parameter
    gradients = states * dtypes.kept_gradient  # FSDP: once a step, reduced
    if strategy.is_deepspeed:
        # each micro-step but the first reads the host's sum and writes it back; the last writes it in fp32
        gradients = states * (dtypes.gradient * (2 * micro_steps - 2) + 4)
    on_gpu = placement.parameter_device == "none"
    passes = micro_steps * (1 + placement.reshard_after_forward)  # gathered in forward and in backward
    gathered = 0.0 if on_gpu else passes * parameters
    on_disks = 0.0
    if placement.optimizer_device == "nvme":  # master, moments and gradient, read and written
        on_disks += 2 * ranks * states * (dtypes.master + dtypes.moments + 4)
    if placement.parameter_device == "nvme":
        on_disks += ranks * (gathered + parameters)
    return OffloadBytes(
        over_pcie_in_backward=gradients + gathered,
        over_pcie_after_step=states * dtypes.parameter if on_gpu else 0.0,
        in_host_memory=ranks * states * optimizer_bytes_per_parameter,
        on_disks=on_disks,
    )


def offloaded_fraction(setup: Setup) -> float:
    """Return the fraction of the optimizer's state that is offloaded; DeepSpeed's `ratio` may lower it."""
    if setup.placement.optimizer_device == "none":
        return 0.0
    if not setup.strategy.is_deepspeed:
        return 1.0
    ratio = setup.strategy.deepspeed.zero_optimization.offload_optimizer.ratio
    return 1.0 if ratio is None else ratio


def offload_seconds(setup: Setup, *, optimizer_bytes_per_parameter: float, compute_seconds: float) -> Range:
    """Return the seconds that offload adds to a step of so much compute on the GPU.

    The parts after backward follow each other: DeepSpeed's pipeline_read and pipeline_write are off by
    default.
    """
    moved = offload_bytes(setup, optimizer_bytes_per_parameter=optimizer_bytes_per_parameter)
    link = host_link_bytes_per_second(setup)

    def seconds(pcie: float, memory: float, disks: float) -> float:
        in_backward = max(0.0, moved.over_pcie_in_backward / pcie - compute_seconds)
        return (
            in_backward
            + moved.over_pcie_after_step / pcie
            + moved.in_host_memory / memory
            + moved.on_disks / disks
        )

    rates = [
        (share * link, memory, disks)
        for share, memory, disks in zip(
            *((each.low, each.middle, each.high) for each in (PCIE_SHARE, HOST_MEMORY, DISKS)), strict=True
        )
    ]
    slow, middle, fast = (seconds(*each) for each in rates)
    return Range(fast, middle, slow)


def host_link_bytes_per_second(setup: Setup) -> float:
    """Return the rate between a GPU and its host, one way, by the GPU's data sheet."""
    gpu = setup.gpu
    if gpu.name == "gh200":
        return GH200_LINK
    has_pcie_5 = gpu.architecture in ("hopper", "blackwell") or gpu.link_bytes_per_second == PCIE_5
    return PCIE_5 if has_pcie_5 else PCIE_4
