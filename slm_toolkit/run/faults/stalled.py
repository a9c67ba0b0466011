"""Which rank holds a run up that makes no progress, from what each says of its own main thread."""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from slm_toolkit.launch.lost_ranks import place_of, waits_for_others

_SECONDS_BETWEEN_LOOKS = 1.0
_OURS = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Stall:
    """Where a rank is that has done no step for too long."""

    rank: int
    pid: int
    is_waiting: bool
    "for other ranks, or its GPU is, which comes to the same"
    has_moved: bool
    "between two looks: it works, and takes long"
    place: str
    "`file:line in function`, and which line of ours called that"


def stall_of(rank: int, pid: int) -> Stall:
    """Look at this process's main thread twice, from another thread."""
    first = _frames_of_main_thread()
    time.sleep(_SECONDS_BETWEEN_LOOKS)
    second = _frames_of_main_thread()
    waiting = waits_for_others(second) or _gpu_is_busy()
    return Stall(rank, pid, waiting, first != second, _place(second))


def explain(stalls: list[Stall], silent: list[str]) -> str:
    """Who hangs and where, while which others waited. `silent`: a clause for each rank that said nothing."""
    stuck = [stall for stall in stalls if not stall.is_waiting]
    waiting = [stall for stall in stalls if stall.is_waiting]
    stands = "waits" if silent else "hung"  # beside a rank that does not answer, nobody knows of the others
    clauses = silent + [
        f"rank {stall.rank} (pid {stall.pid}) "
        f"{'is still at work' if stall.has_moved else stands} in {stall.place}"
        for stall in stuck
    ]
    if not clauses:  # of one rank: its GPU
        return "; ".join(f"rank {stall.rank} (pid {stall.pid}) waits in {stall.place}" for stall in waiting)
    if not waiting:
        return "; ".join(clauses)
    ranks = ", ".join(str(stall.rank) for stall in waiting)
    return f"{'; '.join(clauses)}, while rank{'s' * (len(waiting) > 1)} {ranks} waited"


def _place(frames: list[str]) -> str:
    ours = next((frame for frame in frames[1:] if frame.startswith(_OURS)), None)
    return place_of(frames) + (f", called from {place_of([ours])}" if ours else "")


def _frames_of_main_thread() -> list[str]:
    frame = sys._current_frames()[threading.main_thread().ident]
    found = []
    while frame is not None:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def _gpu_is_busy() -> bool:
    """Whether work is queued on this rank's GPU: a host far ahead of a collective stands in any call.

    Asked in a thread of its own, since the driver may not answer while a queue is full.
    """
    if not torch.cuda.is_initialized():
        return False
    answers: list[bool] = []
    stream = torch.cuda.default_stream(int(os.environ.get("LOCAL_RANK", "0")))
    asking = threading.Thread(target=lambda: answers.append(stream.query()), daemon=True)
    asking.start()
    asking.join(_SECONDS_BETWEEN_LOOKS)
    return answers != [True]
