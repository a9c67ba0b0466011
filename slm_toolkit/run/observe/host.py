"""How busy the rest of this machine was, and how full its memory, while a launch trained on it."""

import os
import time

import psutil


class HostWatch:
    """CPU time that others took from a launch, between `start` and the question.

    One rank per machine may ask: it answers for all ranks of its launch there, with their data loader workers
    and the launcher itself.
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
        """Look at the memory; to be called between steps."""
        self._least_available_bytes = min(self._least_available_bytes, psutil.virtual_memory().available)

    def ram(self) -> dict[str, int]:
        """Of the whole machine: total_bytes, least_available_bytes at any sample, swapped_out_bytes since."""
        return {
            "total_bytes": psutil.virtual_memory().total,
            "least_available_bytes": self._least_available_bytes,
            "swapped_out_bytes": psutil.swap_memory().sout - self._swapped_out_bytes,
        }

    def other_busy_cores(self) -> float:
        """Mean number of cores that anything but this launch kept busy since `start`.

        Busy is all that is neither idle nor waiting for a disk; stolen time is busy: another guest of the
        host had the core then. Interrupts are no process's, so those that the launch causes count here too.
        The kernel counts in 10 ms: ask after seconds, not after milliseconds.
        """
        elapsed = time.monotonic() - self._start_seconds
        busy = _system_busy_seconds() - self._busy_seconds
        own = _launch_busy_seconds() - self._own_seconds
        return max(0.0, (busy - own) / elapsed)


def _system_busy_seconds() -> float:
    """CPU seconds of all cores since boot, from /proc/stat, which in a container is the machine's as well."""
    times = psutil.cpu_times()._asdict()
    not_busy = times["idle"] + times.get("iowait", 0.0)
    twice = times.get("guest", 0.0) + times.get(
        "guest_nice", 0.0
    )  # a virtual machine's: in user and nice too
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
    """The launcher and all below it; without other ranks this process and its children.

    Only with other ranks is the parent a launcher for sure: it may be a shell with other jobs.
    """
    this = psutil.Process()
    launcher = this.parent() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    root = launcher or this
    return [root, *root.children(recursive=True)]
