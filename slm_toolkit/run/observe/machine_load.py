"""Measure the load of this rank's GPU and machine: other users, energy, throttling, memory."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import pynvml
import torch

THROTTLE_REASONS = {
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Bits of NVML's clocks event reasons that mean the GPU runs slower than it could.

An idle GPU, and clocks that a user has set (application, display, sync boost), are left out.
"""


@dataclass(frozen=True)
class GpuBefore:
    """NVML's handle of this rank's GPU, and its use by other processes before the run opened it."""

    handle: Any | None = None
    num_processes: int | None = None
    "compute processes, including those of other containers; None if the driver does not report it"
    used_bytes: int | None = None
    "used memory, without the driver's reserve; None if the driver does not report it"


def look_at_gpu(index: int) -> GpuBefore:
    """Return handle and use of `cuda:index`; without a GPU or NVML all values are None.

    Call it before this process has a CUDA context on that GPU. get_device_properties opens none: torch itself
    calls it for every GPU when it starts (_check_capability).
    """
    if not torch.cuda.is_available():
        return GpuBefore()
    return gpu_before(str(torch.cuda.get_device_properties(index).uuid))


def gpu_before(uuid: str) -> GpuBefore:
    """Return handle and use of a GPU or MIG instance. `uuid`: as torch writes it, without NVML's prefix."""
    names = (f"{prefix}-{uuid}" for prefix in ("GPU", "MIG"))
    handles = (_query_nvml(pynvml.nvmlDeviceGetHandleByUUID, name) for name in names)
    if not _nvml_works() or (handle := next(filter(None, handles), None)) is None:
        return GpuBefore()
    processes = _query_nvml(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # version 1 of the query counts the driver's reserve, hundreds of MiB, as used
    memory = _query_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return GpuBefore(
        handle,
        num_processes=None if processes is None else len(processes),
        used_bytes=None if memory is None else memory.used,
    )


def driver_version() -> dict[str, str]:
    """Return the version of NVIDIA's driver as an entry of a record's versions; empty without NVML."""
    version = _query_nvml(pynvml.nvmlSystemGetDriverVersion) if _nvml_works() else None
    return {} if version is None else {"NVIDIA driver": version}


def allocator_retries(device: torch.device) -> dict[str, int]:
    """Return how often torch's allocator freed its cache or gave up since the process began; empty on CPU.

    Each retry synchronizes the device, so retries slow a run down.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}


SECONDS_BETWEEN_READINGS = 0.1
"""NVML's energy counter changes every 20 to 100 ms. A reading makes the host wait for the driver twice, which
short steps would feel."""


class GpuWatch:
    """Energy and throttling of one GPU, read between training steps.

    A step that ends less than SECONDS_BETWEEN_READINGS after a reading has that reading. NVML reports the
    moment of the reading, not the whole step. Without a handle all values are None.
    """

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle
        self._zero_millijoules = self._energy_counter()
        self._of_steps: list[tuple[int | None, int | None]] = []
        "energy counter and throttle reasons of each step"
        self._read_at = -math.inf

    def sample(self) -> None:
        """Note the GPU's state. Call it once after each step, before the next one begins."""
        now = time.monotonic()
        if now - self._read_at >= SECONDS_BETWEEN_READINGS:
            self._read_at = now
            reasons = self._query(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
            reading = self._energy_counter(), reasons
        else:
            reading = self._of_steps[-1]
        self._of_steps.append(reading)

    def facts(self) -> dict[str, Any]:
        """Return fields of `run_record.GpuFacts`, None if unknown. Call it when the device is done.

        energy_joules: of the board per step, from one reading to the next. Drivers count it since Volta, but
        not for every MIG instance and virtual GPU. The counter changes every 20 to 100 ms
        (petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter), so only a sum over seconds is a measurement.
        throttle_reasons: the number of steps in whose reading each of THROTTLE_REASONS was active.
        hw_slowdown alone may be a clock change
        (docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html).
        """
        known = [None if None in values else values for values in zip(*self._of_steps, strict=True)]
        energy, masks = known or (None, None)
        if energy is not None:
            energy = self._zero_millijoules, *energy[:-1], self._energy_counter()
            energy = [(after - before) / 1000 for before, after in pairwise(energy)]
        if masks is not None:
            counts = {name: sum(bool(mask & bit) for mask in masks) for name, bit in THROTTLE_REASONS.items()}
            masks = {name: count for name, count in counts.items() if count}
        return {"energy_joules": energy, "throttle_reasons": masks}

    def _energy_counter(self) -> int | None:
        return self._query(pynvml.nvmlDeviceGetTotalEnergyConsumption)

    def _query(self, query: Callable[..., Any], *arguments: Any) -> Any | None:
        return None if self._handle is None else _query_nvml(query, self._handle, *arguments)


class HostWatch:
    """The load of other programs on this machine, and its free memory, since it was made.

    One rank's watch covers its whole machine. All ranks of the launch on this machine, their data loader
    workers and the launcher count as the launch; all other processes count as others.
    """

    def __init__(self) -> None:
        self._start_seconds = time.monotonic()
        self._busy_seconds = _busy_seconds_of_others()
        self._least_available_bytes = psutil.virtual_memory().available
        self._swapped_out_bytes = psutil.swap_memory().sout

    def sample(self) -> None:
        """Note the free memory. Call it between steps."""
        self._least_available_bytes = min(self._least_available_bytes, psutil.virtual_memory().available)

    def facts(self) -> dict[str, Any]:
        """Return the record's host_ram, and other_busy_cores: the mean number that others kept busy.

        The kernel counts in units of 10 ms, so only a mean over seconds is meaningful.
        """
        elapsed_seconds = time.monotonic() - self._start_seconds
        ram = {
            "total_bytes": psutil.virtual_memory().total,
            "least_available_bytes": self._least_available_bytes,
            "swapped_out_bytes": psutil.swap_memory().sout - self._swapped_out_bytes,
        }
        busy_seconds = _busy_seconds_of_others() - self._busy_seconds
        return {"host_ram": ram, "other_busy_cores": max(0.0, busy_seconds / elapsed_seconds)}


def _query_nvml(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """Return NVML's value; None if NVML raises an error.

    NVML has many errors for a missing value: not supported, no permission, function not found, invalid
    argument for a MIG instance. If a GPU falls off the bus, CUDA ends the run with a clearer error.
    """
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _nvml_works() -> bool:
    try:
        pynvml.nvmlInit()  # the first call loads the library; later calls only raise a counter
    except pynvml.NVMLError:  # no library, no driver, or they don't match
        return False
    return True


def _busy_seconds_of_others() -> float:
    """Return the busy CPU seconds of all cores since boot, without those of the launch's processes.

    A core is busy unless it is idle or waits for a disk. Stolen time counts as busy, because another guest of
    the host used the core. Interrupts belong to no process, so the launch's interrupts count as others, too.
    Inside a container, /proc/stat also counts the whole machine. The launch is the launcher and all its
    descendants; in a run of one rank, this process and its children, because its parent may be a shell with
    other jobs. When a parent waits for an ended child, the kernel adds the child's time to the parent's.
    """
    times = psutil.cpu_times()._asdict()
    # user and nice already include the seconds of guests
    others = ("idle", "iowait", "guest", "guest_nice")
    seconds = sum(count for name, count in times.items() if name not in others)
    this = psutil.Process()
    root = (int(os.environ.get("WORLD_SIZE", "1")) > 1 and this.parent()) or this
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # ended since it was listed
            used = process.cpu_times()
            seconds -= used.user + used.system + used.children_user + used.children_system
    return seconds
