"""Find faults of the machine and its environment: RAM, GPUs, environment variables."""

import re
from collections.abc import Iterator

from slm_toolkit.doctor.case import Case, is_of_cpus
from slm_toolkit.doctor.finding import Finding, Rule, fault, faults_by, slow
from slm_toolkit.predict.memory.machine import host_bytes
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.settings import is_true

_WITHOUT_BF16 = r"V100|\bT4\b|P100|P40\b|RTX 20\d\d|GTX |TITAN|Quadro RTX"
"names that the driver reports for GPUs before Ampere"
_SMALL_SHM_BYTES = 2**28
"containers have 64 MiB by default; NCCL needs about 10 MiB per pair of GPUs, each data worker one batch"

_OF_THE_HOST = (
    Rule(
        "wrong",
        "gpu-without-bf16",
        "gpu_names",
        lambda case, names: (
            re.search(_WITHOUT_BF16, " ".join(names))
            and case.flags.computes_in == "bf16"
            and not is_of_cpus(case.config)
        ),
        None,
        sentence="{case.host.gpu_names[0]} with --numerics {case.flags.numerics}",
        why="GPUs before Ampere have no bf16 tensor cores and no FlashAttention-2: bf16 is emulated, slower "
        "than fp32",
        change="--numerics fp16 (or fp32), or another GPU",
    ),
    Rule(
        "unwise",
        "small-shm",
        "shm_bytes",
        lambda case, size: size is not None and size < _SMALL_SHM_BYTES and len(case.host.gpu_names) > 1,
        None,
        sentence="/dev/shm has {value} bytes, less than 256 MiB",
        why="NCCL and the data workers send data through it; both crash with a bus error when it is full",
        change="docker run --shm-size=8g, or --ipc=host",
    ),
)


_SHELL = (  # variables that cost time: severity, finding, name, reason, when it has an effect (bool: always)
    (
        "wrong",
        "nccl-p2p-disabled",
        "NCCL_P2P_DISABLE",
        "GPUs of a machine then communicate through the host's RAM instead of NVLink or PCIe",
        lambda case: case.num_ranks > 1,
    ),
    (
        "unwise",
        "nccl-shm-disabled",
        "NCCL_SHM_DISABLE",
        "GPUs of a machine without peer access then communicate through network sockets",
        lambda case: case.num_ranks > 1,
    ),
    (
        "wrong",
        "nccl-ib-disabled",
        "NCCL_IB_DISABLE",
        "nodes then communicate by TCP over Ethernet instead of InfiniBand or RoCE",
        lambda case: case.num_ranks > case.gpus_per_node or case.num_machines > 1,
    ),
    (
        "wrong",
        "cuda-launch-blocking",
        "CUDA_LAUNCH_BLOCKING",
        "the host waits for each kernel: nothing overlaps, and steps take several times as long",
        bool,
    ),
    (
        "wrong",
        "distributed-debug",
        "TORCH_DISTRIBUTED_DEBUG",
        "PyTorch then compares shapes on all ranks before every collective",
        bool,
    ),
    (
        "wrong",
        "no-memory-caching",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every tensor then needs a cudaMalloc and a cudaFree, which stall the GPU",
        bool,
    ),
    (
        "wrong",
        "dynamo-disabled",
        "TORCHDYNAMO_DISABLE",
        "--kernels compiled then compiles nothing",
        lambda case: case.flags.compiles,
    ),
)
_OF_THE_SHELL = [  # a launch from this shell passes its variables to the ranks
    Rule(
        severity,
        name,
        variable,
        lambda case, value, matters=matters: (
            str(value).lower() in ("1", "true", "yes", "on", "detail") and matters(case)
        ),
        None,
        why,
        sentence="{key}={value} in the environment",
        change=f"unset {variable}",
    )
    for severity, name, variable, why, matters in _SHELL
]


def machine_faults(case: Case) -> Iterator[Finding]:
    if case.host.is_meant:
        yield from faults_by(_OF_THE_HOST, case, vars(case.host), edit=None)


def environment_faults(case: Case) -> Iterator[Finding]:
    yield from faults_by(_OF_THE_SHELL, case, case.host.variables, edit=None)
    # one thread for each rank that computes on the CPU: launchers set 1 if the shell sets nothing
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


def host_ram_faults(case: Case, setup: Setup) -> Iterator[Finding]:
    """Report ranks that need more host RAM than a node has; nothing is checked if the RAM is unknown."""
    total = case.host.ram_bytes
    if total is None:
        return
    setup, free = setup.launched, case.host.free_ram_bytes
    needed, left = host_bytes(setup), total if free is None else free
    if needed <= left:
        return
    is_enough = setup.strategy.zero_stage == 3 and host_bytes(setup, zero_init=True) <= left
    yield fault(
        "wrong" if needed > total else "unwise",
        "host-ram",
        f"{needed / 2**30:.0f} GiB of host RAM for {setup.ranks_per_node} ranks, "
        f"there are {total / 2**30:.0f}" + ("" if needed > total else f", {free / 2**30:.0f} of them free"),
        why="every rank builds the whole model in fp32 before sharding, and what is offloaded stays in host "
        "RAM; out of RAM, the kernel kills a rank",
        change=("" if is_enough else "--strategy ds_zero3 or ds_zero3_nvme with ") + "zero3_init_flag: true",
        file="yaml",
    )
