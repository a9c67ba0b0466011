"""Places where runs go on side by side: disjoint GPUs of this machine, or a share of its CPU cores."""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from slm_toolkit.hardware.gpus import Machine

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time."""

    num_slots: int = 1
    "that share this machine"
    visible_devices: tuple[str, ...] | None = None
    "as CUDA_VISIBLE_DEVICES names them; None: all that are visible here"


def slots_of(
    machine: Machine, *, gpus_per_run: int | None, runs_at_once: int | None, num_processes: int | None
) -> list[Slot]:
    """The slots asked for; one without either. Raises ValueError with all that can't be had."""
    problems = []
    if gpus_per_run is not None and machine.num_gpus == 0:
        problems.append(
            "--gpus_per_run without a GPU\nhint: --runs_at_once N runs CPU processes side by side"
        )
    elif gpus_per_run is not None and gpus_per_run > machine.num_gpus:
        problems.append(f"--gpus_per_run is {gpus_per_run}: this machine has {machine.num_gpus}")
    if runs_at_once is not None and machine.num_gpus > 0:
        problems.append(
            "--runs_at_once on a machine with GPUs\nhint: --gpus_per_run K says how many a run gets"
        )
    if gpus_per_run is not None and num_processes is not None and num_processes > gpus_per_run:
        problems.append(
            f"--num_processes is {num_processes}, --gpus_per_run {gpus_per_run}: a rank needs its own GPU"
        )
    if problems:
        raise ValueError("\n".join(problems))
    if gpus_per_run is None:
        return [Slot(runs_at_once or 1)] * (runs_at_once or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(machine.num_gpus)]
    num_slots = machine.num_gpus // gpus_per_run
    return [
        Slot(num_slots, tuple(devices[number * gpus_per_run : (number + 1) * gpus_per_run]))
        for number in range(num_slots)
    ]


def run_in_slots(
    jobs: Sequence[Job], work: Callable[[Job, Slot], Result], slots: list[Slot], stop: threading.Event
) -> Iterator[tuple[int, Result]]:
    """Do each job in a slot that is free, in order; yields a job's index and result as it ends.

    Whatever ends this early, Ctrl-C or a bug in a job, sets `stop` and waits for those at work to heed it.
    """
    free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def in_a_slot(job: Job) -> Result:
        if stop.is_set():
            raise CancelledError
        slot = free.get()
        try:
            return work(job, slot)
        finally:
            free.put(slot)

    pool = ThreadPoolExecutor(max_workers=len(slots))
    try:
        index_of = {pool.submit(in_a_slot, job): index for index, job in enumerate(jobs)}
        left = set(index_of)
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=index_of.__getitem__):
                yield index_of[future], future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
