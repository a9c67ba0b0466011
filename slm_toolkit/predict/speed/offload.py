"""Seconds that offload adds to a step: bytes over PCIe, through host memory and on disks.

Nothing here was measured by us. Bytes follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py and stage3.py,
swap_tensor) and FSDP2 of torch 2.13 (CPUOffloadPolicy).
"""

from slm_toolkit.predict.setup.setup import Setup

PCIE_4, PCIE_5 = 31e9, 63e9
"bytes per second of 16 lanes, one way (stas00/ml-engineering @744d01e, network/README.md)"
PCIE_SHARE = 0.8
"of that rate, from pinned memory: 24.8 of 31 GB/s on 8 A100 (NVIDIA's forum, topic 352186)"
GH200_LINK = 450e9  # NVLink-C2C, one way: data sheet of NVIDIA's GH200, 900 GB/s in both directions
HOST_MEMORY = 205e9
"""bytes per second of a node: half of the 410 GB/s of two EPYC 7742 (8 channels DDR4-3200 each), because
ranks are not bound to a socket: binding makes a step 1.3 times as fast (DeepSpeed PR 7474)"""
DISKS = 5e9
"""bytes per second of a node: one PCIe 4 drive, which reads 6.9 and writes 4.1 GB/s (data sheet of Samsung's
PM9A3)"""
FASTEST, SLOWEST = 0.4, 5.0
"""factors on the seconds for other hosts, which differ more than GPUs do. Fastest: 490 GB/s, 0.8 of two Xeon
8480 (8 channels DDR5-4800 each); slowest: 40 GB/s, two channels of a desktop"""


def offload_seconds(setup: Setup, *, optimizer_bytes_per_parameter: float, compute_seconds: float) -> float:
    """Return the seconds that offload adds to a step of so much compute on the GPU.

    Compute hides gradients to the host and parameters to the GPU. The rest follows backward: DeepSpeed's
    pipeline_read and pipeline_write are off by default.
    """
    placement, dtypes, weights, strategy = setup.placement, setup.dtypes, setup.weights, setup.strategy
    micro_steps, ranks = setup.config.gradient_accumulation_steps, setup.ranks_per_node
    states = offloaded_fraction(setup) * weights.trained / setup.shard_ranks
    parameters = weights.total / setup.shard_ranks * dtypes.parameter
    gradients = states * dtypes.kept_gradient  # FSDP: once a step, reduced
    if strategy.is_deepspeed:
        # each micro-step but the first reads the host's sum and writes it back; the last writes it in fp32
        gradients = states * (dtypes.gradient * (2 * micro_steps - 2) + 4)
    on_gpu = placement.parameter_device == "none"
    passes = micro_steps * (1 + placement.reshard_after_forward)  # gathered in forward and in backward
    gathered = 0.0 if on_gpu else passes * parameters
    on_disks = 0.0  # per node
    if placement.optimizer_device == "nvme":  # master, moments and gradient, read and written
        on_disks += 2 * ranks * states * (dtypes.master + dtypes.moments + 4)
    if placement.parameter_device == "nvme":
        on_disks += ranks * (gathered + parameters)
    link = PCIE_SHARE * host_link_bytes_per_second(setup)
    updated = states * dtypes.parameter if on_gpu else 0.0
    return (
        max(0.0, (gradients + gathered) / link - compute_seconds)
        + updated / link
        + ranks * states * optimizer_bytes_per_parameter / HOST_MEMORY
        + on_disks / DISKS
    )


def offloaded_fraction(setup: Setup) -> float:
    """Return the fraction of the optimizer's state that is offloaded; DeepSpeed's `ratio` may lower it."""
    if setup.placement.optimizer_device == "none":
        return 0.0
    if not setup.strategy.is_deepspeed:
        return 1.0
    ratio = setup.strategy.deepspeed.zero_optimization.offload_optimizer.ratio
    return 1.0 if ratio is None else ratio


def host_link_bytes_per_second(setup: Setup) -> float:
    """Return the rate between a GPU and its host, one way, by the GPU's data sheet."""
    gpu = setup.gpu
    if gpu.name == "gh200":
        return GH200_LINK
    has_pcie_5 = gpu.architecture in ("hopper", "blackwell") or gpu.link_bytes_per_second == PCIE_5
    return PCIE_5 if has_pcie_5 else PCIE_4
