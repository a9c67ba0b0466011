"""Gpu and Machine: what hardware can do, and what is in this machine."""

import json
import os
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from slm_toolkit.base.typed_files import csv_rows


@dataclass(frozen=True)
class Gpu:
    """Peak figures of one GPU type, from the source named."""

    name: str
    "canonical, as in h100-80gb"
    driver_name_pattern: str
    "regular expression found in the name that the driver gives"
    architecture: str
    "ampere, ada, hopper or blackwell; geforce for the consumer cards of all of them"
    dense_bf16_flops_per_second: float
    "without sparsity"
    measured_matmul_flops_per_second: float | None
    "the best that ml-engineering's search over bf16 shapes found (MAMF); None where nobody looked"
    fp32_flops_per_second: float
    "without tensor cores"
    num_sms: int
    "streaming multiprocessors"
    vendor_memory_gb: int
    "as the vendor says: GiB of some, 10^9 bytes of others"
    memory_gib: float
    "what PyTorch reports as total, to 0.01 GiB (drivers differ by 0.1)"
    memory_bytes_per_second: float
    link_bytes_per_second: float
    "to the other GPUs of its node, one way: NVLink, else PCIe"
    node_network_bytes_per_second: float | None
    "of a whole node, one way, as AWS rents it (p4d, p5, p5en); None where we know none"
    source: str
    memory_source: str

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)


@dataclass(frozen=True)
class Machine:
    """The GPUs that processes started from here will see."""

    num_gpus: int
    gpu: str | None
    "the driver's name of the first, or the options by which Slurm is to choose one; None without"


@cache
def gpus() -> tuple[Gpu, ...]:
    return csv_rows(Path(__file__).parent / "gpus.csv", Gpu)


@cache
def find_gpu(driver_name: str | None) -> Gpu | None:
    """The Gpu that a driver's name such as "NVIDIA H100 80GB HBM3" means; None for an unknown one.

    Where several patterns match ("GH200" holds "H200"), the longest match is meant. A MIG slice is none.
    """
    matches = [
        (len(match[0]), gpu)
        for gpu in gpus()
        if driver_name
        and "MIG" not in driver_name
        and (match := re.search(rf"(?:{gpu.driver_name_pattern})", driver_name))
    ]
    return max(matches, key=lambda found: found[0])[1] if matches else None


def gpu_of_name(name: str, *, count: str = "") -> Gpu:
    """The Gpu of a name in any case: the canonical one (`rtx-4090`; `RTX 4090`, `4090`) or the driver's.

    Raises ValueError for others, with the names that are close, each followed by `count`.
    """
    known = {gpu.name.replace("-", ""): gpu for gpu in gpus()}
    typed = re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    found = known.get(typed) or known.get(f"rtx{typed}")
    if found is not None:
        return found
    for gpu in gpus():
        if re.fullmatch(rf"(NVIDIA )?(GeForce )?({gpu.driver_name_pattern})", name):
            return gpu
    names = [gpu.name for gpu in gpus()]
    canonical = re.sub(r"[\s_]+", "-", name.strip().lower())
    begun = [known for known in names if known.startswith(canonical)]  # "h100" is closer to "h200"
    close = begun or get_close_matches(canonical, names, n=1, cutoff=0.4)
    meant = f"did you mean {' or '.join(each + count for each in close)}? " if close else ""
    raise ValueError(f"unknown GPU {name!r}\nhint: {meant}There are {', '.join(names)}")


def gpu_and_count(text: str) -> tuple[str, tuple[int, ...], float | None] | None:
    """`h100-80gb:8,16@2.49` or `8xH100-80GB`: canonical name, counts if any, dollars per hour if any.

    None for what has another form. Raises ValueError for an unknown GPU.
    """
    form = r"(?:(\d+)\s*[x*]\s*)?([^:@]+)(?::(\d+(?:,\d+)*))?(?:@(\d+(?:\.\d+)?))?"
    match = re.fullmatch(form, text)
    if match is None or (match[1] and match[3]):
        return None
    counts = match[1] or match[3] or ""
    gpu = gpu_of_name(match[2], count=f":{counts}" if counts else "")
    return (
        gpu.name,
        tuple(map(int, counts.split(","))) if counts else (),
        float(match[4]) if match[4] else None,
    )


def this_machine() -> Machine:
    """Ask torch in a process of its own: this one stays without torch, and without a context on any GPU."""
    import subprocess

    program = (
        "import json, torch; n = torch.cuda.device_count(); "
        "print(json.dumps([n, torch.cuda.get_device_name(0) if n else None]))"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    if answer.returncode != 0:
        raise RuntimeError(f"torch does not work here:\n{answer.stderr}")
    num_gpus, gpu = json.loads(answer.stdout.splitlines()[-1])
    return Machine(num_gpus, gpu)


@cache
def gpus_here() -> tuple[str, ...]:
    """The driver's names of the NVIDIA GPUs that a process started from here sees; asks NVML, not CUDA."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles)
    except pynvml.NVMLError:  # no driver, or one that does not answer
        return ()
    return visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(names: tuple[str, ...], asked: str | None) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves: CUDA reads up to the first index that is none."""
    if asked is None:
        return names
    left = []
    for word in (word.strip() for word in asked.split(",")):
        if re.fullmatch(r"(GPU|MIG)-.+", word) and names:
            left.append(names[0])
        elif word.isdigit() and int(word) < len(names):
            left.append(names[int(word)])
        else:
            break
    return tuple(left)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
