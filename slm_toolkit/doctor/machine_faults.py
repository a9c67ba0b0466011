"""Find faults of the machine and its environment: disks, libraries, RAM, GPUs, environment variables."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.doctor.case import Case, as_written, is_true
from slm_toolkit.doctor.deepspeed_faults import ZERO
from slm_toolkit.doctor.finding import Finding, fault, in_yaml, slow, unwise, wrong
from slm_toolkit.predict.memory.machine import host_bytes
from slm_toolkit.predict.setup.setup import Setup

_WITHOUT_BF16 = r"V100|\bT4\b|P100|P40\b|RTX 20\d\d|GTX |TITAN|Quadro RTX"
"names that the driver reports for GPUs before Ampere"
_SMALL_SHM_BYTES = 2**28
"containers have 64 MiB by default; NCCL needs about 10 MiB per pair of GPUs, each data worker one batch"
_IN_RAM = ("tmpfs", "ramfs")
_OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "lustre", "beegfs", "ceph", "fuse.sshfs")
_BYTES_ON_DISK = {"offload_optimizer": 12, "offload_param": 2}
"per parameter: fp32 master weights and moments; bf16 weights"


def machine_faults(case: Case) -> Iterator[Finding]:
    if not case.host.is_meant:
        return
    for check in (_disk, _libraries, _gpus, _shm, _quantized):
        yield from check(case)


def _disk(case: Case) -> Iterator[Finding]:
    """Check the folders of NVMe offload (ZeRO-3 only); DeepSpeed creates them with all their parents."""
    if case.zero_stage != 3 or not case.has_json:
        return
    needed = 0
    for part, num_bytes in _BYTES_ON_DISK.items():
        if case.offload(part) == "nvme":
            needed += num_bytes * case.spec.num_params
            yield from _folder(case, part, num_bytes, needed)


def _folder(case: Case, part: str, num_bytes: int, needed: int) -> Iterator[Finding]:
    named = case.zero[part].get("nvme_path")
    severity, name, then = "wrong", "nvme-path", ""
    if not isinstance(named, str) or named == "auto":
        sentence = f"{part} to nvme with nvme_path {as_written(named)}"
        why = "DeepSpeed does not know where to write"
    else:
        sentence = f"nvme_path of {part} is {named}"
        path = Path(named).expanduser()
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            sentence += f": {existing} " + ("is not writable" if existing.is_dir() else "is not a folder")
            why = "DeepSpeed creates the folder and fails at the first write"
        elif (kind := _file_system(existing)) in (*_IN_RAM, *_OVER_A_NETWORK):
            severity, name = "unwise", "nvme-not-a-disk"
            sentence += f" on {kind}, " + ("in the host's RAM" if kind in _IN_RAM else "on a network")
            why = "offload to a disk is meant for a state that exceeds the RAM, and it waits for each read"
            then = ", or device: cpu" if kind in _IN_RAM else ""
        elif (free := shutil.disk_usage(existing).free) < needed:
            name, then = "nvme-space", " with enough space"
            sentence = (
                f"{named} has {free / 2**30:.0f} GiB free, {case.spec.name} needs {needed / 2**30:.0f} GiB"
            )
            why = f"all ranks of the machine together write {num_bytes} bytes per parameter there"
        else:
            return
    change = f"{part}.nvme_path: a folder on a local NVMe disk"
    key = f"{ZERO}.{part}.nvme_path"
    yield fault(severity, name, sentence, why=why, change=change, then=then, file="json", key=key)


def _file_system(folder: Path) -> str | None:
    """Return the type of the file system that contains a folder; None if it is not known."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:  # not Linux
        return None
    path = str(folder.resolve())
    holding = [
        (len(words[1]), words[2])
        for words in mounts
        if path == words[1] or path.startswith(words[1].rstrip("/") + "/")
    ]
    return max(holding)[1] if holding else None


def _libraries(case: Case) -> Iterator[Finding]:
    devices = {case.offload(part) for part in _BYTES_ON_DISK}
    if case.zero_stage == 3 and "nvme" in devices and case.host.has_libaio is False:
        yield wrong(
            "libaio-absent",
            "nvme offload needs libaio, which is not installed",
            why="DeepSpeed compiles async_io with it at the first use and stops if it is missing",
            change="apt install libaio-dev, or yum install libaio-devel",
            file="json",
        )
    if case.zero_stage and case.offload("offload_optimizer") != "none" and case.host.has_compiler is False:
        yield wrong(
            "compiler-absent",
            "offload_optimizer needs a C++ compiler, which is not installed",
            why="DeepSpeed compiles its CPU Adam at the first use and stops if there is no compiler",
            change="apt install g++",
            file="json" if case.has_json else "yaml",
        )


def _gpus(case: Case) -> Iterator[Finding]:
    old = [name for name in dict.fromkeys(case.host.gpu_names) if re.search(_WITHOUT_BF16, name)]
    if old and case.flags.computes_in == "bf16":
        yield wrong(
            "gpu-without-bf16",
            f"{', '.join(old)} with --numerics {case.flags.numerics}",
            why="GPUs before Ampere have no bf16 tensor cores and no FlashAttention-2: bf16 is emulated, "
            "slower than fp32",
            change="--numerics fp16 (or fp32), or another GPU",
        )
    elif old and case.flags.attn_implementation == "flash_attention_2":
        yield wrong(
            "gpu-without-flash-attention",
            f"{', '.join(old)} with --attn_implementation flash_attention_2",
            why="FlashAttention-2 needs Ampere or a later GPU",
            change="--attn_implementation sdpa",
        )


def _shm(case: Case) -> Iterator[Finding]:
    size = case.host.shm_bytes
    if size is not None and size < _SMALL_SHM_BYTES and len(case.host.gpu_names) > 1:
        yield unwise(
            "small-shm",
            f"/dev/shm has {size / 2**20:.0f} MiB",
            why="NCCL and the data workers send data through it; both crash with a bus error when it is full",
            change="docker run --shm-size=8g, or --ipc=host",
        )


def _quantized(case: Case) -> Iterator[Finding]:
    both = ("zero_quantized_weights", "zero_quantized_gradients")
    keys = [key for key in both if case.zero.get(key) is True]
    if keys and case.zero_stage == 3 and not case.host.gpu_names:
        yield wrong(
            "quantized-needs-gpu",
            f"{' and '.join(keys)} on a machine without GPUs",
            why='DeepSpeed has no CPU kernel for this: "This op had not been implemented on CPU backend"',
            change="run it on GPUs",
            file="json",
            key=f"{ZERO}.{keys[0]}",
        )


def host_ram_faults(case: Case, setup: Setup) -> Iterator[Finding]:
    """Report ranks that need more host RAM than a node has; nothing is checked if the RAM is unknown."""
    total, free = case.host.ram_bytes, case.host.free_ram_bytes
    if total is None:
        return
    setup = setup.launched
    placement, strategy = setup.placement, setup.strategy
    needed, left = host_bytes(setup), total if free is None else free
    if needed <= left:
        return
    in_pieces = host_bytes(setup, zero_init=True)
    keeps_state = placement.optimizer_device == "cpu" or placement.parameter_device == "cpu"
    edits, change, then = [], None, ""
    if strategy.zero_stage == 3 and in_pieces <= left:
        edits = [in_yaml("deepspeed_config.zero3_init_flag", True)]
        then = ": only rank 0 then builds the whole model, and each other rank its shard"
    elif keeps_state:
        change = "--strategy ds_zero3_nvme, more machines, or --gradient_checkpointing full without offload"
    elif strategy.is_fsdp2:
        change = "a pretrained model with fsdp_cpu_ram_efficient_loading: true, which only rank 0 loads"
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

_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class _Variable:
    """An environment variable that costs time if it has one of these values."""

    name: str
    values: tuple[str, ...]
    slug: str
    severity: str
    why: str
    applies: Callable[[Case], bool] = lambda case: True


_VARIABLES = (
    _Variable(
        *("NCCL_P2P_DISABLE", _ON, "nccl-p2p-disabled", "wrong"),
        why="GPUs of a machine then communicate through the host's RAM instead of NVLink or PCIe",
        applies=lambda case: case.num_ranks > 1,
    ),
    _Variable(
        *("NCCL_SHM_DISABLE", _ON, "nccl-shm-disabled", "unwise"),
        why="GPUs of a machine without peer access then communicate through network sockets",
        applies=lambda case: case.num_ranks > 1,
    ),
    _Variable(
        *("NCCL_IB_DISABLE", _ON, "nccl-ib-disabled", "wrong"),
        why="nodes then communicate by TCP over Ethernet instead of InfiniBand or RoCE",
        applies=lambda case: case.num_ranks > case.gpus_per_node or case.num_machines > 1,
    ),
    _Variable(
        *("NCCL_DEBUG", ("info", "trace"), "nccl-debug", "unwise"),
        why="each rank writes a long log; TRACE slows every collective",
    ),
    _Variable(
        *("CUDA_LAUNCH_BLOCKING", _ON, "cuda-launch-blocking", "wrong"),
        why="the host waits for each kernel: nothing overlaps, and steps take several times as long",
    ),
    _Variable(
        *("TORCH_DISTRIBUTED_DEBUG", ("detail",), "distributed-debug", "wrong"),
        why="PyTorch then compares shapes on all ranks before every collective",
    ),
    _Variable(
        *("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "no-memory-caching", "wrong"),
        why="every tensor then needs a cudaMalloc and a cudaFree, which stall the GPU",
    ),
    _Variable(
        *("TORCHDYNAMO_DISABLE", _ON, "dynamo-disabled", "wrong"),
        why="--torch_compile then compiles nothing",
        applies=lambda case: case.flags.torch_compile,
    ),
)
_LEFT_OVER = (
    *("ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_DYNAMO_", "FSDP_", "PARALLELISM_CONFIG_"),
)


def environment_faults(case: Case) -> Iterator[Finding]:
    for variable in _VARIABLES:
        value = case.host.variables.get(variable.name, "")
        if value.lower() in variable.values and variable.applies(case):
            yield fault(
                variable.severity,
                variable.slug,
                f"{variable.name}={value} in the environment",
                why=variable.why,
                change=f"unset {variable.name}",
                key=variable.name,
            )
    for check in (_interfaces, _left_over, _allocator, _threads):
        yield from check(case)


def _interfaces(case: Case) -> Iterator[Finding]:
    interfaces = case.host.interfaces
    if interfaces is None or not case.host.is_meant:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = case.host.variables.get(name, "")
        if not value or value.startswith("^"):  # NCCL: all interfaces except these
            continue
        is_exact = value.startswith("=") or name.startswith("GLOO")
        names = [word for word in value.removeprefix("=").split(",") if word]
        if not any(
            interface == named or (not is_exact and interface.startswith(named))
            for named in names
            for interface in interfaces
        ):
            yield wrong(
                "interface-absent",
                f"{name}={value}, but this machine has {', '.join(interfaces)}",
                why="the ranks find no network interface and fail or hang at the first collective",
                change=f"unset {name}, or name an interface of this machine",
                key=name,
            )


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


def _allocator(case: Case) -> Iterator[Finding]:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    values = {name: case.host.variables[name] for name in (new, old) if case.host.variables.get(name)}
    if len(values) == 2 and values[new] != values[old]:
        yield unwise(
            "allocator-set-twice",
            f"{new}={values[new]} and {old}={values[old]}",
            why="the setting has two values: some parts of PyTorch read the first name, some the second",
            change=f"unset {old}, the older name",
            key=old,
        )
    for name, value in values.items():
        if "expandable_segments:false" in value.lower().replace(" ", ""):
            yield slow(
                "segments-not-expandable",
                f"{name}={value}",
                why="memory segments that can't grow leave unused gaps when batches differ in size",
                change=f"{name}=expandable_segments:True",
                key=name,
            )


def _threads(case: Case) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS; accelerate's launcher and torchrun set it to 1 if the shell does not set it."""
    cores, name = case.host.num_cores, "OMP_NUM_THREADS"
    if not case.host.is_meant or cores is None:
        return
    threads = case.host.variables.get(name, "")
    ranks = -(-(case.num_processes or 1) // case.num_machines)
    if case.host.gpu_names and case.gpus_given:
        ranks = min(case.num_ranks, case.gpus_per_node)
    offloads = case.offload("offload_optimizer") != "none" or is_true(case.fsdp.get("fsdp_offload_params"))
    if threads.isdigit() and int(threads) * ranks > cores and int(threads) > 1:
        yield unwise(
            "too-many-threads",
            f"{name}={threads} for {ranks} ranks on {cores} cores",
            why="more threads than cores slow each other down",
            change=f"{name}={max(1, cores // ranks)}",
            key=name,
        )
    elif (offloads or not case.host.gpu_names) and cores >= 2 * ranks and threads in ("", "1"):
        subject = "AdamW" if case.host.gpu_names else "every rank"
        yield slow(
            "one-thread-per-rank",
            f"{name} is {threads or 'unset (the launcher sets 1)'}: {ranks} ranks on {cores} cores",
            why=f"{subject} uses one core, and other cores stay idle; `slm compare` distributes them",
            change=f"{name}={cores // ranks}",
            key=name,
        )
