"""This machine's memory: a process's allocator, and whether the kernel killed a process for lack of RAM."""

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slm_toolkit.hardware.gpus import gpus_here

_LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"environment variable of PyTorch's allocator on CPUs, which then keeps large tensors in huge pages"


def use_huge_pages() -> None:
    """On a machine without a GPU, let PyTorch use huge pages in this process and its children.

    malloc maps large tensors anew at every step, which can take half of the CPU time (docs/speed_and_cost.md
    has the measurement). The user's own setting wins, and so does an allocator in malloc's place.
    """
    if allocator() == "malloc" and not gpus_here():
        os.environ.setdefault(HUGE_PAGES, "1")
        allocator.cache_clear()


def has_compiler() -> bool:
    """Return whether a C++ compiler is installed, which torch.compile and Triton need."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")))


@cache
def allocator() -> str:
    """Return the name of this process's allocator, with the settings of PyTorch's allocator if there are any.

    Child processes inherit both with the environment.
    """
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    name = next((name for name in _LIBRARIES if f"lib{name}" in loaded), "malloc")
    if os.environ.get(HUGE_PAGES) == "1":
        name += ", huge pages"
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return f"{name}, {settings}" if settings else name


_SCARCE = 0.05
"share of free RAM below which the kernel, or an OOM daemon, most likely killed the process"


_COUNTERS = ("memory.events", "memory.oom_control")
"files of a cgroup, in version 2 and version 1, with a line `oom_kill N`"
_LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class RamState:
    """The free RAM of this machine, and the kernel's count of OOM kills until now."""

    available_bytes: int
    total_bytes: int
    num_oom_kills: int | None
    "processes that the kernel killed for lack of RAM, on this machine and in our cgroups; None: unknown"
    limit_bytes: int | None = None
    "lowest memory limit of our cgroups, if it is less than the machine's RAM"


def look_at_host_ram() -> RamState:
    import psutil  # takes 10 ms, and no estimate needs it

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
    """Return a phrase with the likely sender of a SIGKILL."""
    if (certain := killed_for_ram(before, after)) is not None:
        return certain
    gib = (
        f"{least_available_bytes / 2**30:.1f} of {after.total_bytes / 2**30:.1f} GiB were free at the lowest"
    )
    if least_available_bytes < _SCARCE * after.total_bytes:
        return f"likely by the kernel, because host RAM ran out ({gib})"
    return f"likely not because host RAM ran out: {gib}"


def killed_for_ram(before: RamState, after: RamState) -> str | None:
    """Return a phrase that names the kernel if its count of OOM kills rose; None otherwise."""
    if None in (before.num_oom_kills, after.num_oom_kills) or after.num_oom_kills <= before.num_oom_kills:
        return None
    gib = (after.limit_bytes or after.total_bytes) / 2**30
    limit = f"its cgroup may use {gib:.1f} GiB" if after.limit_bytes else f"of {gib:.1f} GiB"
    return f"by the kernel, because host RAM ran out: its oom_kill count rose ({limit})"


def _of_cgroups(names: tuple[str, str]) -> list[Path]:
    """Return the paths of a file of our cgroups, by its names in version 2 and version 1 of cgroups."""
    paths, cgroup = [], Path("/proc/self/cgroup")
    for line in _text(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths.append(Path("/sys/fs/cgroup", path.lstrip("/"), names[0]))
        elif "memory" in controllers.split(","):
            paths.append(Path("/sys/fs/cgroup/memory", path.lstrip("/"), names[1]))
    return paths


def _oom_kills_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)]


def _text(path: Path) -> str:
    """Return the file's text; empty if the file is missing or unreadable."""
    try:
        return path.read_text()
    except OSError:
        return ""
