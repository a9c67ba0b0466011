"""Find faults of the machine and its environment: RAM, GPUs, environment variables."""

import re
from collections.abc import Iterator

from slm_toolkit.doctor.case import Case, is_of_cpus
from slm_toolkit.doctor.finding import Finding, fault, in_yaml, slow, unwise, wrong
from slm_toolkit.predict.memory.machine import host_bytes
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.settings import is_true

_WITHOUT_BF16 = r"V100|\bT4\b|P100|P40\b|RTX 20\d\d|GTX |TITAN|Quadro RTX"
"names that the driver reports for GPUs before Ampere"
_SMALL_SHM_BYTES = 2**28
"containers have 64 MiB by default; NCCL needs about 10 MiB per pair of GPUs, each data worker one batch"


def machine_faults(case: Case) -> Iterator[Finding]:
    if not case.host.is_meant:
        return
    old = [name for name in dict.fromkeys(case.host.gpu_names) if re.search(_WITHOUT_BF16, name)]
    if old and case.flags.computes_in == "bf16" and not is_of_cpus(case.config):
        yield wrong(
            "gpu-without-bf16",
            f"{', '.join(old)} with --numerics {case.flags.numerics}",
            why="GPUs before Ampere have no bf16 tensor cores and no FlashAttention-2: bf16 is emulated, "
            "slower than fp32",
            change="--numerics fp16 (or fp32), or another GPU",
        )
    size = case.host.shm_bytes
    if size is not None and size < _SMALL_SHM_BYTES and len(case.host.gpu_names) > 1:
        yield unwise(
            "small-shm",
            f"/dev/shm has {size / 2**20:.0f} MiB",
            why="NCCL and the data workers send data through it; both crash with a bus error when it is full",
            change="docker run --shm-size=8g, or --ipc=host",
        )


def host_ram_faults(case: Case, setup: Setup) -> Iterator[Finding]:
    """Report ranks that need more host RAM than a node has; nothing is checked if the RAM is unknown."""
    total, free = case.host.ram_bytes, case.host.free_ram_bytes
    if total is None:
        return
    setup = setup.launched
    needed, left = host_bytes(setup), total if free is None else free
    if needed <= left:
        return
    in_pieces = host_bytes(setup, zero_init=True)
    keeps_state = "cpu" in (setup.placement.optimizer_device, setup.placement.parameter_device)
    edits, change, then = [], None, ""
    if setup.strategy.zero_stage == 3 and in_pieces <= left:
        edits = [in_yaml("deepspeed_config.zero3_init_flag", True)]
        then = ": only rank 0 then builds the whole model, and each other rank its shard"
    elif keeps_state:
        change = "--strategy ds_zero3_nvme, more machines, or --gradient_checkpointing full without offload"
    else:
        change = "--strategy ds_zero3 with zero3_init_flag: true, which builds the model in shards"
    yield fault(
        "wrong" if needed > total else "unwise",
        "host-ram",
        f"{needed / 2**30:.0f} GiB of host RAM for {setup.ranks_per_node} ranks, "
        f"there are {total / 2**30:.0f}" + ("" if needed > total else f", {free / 2**30:.0f} of them free"),
        *edits,
        why="the optimizer state, and everything else that is offloaded, stays in host RAM"
        if keeps_state and in_pieces >= needed
        else "every rank builds the whole model in fp32 before sharding; out of RAM, the kernel kills a rank",
        change=change,
        then=then,
        file="yaml",
    )


# Faults of the environment variables that a launch from this shell passes to its ranks.

_ON = ("1", "true", "yes", "on", "detail")
_VARIABLES = {  # variables that cost time: finding, severity, reason
    "NCCL_P2P_DISABLE": (
        "nccl-p2p-disabled",
        "wrong",
        "GPUs of a machine then communicate through the host's RAM instead of NVLink or PCIe",
    ),
    "NCCL_SHM_DISABLE": (
        "nccl-shm-disabled",
        "unwise",
        "GPUs of a machine without peer access then communicate through network sockets",
    ),
    "NCCL_IB_DISABLE": (
        "nccl-ib-disabled",
        "wrong",
        "nodes then communicate by TCP over Ethernet instead of InfiniBand or RoCE",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "cuda-launch-blocking",
        "wrong",
        "the host waits for each kernel: nothing overlaps, and steps take several times as long",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (
        "distributed-debug",
        "wrong",
        "PyTorch then compares shapes on all ranks before every collective",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "no-memory-caching",
        "wrong",
        "every tensor then needs a cudaMalloc and a cudaFree, which stall the GPU",
    ),
    "TORCHDYNAMO_DISABLE": ("dynamo-disabled", "wrong", "--kernels compiled then compiles nothing"),
}
_LEFT_OVER = (
    "ACCELERATE_USE_",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
)


def environment_faults(case: Case) -> Iterator[Finding]:
    has_effect = {
        "NCCL_P2P_DISABLE": case.num_ranks > 1,
        "NCCL_SHM_DISABLE": case.num_ranks > 1,
        "NCCL_IB_DISABLE": case.num_ranks > case.gpus_per_node or case.num_machines > 1,
        "TORCHDYNAMO_DISABLE": case.flags.compiles,
    }
    for name, (slug, severity, why) in _VARIABLES.items():
        value = case.host.variables.get(name, "")
        if value.lower() in _ON and has_effect.get(name, True):
            sentence = f"{name}={value} in the environment"
            yield fault(severity, slug, sentence, why=why, change=f"unset {name}", key=name)
    for check in (_left_over, _threads):
        yield from check(case)


def _left_over(case: Case) -> Iterator[Finding]:
    names = sorted(name for name in case.host.variables if name.startswith(_LEFT_OVER))
    if names:
        yield wrong(
            "launcher-variables",
            f"{', '.join(names)} in the environment",
            why="accelerate's launcher sets these for its ranks; a value that it does not set again for this "
            "file reaches the ranks and overrides the file",
            change=f"unset {' '.join(names)}",
            key=names[0],
        )


def _threads(case: Case) -> Iterator[Finding]:
    """Report one thread for each rank that computes on the CPU: launchers set 1 if the shell sets nothing."""
    name, cores = "OMP_NUM_THREADS", case.host.num_cores or 0
    value = case.host.variables.get(name, "")
    ranks = min(case.num_processes or case.num_ranks, case.gpus_per_node)
    threads = cores // ranks
    offloads = case.offload("offload_optimizer") != "none" or is_true(case.fsdp.get("fsdp_offload_params"))
    on_cpu = offloads or not case.host.gpu_names or is_of_cpus(case.config)
    if case.host.is_meant and on_cpu and threads > 1 and value in ("", "1"):
        yield slow(
            "one-thread-per-rank",
            f"{name} is {value or 'unset (the launcher sets 1)'}: {ranks} ranks on {cores} cores",
            why="AdamW on the host, or a whole rank without a GPU, then uses one core; `slm compare` "
            "distributes the cores",
            change=f"{name}={threads}",
            key=name,
        )
