"""Gpu and Machine: the peak rates of GPU types, and the GPUs of this machine."""

import json
import os
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from slm_toolkit.base.typed_files import csv_rows


@dataclass(frozen=True)
class Gpu:
    """Peak rates and memory of one GPU type, from `source` and `memory_source`."""

    name: str
    "canonical name, such as h100-80gb"
    driver_name_pattern: str
    "regular expression that matches part of the driver's name"
    architecture: str
    "ampere, ada, hopper or blackwell; geforce for the consumer cards of all of them"
    dense_bf16_flops_per_second: float
    "without sparsity"
    measured_matmul_flops_per_second: float | None
    """the best rate in ml-engineering's search over bf16 shapes (MAMF); None: not measured. GeForce: the rate
    of one large product, or FlashAttention's, over 0.94: what one product reaches of the best that a search
    finds (an A100 246 of 271 TFLOP/s, a B200 1696 of 1745, in zzc0208's public table)"""
    fp32_flops_per_second: float
    "without tensor cores"
    num_sms: int
    "streaming multiprocessors"
    vendor_memory_gb: int
    "the vendor's figure: GiB for some GPUs, 10^9 bytes for others"
    memory_gib: float
    "total memory that PyTorch reports, to 0.01 GiB (drivers differ by 0.1)"
    memory_bytes_per_second: float
    link_bytes_per_second: float
    "rate to the other GPUs of its node, one way: NVLink, else PCIe"
    node_network_bytes_per_second: float | None
    "network rate of a whole AWS node, one way (p4d, p5, p5en); None: unknown"
    speed_evidence: Literal["fitted", "compared", "none"]
    """fitted: constants of the speed form are fitted to many published runs on this GPU type; compared: a few
    published runs; none: no published run"""
    source: str
    memory_source: str

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)

    @property
    def has_float8(self) -> bool:
        """Whether its tensor cores multiply float8: compute capability 8.9 and above."""
        return self.architecture != "ampere" and self.name != "rtx-3090"


@dataclass(frozen=True)
class Machine:
    """The GPUs that processes started from here will see."""

    num_gpus: int
    gpu: str | None
    "the driver's name of the first GPU, or the options with which Slurm selects one; None without a GPU"


NVIDIA_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
_OTHER_FILES = ("/dev/kfd", "/dev/nvmap")
"files of AMD's driver and of NVIDIA's for Jetson"


def has_driver() -> bool:
    """Return whether a GPU's driver is here. Without its files torch.cuda finds no GPU."""
    return any(Path(file).exists() for file in (*NVIDIA_FILES, *_OTHER_FILES))


@cache
def gpus() -> tuple[Gpu, ...]:
    return csv_rows(Path(__file__).parent / "gpus.csv", Gpu)


@cache
def find_gpu(driver_name: str | None) -> Gpu | None:
    """Return the Gpu for a driver's name such as "NVIDIA H100 80GB HBM3"; None for an unknown name.

    If several patterns match ("GH200" contains "H200"), the longest match wins. Returns None for a MIG slice.
    """
    matches = [
        (len(match[0]), gpu)
        for gpu in gpus()
        if driver_name
        and "MIG" not in driver_name
        and (match := re.search(rf"(?:{gpu.driver_name_pattern})", driver_name))
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def gpu_of_name(name: str, *, count: str = "") -> Gpu:
    """Return the Gpu for a canonical name in any spelling (`rtx-4090`, `RTX 4090`, `4090`) or a driver name.

    Raises ValueError for an unknown name, with the closest names, each followed by `count`.
    """
    gpu = _named_gpu(name)
    if gpu is not None:
        return gpu
    names = [gpu.name for gpu in gpus()]
    canonical = re.sub(r"[\s_]+", "-", name.strip().lower())
    # prefixes first: to get_close_matches, "h100" is closer to "h200" than to "h100-80gb"
    with_prefix = [gpu_name for gpu_name in names if gpu_name.startswith(canonical)]
    close = with_prefix or get_close_matches(canonical, names, n=1, cutoff=0.4)
    question = f"did you mean {' or '.join(gpu_name + count for gpu_name in close)}? " if close else ""
    raise ValueError(f"unknown GPU {name!r}\nhint: {question}There are {', '.join(names)}")


def gpus_of_name(name: str, *, count: str = "") -> tuple[Gpu, ...]:
    """Return the Gpu for a name as in `gpu_of_name`, or all types of a family such as `A100`.

    Raises ValueError for an unknown name.
    """
    if (gpu := _named_gpu(name)) is not None:
        return (gpu,)
    typed = _typed(name)
    family = tuple(gpu for gpu in gpus() if gpu.name.partition("-")[0] == typed != "rtx")
    return family or (gpu_of_name(name, count=count),)


def _named_gpu(name: str) -> Gpu | None:
    gpu_by_name = {gpu.name.replace("-", ""): gpu for gpu in gpus()}
    typed = _typed(name)
    named_gpu = gpu_by_name.get(typed) or gpu_by_name.get(f"rtx{typed}")
    if named_gpu is not None:
        return named_gpu
    patterns = ((gpu, rf"(NVIDIA )?(GeForce )?({gpu.driver_name_pattern})") for gpu in gpus())
    return next((gpu for gpu, pattern in patterns if re.fullmatch(pattern, name)), None)


def _typed(name: str) -> str:
    """Return a name in lower case without separators and the vendor's words."""
    return re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")


def gpus_and_count(text: str) -> tuple[tuple[str, ...], tuple[int, ...], float | None] | None:
    """Parse `h100-80gb:8,16@2.49` or `8xH100-80GB` into canonical names, GPU counts and dollars per hour.

    There are several names for a family, as in `A100:8`. Counts may be empty, and dollars None. Returns None
    for another form; raises ValueError for an unknown GPU.
    """
    form = r"(?:(\d+)\s*[x*]\s*)?([^:@]+)(?::(\d+(?:,\d+)*))?(?:@(\d+(?:\.\d+)?))?"
    match = re.fullmatch(form, text)
    if match is None or (match[1] and match[3]):
        return None
    counts = match[1] or match[3] or ""
    family = gpus_of_name(match[2], count=f":{counts}" if counts else "")
    return (
        tuple(gpu.name for gpu in family),
        tuple(map(int, counts.split(","))) if counts else (),
        float(match[4]) if match[4] else None,
    )


def this_machine() -> Machine:
    """Query torch in another process, so that this process needs neither torch nor a context on a GPU.

    Without a driver's file there is no GPU, and importing torch would take two seconds.
    """
    import subprocess

    if not has_driver():
        return Machine(0, None)

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
    """Return the driver's names of the NVIDIA GPUs that a child process would see, from NVML, not CUDA."""
    if not any(Path(file).exists() for file in NVIDIA_FILES):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles)
    except pynvml.NVMLError:  # the driver is missing or does not answer
        return ()
    return visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(names: tuple[str, ...], visible_devices: str | None) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects; CUDA stops reading at the first invalid index."""
    if visible_devices is None:
        return names
    selected = []
    for word in (word.strip() for word in visible_devices.split(",")):
        if re.fullmatch(r"(GPU|MIG)-.+", word) and names:
            selected.append(names[0])
        elif word.isdigit() and int(word) < len(names):
            selected.append(names[int(word)])
        else:
            break
    return tuple(selected)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
