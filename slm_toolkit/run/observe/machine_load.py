"""Load on this rank's GPU and machine: other users, energy, clocks, throttling and free memory."""

import os
import time
from collections.abc import Callable
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

Idle is left out, and so are clocks that a user has set (application, display, sync boost).
"""


@dataclass(frozen=True)
class GpuState:
    """Who uses a GPU. Read before this process has a CUDA context on it, it counts other processes only."""

    num_processes: int | None
    "compute processes, of other containers too; None if the driver does not report it"
    used_bytes: int | None
    "without the driver's own reserve; None if the driver does not report it"


@dataclass(frozen=True)
class GpuBefore:
    """NVML's handle of this rank's GPU, and who used the GPU before the run opened it."""

    handle: Any | None
    state: GpuState


def look_at_gpu(index: int) -> GpuBefore:
    """Call it before this process has a context on `cuda:index`; all unknown without a GPU or NVML."""
    handle = None
    if torch.cuda.is_available():
        handle = open_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return GpuBefore(handle, gpu_state(handle) if handle is not None else GpuState(None, None))


def open_gpu(uuid: str | None) -> Any | None:
    """NVML's handle of a GPU or MIG instance; None without NVML or such a device.

    uuid: as NVML, `nvidia-smi -L` and CUDA_VISIBLE_DEVICES write it, or without the prefix, as in
    `str(torch.cuda.get_device_properties(local_rank).uuid)`. That call opens no context: torch's own
    initialization makes it for every GPU (_check_capability), after which test_cuda_primary_ctx.py finds no
    context on the GPUs not used.

    None also for a board that is split into MIG instances: its energy is that of all of them.
    """
    if uuid is None or not _nvml_works():
        return None
    prefixed = uuid.startswith(("GPU-", "MIG-"))
    for name in [uuid] if prefixed else [f"GPU-{uuid}", f"MIG-{uuid}"]:
        handle = _ask(pynvml.nvmlDeviceGetHandleByUUID, name)
        if handle is not None and not (name.startswith("GPU-") and _is_split(handle)):
            return handle
    return None


def gpu_state(handle: Any) -> GpuState:
    """Who uses a GPU now. The query takes milliseconds: call it at the start of a run, not in its steps."""
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # Version 1 of the query counts what the driver reserves, hundreds of MiB, as used.
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return GpuState(
        num_processes=None if processes is None else len(processes),
        used_bytes=None if memory is None else memory.used,
    )


def allocator_retries(device: torch.device) -> dict[str, int]:
    """How often torch's allocator freed its cache or gave up, since the process began; empty on CPU.

    Each retry synchronizes the device, so retries slow a run down.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}


class GpuWatch:
    """Energy, throttling and SM clock of one GPU, read between training steps.

    Call `sample` outside of timed code: a reading takes its own time. Without a handle all values are None.
    """

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle
        self.start()

    def start(self) -> None:
        """Set the energy counter to zero and forget earlier samples."""
        self._zero_millijoules = self._energy_counter()
        self._energy_millijoules: list[int | None] = []
        self._reasons: list[int | None] = []
        self._clock_mhz: list[int | None] = []
        self._utilization: list[int | None] = []

    def sample(self) -> None:
        """Read the GPU. Call it once after each step, before the next one begins."""
        self._energy_millijoules.append(self._energy_counter())
        self._reasons.append(self._clocks_event_reasons())
        self._clock_mhz.append(self._query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM))
        rates = self._query(pynvml.nvmlDeviceGetUtilizationRates)
        self._utilization.append(None if rates is None else rates.gpu)

    def sample_last_again(self) -> None:
        """Read the last step's energy again, once the device has finished all its work."""
        if self._energy_millijoules:
            self._energy_millijoules[-1] = self._energy_counter()

    @property
    def energy_joules(self) -> list[float] | None:
        """The board's energy per step, from one sample to the next; None where the driver has no counter.

        Drivers have one since Volta, though not for every MIG instance and virtual GPU. It moves every 20 to
        100 ms (petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter): of several shorter steps all but one
        read 0, and only a sum over seconds is a measurement.
        """
        counter = _known(self._energy_millijoules)
        if counter is None or self._zero_millijoules is None:
            return None
        return [(after - before) / 1000 for before, after in pairwise([self._zero_millijoules, *counter])]

    @property
    def throttle_reasons(self) -> dict[str, int] | None:
        """For each of THROTTLE_REASONS, after how many steps it was active; without those that never were.

        NVML reports the moment after the step, not the whole step. hw_slowdown alone may be a clock change
        (docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html).
        """
        reasons = _known(self._reasons)
        if reasons is None:
            return None
        num_steps = {
            name: sum(bool(mask & bit) for mask in reasons) for name, bit in THROTTLE_REASONS.items()
        }
        return {name: num for name, num in num_steps.items() if num > 0}

    @property
    def clock_mhz(self) -> list[int] | None:
        """The SM clock after each step."""
        return _known(self._clock_mhz)

    @property
    def utilization(self) -> list[int] | None:
        """Percent of the driver's last sample period (1/6 to 1 s) in which a kernel ran, after each step."""
        return _known(self._utilization)

    def _energy_counter(self) -> int | None:
        return self._query(pynvml.nvmlDeviceGetTotalEnergyConsumption)

    def _clocks_event_reasons(self) -> int | None:
        reasons = self._query(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        if reasons is None:  # drivers before 535 have it under its old name
            reasons = self._query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return reasons

    def _query(self, query: Callable[..., Any], *arguments: Any) -> Any | None:
        return None if self._handle is None else _ask(query, self._handle, *arguments)


class HostWatch:
    """How busy the rest of this machine was, and how full its memory, since `start`.

    One rank's watch covers its whole machine: all ranks of the launch there, their data loader workers and
    the launcher count as the launch, everything else as others.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._start_seconds = time.monotonic()
        self._busy_seconds = _system_busy_seconds()
        self._own_seconds = _launch_busy_seconds()
        self._least_available_bytes = psutil.virtual_memory().available
        self._swapped_out_bytes = psutil.swap_memory().sout

    def sample(self) -> None:
        """Note the free memory. Call it between steps."""
        self._least_available_bytes = min(self._least_available_bytes, psutil.virtual_memory().available)

    def ram(self) -> dict[str, int]:
        """The machine's total_bytes, its least_available_bytes at any sample, its swapped_out_bytes."""
        return {
            "total_bytes": psutil.virtual_memory().total,
            "least_available_bytes": self._least_available_bytes,
            "swapped_out_bytes": psutil.swap_memory().sout - self._swapped_out_bytes,
        }

    def other_busy_cores(self) -> float:
        """Mean number of cores that anything but this launch kept busy since `start`.

        A core is busy unless it is idle or waits for a disk; stolen time counts as busy, since another guest
        of the host had the core. Interrupts belong to no process, so the launch's own count here, too.
        The kernel counts in 10 ms, so the mean means something after seconds, not after milliseconds.
        """
        elapsed = time.monotonic() - self._start_seconds
        busy = _system_busy_seconds() - self._busy_seconds
        own = _launch_busy_seconds() - self._own_seconds
        return max(0.0, (busy - own) / elapsed)


def _known(values: list[int | None]) -> list[int] | None:
    """The values, or None if one is unknown or there are none."""
    return None if None in values or not values else values


def _ask(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """NVML's answer; None if NVML raises an error.

    NVML has many errors for a value that it lacks: not supported, no permission, function not found, invalid
    argument for a MIG instance. A GPU that fell off the bus ends the run with CUDA's own, clearer error.
    """
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _nvml_works() -> bool:
    try:
        pynvml.nvmlInit()  # loads the library on the first call, counts calls after that
    except pynvml.NVMLError:  # no library, no driver, or they don't match
        return False
    return True


def _is_split(handle: Any) -> bool:
    """Whether a board is in MIG mode."""
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _system_busy_seconds() -> float:
    """CPU seconds of all cores since boot, from /proc/stat: the machine's, in a container, too."""
    times = psutil.cpu_times()._asdict()
    not_busy = times["idle"] + times.get("iowait", 0.0)
    # a virtual machine's seconds, which user and nice hold as well
    twice = times.get("guest", 0.0) + times.get("guest_nice", 0.0)
    return sum(times.values()) - not_busy - twice


def _launch_busy_seconds() -> float:
    """CPU seconds of the launch's processes, and of those that ended and were waited for.

    A child's time moves to its parent when it is waited for, so that the sum over the tree loses nothing.
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
    """The launcher and all its descendants; in a run of one rank, this process and its children.

    The parent of a single rank may be a shell that has other jobs, too.
    """
    this = psutil.Process()
    launcher = this.parent() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    root = launcher or this
    return [root, *root.children(recursive=True)]
