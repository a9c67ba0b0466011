"""What the driver says of this rank's GPU: who else uses it; energy, clock and throttling at each step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pynvml
import torch

THROTTLE_REASONS = {
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Bits of NVML's clocks event reasons that mean a GPU slower than it could be.

Left out: idle, and the clocks that somebody asked for (application, display, sync boost).
"""


@dataclass(frozen=True)
class GpuState:
    """Who holds a GPU. Asked before this process has a CUDA context on it, it says what others hold."""

    num_processes: int | None
    "compute processes, of other containers too; None where the driver doesn't tell"
    used_bytes: int | None
    "without what the driver reserves for itself; None where it doesn't tell"


def open_gpu(uuid: str | None) -> Any | None:
    """NVML's handle of a GPU or MIG instance; None without NVML or such a device.

    uuid: as NVML, `nvidia-smi -L` and CUDA_VISIBLE_DEVICES write it, or without the prefix, as in
    `str(torch.cuda.get_device_properties(local_rank).uuid)`. Asking torch opens no context: its own
    initialization asks the same of every GPU (_check_capability), after which its test_cuda_primary_ctx.py
    finds none on the GPUs not used.

    A board that is split into MIG instances is no rank's GPU: its energy is that of all of them.
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
    """Takes milliseconds: for the beginning of a run, not for its steps."""
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # Version 1 of the query counts what the driver reserves, hundreds of MiB, as used.
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return GpuState(
        num_processes=None if processes is None else len(processes),
        used_bytes=None if memory is None else memory.used,
    )


def allocator_retries(device: torch.device) -> dict[str, int]:
    """How often torch's allocator had to free its cache or gave up, since the process began; empty on CPU.

    A run with retries was slower than its steps need be: each one synchronizes the device.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}


class GpuWatch:
    """Energy, throttling and SM clock of one GPU, read between training steps.

    Sample outside of what is timed: a reading takes its own time. Without a handle all of it is None.
    """

    def __init__(self, handle: Any | None) -> None:
        self._handle = handle
        self.start()

    def start(self) -> None:
        """Take the zero of the energy counter; earlier samples are forgotten."""
        self._zero_millijoules = self._energy_counter()
        self._energy_millijoules: list[int | None] = []
        self._reasons: list[int | None] = []
        self._clock_mhz: list[int | None] = []
        self._utilization: list[int | None] = []

    def sample(self) -> None:
        """Read the GPU; to be called once after each step, before the next one begins."""
        self._energy_millijoules.append(self._energy_counter())
        self._reasons.append(self._clocks_event_reasons())
        self._clock_mhz.append(self._query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM))
        rates = self._query(pynvml.nvmlDeviceGetUtilizationRates)
        self._utilization.append(None if rates is None else rates.gpu)

    def sample_last_again(self) -> None:
        """Read the energy anew for the last step, once the device has done all that the host gave it."""
        if self._energy_millijoules:
            self._energy_millijoules[-1] = self._energy_counter()

    @property
    def energy_joules(self) -> list[float] | None:
        """The board's per step, from one sample to the next; None where the driver has no counter.

        It has one since Volta, though not for every MIG instance and virtual GPU, and moves it every 20 to
        100 ms (petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter): shorter steps read 0 until one gets it
        all, and only a sum over seconds is a measurement.
        """
        counter = _known(self._energy_millijoules)
        if counter is None or self._zero_millijoules is None:
            return None
        return [(after - before) / 1000 for before, after in pairwise([self._zero_millijoules, *counter])]

    @property
    def throttle_reasons(self) -> dict[str, int] | None:
        """Steps after which a reason of THROTTLE_REASONS was active; those that never were are left out.

        What is read is the moment after the step, not all of it. hw_slowdown alone may be a change of clocks
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


def _known(values: list[int | None]) -> list[int] | None:
    """None without any sample too: then nothing was asked."""
    return None if None in values or not values else values


def _ask(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """NVML's answer; None where it has none to give.

    It says so in many ways: not supported, no permission, function not found, invalid argument for a MIG
    instance. And a GPU that fell off the bus ends the run with CUDA's own error, which tells more.
    """
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _nvml_works() -> bool:
    try:
        pynvml.nvmlInit()  # counts its callers, the first one loads the library
    except pynvml.NVMLError:  # no library, no driver, or they don't match
        return False
    return True


def _is_split(handle: Any) -> bool:
    """Whether a board is in MIG mode; boards that don't know MIG are not."""
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
