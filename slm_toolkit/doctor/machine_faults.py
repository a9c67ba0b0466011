"""What the machine lacks that a strategy is to run on: disks, libraries, RAM, GPUs of the right kind."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from slm_toolkit.doctor.case import Case, shown
from slm_toolkit.doctor.deepspeed_faults import ZERO
from slm_toolkit.doctor.finding import Finding, fault, in_yaml, unwise, wrong
from slm_toolkit.predict.memory.host_ram import host_bytes
from slm_toolkit.predict.setup.setup import Setup

_WITHOUT_BF16 = r"V100|\bT4\b|P100|P40\b|RTX 20\d\d|GTX |TITAN|Quadro RTX"
"the driver's names of GPUs before Ampere"
_SMALL_SHM_BYTES = 2**28
"/dev/shm of containers by default is 64 MiB; NCCL takes about 10 MiB per pair of GPUs, workers a batch each"
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
    """The folders of NVMe offload, which only ZeRO-3 does; DeepSpeed makes them with all their parents."""
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
        sentence = f"{part} to nvme with nvme_path {shown(named)}"
        why = "DeepSpeed does not know where to write"
    else:
        sentence = f"nvme_path of {part} is {named}"
        path = Path(named).expanduser()
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            sentence += f": {there} " + ("can't be written" if there.is_dir() else "is no folder")
            why = "DeepSpeed makes the folder and fails at the first write"
        elif (kind := _file_system(there)) in (*_IN_RAM, *_OVER_A_NETWORK):
            severity, name = "unwise", "nvme-not-a-disk"
            sentence += f", on {kind}: " + ("in the host's RAM" if kind in _IN_RAM else "on a network")
            why = "offload to a disk is for what the RAM does not hold, and waits for each read"
            then = ", or device: cpu" if kind in _IN_RAM else ""
        elif (free := shutil.disk_usage(there).free) < needed:
            name, then = "nvme-space", " with room"
            sentence = f"{named} has {free / 2**30:.0f} GiB free, {case.spec.name} needs {needed / 2**30:.0f}"
            why = f"{num_bytes} bytes per parameter of all ranks of the machine lie there"
        else:
            return
    change = f"{part}.nvme_path: a folder on a local NVMe disk"
    key = f"{ZERO}.{part}.nvme_path"
    yield fault(severity, name, sentence, why=why, change=change, then=then, file="json", key=key)


def _file_system(folder: Path) -> str | None:
    """The kernel's word for what a folder lies on; None where it does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:  # no Linux
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
            "nvme offload, and libaio is not here",
            why="DeepSpeed compiles its async_io with it at the first use, and stops without",
            change="apt install libaio-dev, or yum install libaio-devel",
            file="json",
        )
    if case.zero_stage and case.offload("offload_optimizer") != "none" and case.host.has_compiler is False:
        yield wrong(
            "compiler-absent",
            "offload_optimizer, and there is no C++ compiler here",
            why="DeepSpeed compiles its CPU Adam at the first use, and stops without",
            change="apt install g++",
            file="json" if case.has_json else "yaml",
        )


def _gpus(case: Case) -> Iterator[Finding]:
    old = [name for name in dict.fromkeys(case.host.gpu_names) if re.search(_WITHOUT_BF16, name)]
    if old and case.flags.numerics != "fp32":
        yield wrong(
            "gpu-without-bf16",
            f"{', '.join(old)} with --numerics {case.flags.numerics}",
            why="GPUs before Ampere have no bf16 tensor cores and no FlashAttention-2: bf16 is emulated, "
            "slower than fp32",
            change="--numerics fp32, or another GPU",
        )


def _shm(case: Case) -> Iterator[Finding]:
    size = case.host.shm_bytes
    if size is not None and size < _SMALL_SHM_BYTES and len(case.host.gpu_names) > 1:
        yield unwise(
            "small-shm",
            f"/dev/shm has {size / 2**20:.0f} MiB",
            why="NCCL passes messages between a machine's GPUs through it, data workers their batches: both "
            "end with a bus error when it is full",
            change="docker run --shm-size=8g, or --ipc=host",
        )


def _quantized(case: Case) -> Iterator[Finding]:
    both = ("zero_quantized_weights", "zero_quantized_gradients")
    keys = [key for key in both if case.zero.get(key) is True]
    if keys and case.zero_stage == 3 and not case.host.gpu_names:
        yield wrong(
            "quantized-needs-gpu",
            f"{' and '.join(keys)} on a machine without GPUs",
            why='DeepSpeed has no CPU kernel for it: "This op had not been implemented on CPU backend"',
            change="run it on GPUs",
            file="json",
            key=f"{ZERO}.{keys[0]}",
        )


def host_ram_faults(case: Case, setup: Setup) -> Iterator[Finding]:
    """What the ranks of a node need against the RAM of `case.host`, where that is known."""
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
        then = ": rank 0 alone holds the whole model, each other rank its piece"
    elif keeps_state:
        change = "--strategy ds_zero3_nvme, more machines, or no offload: --gradient_checkpointing full first"
    elif strategy.is_fsdp2:
        change = "a pretrained model with fsdp_cpu_ram_efficient_loading: true, which rank 0 alone loads"
    else:
        change = "--strategy ds_zero3 with zero3_init_flag: true, which builds the model in pieces"
    yield fault(
        "wrong" if needed > total else "unwise",
        "host-ram",
        f"{needed / 2**30:.0f} GiB of host RAM for {setup.ranks_per_node} ranks, "
        f"there are {total / 2**30:.0f}" + ("" if needed > total else f", {free / 2**30:.0f} of them free"),
        *edits,
        why="the optimizer's state, and what else is offloaded, lies there"
        if keeps_state and in_pieces >= needed
        else "every rank builds the whole model in fp32 before it is sharded; the kernel then kills one",
        change=change,
        then=then,
        file="yaml",
    )
