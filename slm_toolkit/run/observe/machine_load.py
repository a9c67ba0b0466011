"""Measure the load of this rank's GPU and machine: other users, energy, clocks, throttling, memory."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
class GpuState:
    """The processes and the memory in use on a GPU.

    Read before this process has a CUDA context on the GPU, the state counts only other processes.
    """

    num_processes: int | None
    "compute processes, including those of other containers; None if the driver does not report it"
    used_bytes: int | None
    "used memory, without the driver's reserve; None if the driver does not report it"


@dataclass(frozen=True)
class GpuBefore:
    """NVML's handle of this rank's GPU, and the state of the GPU before the run opened it."""

    handle: Any | None
    state: GpuState


def look_at_gpu(index: int) -> GpuBefore:
    """Return handle and state of `cuda:index`; without a GPU or NVML all values are None.

    Call it before this process has a CUDA context on that GPU.
    """
    handle = None
    if torch.cuda.is_available():
        handle = open_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return GpuBefore(handle, gpu_state(handle) if handle is not None else GpuState(None, None))


def open_gpu(uuid: str | None) -> Any | None:
    """Return NVML's handle of a GPU or MIG instance; None without NVML or such a device.

    uuid: as NVML, `nvidia-smi -L` and CUDA_VISIBLE_DEVICES write it, or without the prefix, as in
    `str(torch.cuda.get_device_properties(local_rank).uuid)`. get_device_properties opens no context: torch
    itself calls it for every GPU when it starts (_check_capability), and torch's test_cuda_primary_ctx.py
    finds no context on unused GPUs afterwards.

    Returns None also for a board that is split into MIG instances, because its energy counter covers all of
    them.
    """
    if uuid is None or not _nvml_works():
        return None
    prefixed = uuid.startswith(("GPU-", "MIG-"))
    for name in [uuid] if prefixed else [f"GPU-{uuid}", f"MIG-{uuid}"]:
        handle = _query_nvml(pynvml.nvmlDeviceGetHandleByUUID, name)
        if handle is not None and not (name.startswith("GPU-") and _is_split(handle)):
            return handle
    return None


def driver_version() -> dict[str, str]:
    """Return the version of NVIDIA's driver as an entry of a record's versions; empty without NVML."""
    version = _query_nvml(pynvml.nvmlSystemGetDriverVersion) if _nvml_works() else None
    return {} if version is None else {"NVIDIA driver": version}


def gpu_state(handle: Any) -> GpuState:
    """Return a GPU's current state. This takes milliseconds, so don't call it inside a run's steps."""
    processes = _query_nvml(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # version 1 of the query counts the driver's reserve, hundreds of MiB, as used
    memory = _query_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return GpuState(
        num_processes=None if processes is None else len(processes),
        used_bytes=None if memory is None else memory.used,
    )


def allocator_retries(device: torch.device) -> dict[str, int]:
    """Return how often torch's allocator freed its cache or gave up since the process began; empty on CPU.

    Each retry synchronizes the device, so retries slow a run down.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}


SECONDS_BETWEEN_READINGS = 0.1
"""NVML's energy counter changes every 20 to 100 ms, its utilization every 1/6 to 1 s. A reading makes the
host wait for the driver four times, which short steps would feel."""


class GpuWatch:
    """Energy, throttling and SM clock of one GPU, read between training steps.

    Call `sample` outside of timed code, because reading takes time. A step that ends less than
    SECONDS_BETWEEN_READINGS after a reading has that reading. Without a handle all values are None.
    """

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle
        self._zero_millijoules = self._energy_counter()
        self._of_steps: list[_Reading] = []
        self._read_at = -math.inf

    def sample(self) -> None:
        """Note the GPU's state. Call it once after each step, before the next one begins."""
        now = time.monotonic()
        if now - self._read_at >= SECONDS_BETWEEN_READINGS:
            self._read_at = now
            self._of_steps.append(self._read())
        else:
            self._of_steps.append(self._of_steps[-1])

    def sample_last_again(self) -> None:
        """Read the last step's energy again, once the device has finished all its work."""
        if self._of_steps:
            self._of_steps[-1] = replace(self._of_steps[-1], energy_millijoules=self._energy_counter())

    @property
    def energy_joules(self) -> list[float] | None:
        """The board's energy per step, from one reading to the next; None if the driver does not count it.

        Drivers count it since Volta, but not for every MIG instance and virtual GPU. The counter changes
        every 20 to 100 ms (petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter). So most steps that are
        shorter have 0 joules, and only a sum over seconds is a measurement.
        """
        counter = _if_all_known([reading.energy_millijoules for reading in self._of_steps])
        if counter is None or self._zero_millijoules is None:
            return None
        return [(after - before) / 1000 for before, after in pairwise([self._zero_millijoules, *counter])]

    @property
    def throttle_reasons(self) -> dict[str, int] | None:
        """The number of steps in whose reading each of THROTTLE_REASONS was active, without zeros.

        NVML reports the moment of the reading, not the whole step. hw_slowdown alone may be a clock change
        (docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html).
        """
        reasons = _if_all_known([reading.reasons for reading in self._of_steps])
        if reasons is None:
            return None
        num_steps = {
            name: sum(bool(mask & bit) for mask in reasons) for name, bit in THROTTLE_REASONS.items()
        }
        return {name: num for name, num in num_steps.items() if num > 0}

    @property
    def clock_mhz(self) -> list[int] | None:
        """The SM clock in each step's reading."""
        return _if_all_known([reading.clock_mhz for reading in self._of_steps])

    @property
    def utilization(self) -> list[int] | None:
        """In each step's reading: percent of the driver's last sample period in which a kernel ran."""
        return _if_all_known([reading.utilization for reading in self._of_steps])

    def _read(self) -> "_Reading":
        rates = self._query(pynvml.nvmlDeviceGetUtilizationRates)
        return _Reading(
            energy_millijoules=self._energy_counter(),
            reasons=self._query(pynvml.nvmlDeviceGetCurrentClocksEventReasons),
            clock_mhz=self._query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            utilization=None if rates is None else rates.gpu,
        )

    def _energy_counter(self) -> int | None:
        return self._query(pynvml.nvmlDeviceGetTotalEnergyConsumption)

    def _query(self, query: Callable[..., Any], *arguments: Any) -> Any | None:
        return None if self._handle is None else _query_nvml(query, self._handle, *arguments)


@dataclass(frozen=True)
class _Reading:
    energy_millijoules: int | None
    "since the driver was loaded"
    reasons: int | None
    "bits of NVML's clocks event reasons"
    clock_mhz: int | None
    utilization: int | None
    "percent"


class HostWatch:
    """The load of other programs on this machine, and its free memory, since it was made.

    One rank's watch covers its whole machine. All ranks of the launch on this machine, their data loader
    workers and the launcher count as the launch; all other processes count as others.
    """

    def __init__(self) -> None:
        self._start_seconds = time.monotonic()
        self._busy_seconds = _system_busy_seconds()
        self._launch_seconds = _launch_busy_seconds()
        self._least_available_bytes = psutil.virtual_memory().available
        self._swapped_out_bytes = psutil.swap_memory().sout

    def sample(self) -> None:
        """Note the free memory. Call it between steps."""
        self._least_available_bytes = min(self._least_available_bytes, psutil.virtual_memory().available)

    def ram(self) -> dict[str, int]:
        """Return the machine's total_bytes, and the watch's least_available_bytes and swapped_out_bytes."""
        return {
            "total_bytes": psutil.virtual_memory().total,
            "least_available_bytes": self._least_available_bytes,
            "swapped_out_bytes": psutil.swap_memory().sout - self._swapped_out_bytes,
        }

    def other_busy_cores(self) -> float:
        """Return the mean number of cores that other programs kept busy since the watch began.

        A core is busy unless it is idle or waits for a disk. Stolen time counts as busy, because another
        guest of the host used the core. Interrupts belong to no process, so the launch's interrupts count as
        other programs, too. The kernel counts in units of 10 ms, so only a mean over seconds is meaningful.
        """
        elapsed_seconds = time.monotonic() - self._start_seconds
        busy_seconds = _system_busy_seconds() - self._busy_seconds
        launch_seconds = _launch_busy_seconds() - self._launch_seconds
        return max(0.0, (busy_seconds - launch_seconds) / elapsed_seconds)


def _if_all_known(values: list[int | None]) -> list[int] | None:
    """Return the values; None if there are none or any is unknown."""
    return None if None in values or not values else values


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


def _is_split(handle: Any) -> bool:
    """Return True if a board is in MIG mode."""
    mode = _query_nvml(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _system_busy_seconds() -> float:
    """Return the busy CPU seconds of all cores since boot, from /proc/stat.

    Inside a container, /proc/stat also counts the whole machine.
    """
    times = psutil.cpu_times()._asdict()
    not_busy = times["idle"] + times.get("iowait", 0.0)
    # user and nice already include the seconds of virtual machines
    counted_twice = times.get("guest", 0.0) + times.get("guest_nice", 0.0)
    return sum(times.values()) - not_busy - counted_twice


def _launch_busy_seconds() -> float:
    """Return the CPU seconds of the launch's processes, including ended ones.

    When a parent waits for an ended child, the kernel adds the child's time to the parent's.
    """
    seconds = 0.0
    for process in _launch_processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # ended since it was listed
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _launch_processes() -> list[psutil.Process]:
    """Return the launcher and all its descendants; in a run of one rank, this process and its children.

    A single rank's parent is not counted, because it may be a shell with other jobs.
    """
    this = psutil.Process()
    launcher = this.parent() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    root = launcher or this
    return [root, *root.children(recursive=True)]
