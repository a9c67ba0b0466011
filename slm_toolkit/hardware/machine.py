"""This machine's memory: the allocator of a process, and whether the kernel killed one for lack of RAM."""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from rich.console import Console


DEFAULT = "malloc"
_LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")
ADVICE = (
    "note: the C library's malloc maps large tensors anew at every step, which may take half of a CPU's "
    "time; `LD_PRELOAD=libtcmalloc_minimal.so.4` (Debian: libtcmalloc-minimal4) or THP_MEM_ALLOC_ENABLE=1 "
    "before the command does without"
)
"for who trains on a CPU under the default; measured in the README"


def advise(console: "Console") -> None:
    """Tell who is about to train on a CPU under the default."""
    if allocator() == DEFAULT:
        console.print(ADVICE, soft_wrap=True)


@cache
def allocator() -> str:
    """The C library's `malloc`, or a library put in its place, and PyTorch's settings where there are any.

    Children inherit all of it with the environment.
    """
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    found = next((name for name in _LIBRARIES if f"lib{name}" in loaded), DEFAULT)
    if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
        found += ", huge pages"
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return f"{found}, {settings}" if settings else found


_SCARCE = 0.05
"share of the RAM below which a killed process is most likely the kernel's, or an OOM daemon's, doing"

_COUNTERS = ("memory.events", "memory.oom_control")
"files of a cgroup, in version 2 and in version 1, with a line `oom_kill N`"
_LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class RamState:
    """What is free, and what the kernel has counted until now."""

    available_bytes: int
    total_bytes: int
    num_oom_kills: int | None
    "processes killed for want of RAM, on this machine and in our cgroups; None where nobody says"
    limit_bytes: int | None = None
    "of our cgroups together, where it is less than the RAM there is"


def look_at_host_ram() -> RamState:
    memory = psutil.virtual_memory()
    counts = [
        count for path in (Path("/proc/vmstat"), *_of_cgroups(_COUNTERS)) for count in _oom_kills_in(path)
    ]
    limits = [int(text) for path in _of_cgroups(_LIMITS) if (text := _text(path).strip()).isdigit()]
    limit_bytes = min(limits, default=memory.total)
    return RamState(
        memory.available,
        memory.total,
        sum(counts) if counts else None,
        limit_bytes if limit_bytes < memory.total else None,
    )


def who_killed(before: RamState, after: RamState, *, least_available_bytes: int) -> str:
    """Who sent the SIGKILL, as far as one can know."""
    if (known := killed_for_ram(before, after)) is not None:
        return known
    gib = f"{least_available_bytes / 2**30:.1f} of {after.total_bytes / 2**30:.1f} GiB were free at the least"
    if least_available_bytes < _SCARCE * after.total_bytes:
        return f"likely by the kernel, for want of host RAM ({gib})"
    if None not in (before.num_oom_kills, after.num_oom_kills):
        return f"likely not for want of host RAM: the kernel counts no oom_kill, and {gib}"
    return f"likely by the kernel, for want of host RAM, or by hand: it does not say ({gib})"


def killed_for_ram(before: RamState, after: RamState) -> str | None:
    """That it was the kernel, where it has counted one more; None where nobody knows."""
    if None in (before.num_oom_kills, after.num_oom_kills) or after.num_oom_kills <= before.num_oom_kills:
        return None
    gib = (after.limit_bytes or after.total_bytes) / 2**30
    may_use = f"its cgroup may use {gib:.1f} GiB" if after.limit_bytes else f"of {gib:.1f} GiB"
    return f"by the kernel, for want of host RAM, as its count of oom_kill says ({may_use})"


def _of_cgroups(names: tuple[str, str]) -> list[Path]:
    """A file of our cgroup by its name in version 2 and in version 1, as far as they are there."""
    found, cgroup = [], Path("/proc/self/cgroup")
    for line in _text(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(Path("/sys/fs/cgroup", path.lstrip("/"), names[0]))
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory", path.lstrip("/"), names[1]))
    return found


def _oom_kills_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)]


def _text(path: Path) -> str:
    """Empty where it is not there, or not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""
