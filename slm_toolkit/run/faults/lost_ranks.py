"""Find out which rank of a launch has ended, is stopped or hangs, and in which line."""

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slm_toolkit.run.peers.peer_store import Board

_SECONDS_BETWEEN_LOOKS = 1.0
_OURS = str(Path(__file__).parents[2])
_WAITING = re.compile(
    r"torch/distributed/|torch/autograd/graph\.py|torch/cuda/(streams|__init__)\.py|deepspeed/comm/|"
    r"slm_toolkit/run/peers/step_exchange\.py"
)
"files whose innermost frames wait for other ranks: collectives, those of a backward, the GPU's own"


class LocalRanks:
    """The processes of this machine's other ranks, known once they have written their ids on the board.

    Creating it writes this rank's process id there.
    """

    def __init__(self, board: Board | None) -> None:
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first = rank - local_rank
        self._board = board
        self._unknown = {other for other in range(first, first + num_local) if other != rank}
        self._processes: dict[int, psutil.Process] = {}
        self._ended: dict[int, int] = {}
        "process ids by rank"
        if board is None:
            self._unknown = set()
        else:
            board.write(f"pid {rank}", os.getpid())

    def ended(self) -> dict[int, int]:
        """Process ids by rank of the processes that have ended; reads nothing once all ranks are known."""
        for rank in sorted(self._unknown):
            pid = self._board.read(f"pid {rank}")
            if pid is not None:
                self._unknown.discard(rank)  # two threads may be here
                try:
                    self._processes[rank] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    self._ended[rank] = pid
        for rank, process in list(self._processes.items()):
            if _has_ended(process):
                self._ended[rank] = process.pid
                self._processes.pop(rank, None)
        return dict(self._ended)

    def living(self) -> list[int]:
        """The ranks that have not ended, those included whose process is not known yet."""
        return sorted({*self._processes, *self._unknown})

    def state_of(self, rank: int) -> str:
        """The state of a rank that does not answer, as far as this machine's kernel knows it."""
        if rank in self._ended:
            return f"rank {rank} (pid {self._ended[rank]}) has ended"
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} does not answer"
        with suppress(psutil.NoSuchProcess):
            status = process.status()
            name = f"rank {rank} (pid {process.pid})"
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return f"{name} is stopped (SIGSTOP, a debugger?)"
            if status == psutil.STATUS_DISK_SLEEP:
                return f"{name} waits for a disk or a network file system"
            return f"{name} does not answer: it is in a call of C that does not let Python run"
        return f"rank {rank} has ended"

    def kill(self, ranks: list[int]) -> None:
        """Kill ranks that can't end themselves; the launcher would wait 30 s for each."""
        for rank in ranks:
            if rank in self._processes:
                with suppress(psutil.NoSuchProcess):
                    self._processes[rank].kill()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Stall:
    """The place of a rank that has done no step for too long."""

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
    """A sentence that names the ranks that hang, their place, and the ranks that waited for them.

    `silent`: a clause for each rank that did not answer.
    """
    stuck = [stall for stall in stalls if not stall.is_waiting]
    waiting = [stall for stall in stalls if stall.is_waiting]
    stands = "waits" if silent else "hung"  # a rank may wait for one that does not answer
    clauses = silent + [
        f"rank {stall.rank} (pid {stall.pid}) "
        f"{'is still at work' if stall.has_moved else stands} in {stall.place}"
        for stall in stuck
    ]
    if not clauses:  # one rank, which waits for its GPU
        return "; ".join(f"rank {stall.rank} (pid {stall.pid}) waits in {stall.place}" for stall in waiting)
    if not waiting:
        return "; ".join(clauses)
    ranks = ", ".join(str(stall.rank) for stall in waiting)
    return f"{'; '.join(clauses)}, while rank{'s' * (len(waiting) > 1)} {ranks} waited"


def _place(frames: list[str]) -> str:
    ours = next((frame for frame in frames[1:] if frame.startswith(_OURS)), None)
    return _with_short_path(frames[0]) + (f", called from {_with_short_path(ours)}" if ours else "")


def _with_short_path(frame: str) -> str:
    """A frame with the last two parts of its path."""
    path, _, rest = frame.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{rest}"


def waits_for_others(frames: Sequence[str]) -> bool:
    """Whether a stack, `file:line in function`, innermost first, is that of a rank in a collective."""
    return any(_WAITING.search(frame) for frame in frames[:2])


def _frames_of_main_thread() -> list[str]:
    frame = sys._current_frames()[threading.main_thread().ident]
    frames = []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return frames


def _gpu_is_busy() -> bool:
    """Whether work is queued on this rank's GPU: a host far ahead of a collective stands in any call.

    A thread of its own asks, since the driver may not answer while a queue is full.
    """
    if not torch.cuda.is_initialized():
        return False
    answers: list[bool] = []
    stream = torch.cuda.default_stream(int(os.environ.get("LOCAL_RANK", "0")))
    asking = threading.Thread(target=lambda: answers.append(stream.query()), daemon=True)
    asking.start()
    asking.join(_SECONDS_BETWEEN_LOOKS)
    return answers != [True]
