"""Whether the kernel killed a process for want of host RAM, of which the process itself can tell nothing."""

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

_SCARCE = 0.05
"share of the RAM below which a killed process is most likely the kernel's, or an OOM daemon's, doing"


@dataclass(frozen=True)
class HostRam:
    """What is free, and what the kernel has counted until now."""

    available_bytes: int
    total_bytes: int
    num_oom_kills: int | None
    "processes killed for want of RAM, on this machine and in our cgroups; None where nobody says"


def look_at_host_ram() -> HostRam:
    memory = psutil.virtual_memory()
    counts = [count for path in _counters() for count in _oom_kills_in(path)]
    return HostRam(memory.available, memory.total, sum(counts) if counts else None)


def who_killed(before: HostRam, after: HostRam, *, least_available_bytes: int) -> str:
    """Who sent the SIGKILL, as far as one can know."""
    gib = f"{least_available_bytes / 2**30:.1f} of {after.total_bytes / 2**30:.1f} GiB were free at the least"
    counted = None not in (before.num_oom_kills, after.num_oom_kills)
    if counted and after.num_oom_kills > before.num_oom_kills:
        return f"by the kernel, for want of host RAM, as its count of oom_kill says ({gib})"
    if least_available_bytes < _SCARCE * after.total_bytes:
        return f"likely by the kernel, for want of host RAM ({gib})"
    if counted:
        return f"likely not for want of host RAM: the kernel counts no oom_kill, and {gib}"
    return f"likely by the kernel, for want of host RAM, or by hand: it does not say ({gib})"


def _counters() -> list[Path]:
    """The machine's, and those of our cgroup, version 2 and 1, as far as they are there."""
    found = [Path("/proc/vmstat")]
    cgroup = Path("/proc/self/cgroup")
    for line in cgroup.read_text().splitlines() if cgroup.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events"))
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control"))
    return found


def _oom_kills_in(path: Path) -> list[int]:
    try:
        return [int(number) for number in re.findall(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)]
    except OSError:  # not there, or not for us
        return []
