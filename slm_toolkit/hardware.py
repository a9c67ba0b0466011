"""Gpu, Price and Machine: what hardware can do, what it costs, and what is in this machine."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Gpu:
    """Peak figures of one GPU type, from the source named."""

    name: str
    "canonical, as in h100-80gb"
    driver_name_pattern: str
    "regular expression found in the name that the driver gives"
    dense_bf16_flops_per_second: float
    "without sparsity"
    memory_gb: float
    "vendor's GB, 1e9 bytes"
    memory_bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Price:
    """What one GPU costs for an hour."""

    usd_per_gpu_hour: float
    provider: str
    instance: str
    kind: str
    "on-demand, community (private hosts), spot, reserved, or given (by the user)"
    as_of: str | None
    source: str

    def __str__(self) -> str:
        if self.kind == "given":
            return f"${self.usd_per_gpu_hour:g} per GPU-hour, {self.source}"
        dollars = f"${self.usd_per_gpu_hour:.2f} per GPU-hour"
        return f"{dollars}, {self.provider} {self.kind}, {self.as_of} ({self.source})"


@dataclass(frozen=True)
class Machine:
    """The GPUs that processes started from here will see."""

    num_gpus: int
    gpu: str | None
    "the driver's name of the first; None without"


@cache
def gpus() -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name=row["name"],
            driver_name_pattern=row["driver_name_pattern"],
            dense_bf16_flops_per_second=float(row["dense_bf16_tflops"]) * 1e12,
            memory_gb=float(row["memory_gb"]),
            memory_bytes_per_second=float(row["memory_tb_per_second"]) * 1e12,
            source=row["source"],
        )
        for row in _rows("gpus.csv")
    )


def find_gpu(driver_name: str | None) -> Gpu | None:
    """The Gpu that a driver's name such as "NVIDIA H100 80GB HBM3" means; None for an unknown one.

    Where several patterns match ("GH200" holds "H200"), the longest match is meant.
    """
    matches = [
        (len(match[0]), gpu)
        for gpu in gpus()
        if driver_name and (match := re.search(rf"(?:{gpu.driver_name_pattern})", driver_name))
    ]
    return max(matches, key=lambda found: found[0])[1] if matches else None


def find_price(driver_name: str | None, *, usd_per_gpu_hour: float | None) -> Price | None:
    """The user's own price, else our table's newest on-demand price (of one day: the lowest), else None."""
    if usd_per_gpu_hour is not None:
        return Price(usd_per_gpu_hour, "", "", "given", None, "given by --usd_per_gpu_hour")
    gpu = find_gpu(driver_name)
    if gpu is None:
        return None
    on_demand = [row for row in _rows("prices.csv") if row["gpu"] == gpu.name and row["kind"] == "on-demand"]
    if not on_demand:
        return None
    newest = max(row["as_of"] for row in on_demand)
    row = min(
        (row for row in on_demand if row["as_of"] == newest), key=lambda row: float(row["usd_per_gpu_hour"])
    )
    names = ("provider", "instance", "kind", "as_of", "source")
    return Price(float(row["usd_per_gpu_hour"]), **{name: row[name] for name in names})


def this_machine() -> Machine:
    """Ask torch in a process of its own: this one stays without torch, and without a context on any GPU."""
    program = (
        "import json, torch; n = torch.cuda.device_count(); "
        "print(json.dumps([n, torch.cuda.get_device_name(0) if n else None]))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if answer.returncode != 0:
        raise RuntimeError(f"torch does not work here:\n{answer.stderr}")
    num_gpus, gpu = json.loads(answer.stdout.splitlines()[-1])
    return Machine(num_gpus, gpu)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (_DATA / name).open(newline="") as file:
        return tuple(csv.DictReader(file))
