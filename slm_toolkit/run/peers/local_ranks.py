"""The other ranks of this machine as processes: which of them have ended, and which are stopped."""

import os
from contextlib import suppress

import psutil

from slm_toolkit.run.peers.peer_store import Board


class Siblings:
    """Known once they have written their process ids on the board, as this rank does here."""

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
        """Process ids by rank of those that are no more; nothing is sent once all are known."""
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
        """Their ranks, with those that were not looked for yet."""
        return sorted({*self._processes, *self._unknown})

    def how_is(self, rank: int) -> str:
        """What a rank that does not answer is, as far as can be seen from here."""
        if rank in self._ended:
            return f"rank {rank} (pid {self._ended[rank]}) has ended"
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} does not answer"
        with suppress(psutil.NoSuchProcess):
            status = process.status()
            who = f"rank {rank} (pid {process.pid})"
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return f"{who} is stopped (SIGSTOP, a debugger?)"
            if status == psutil.STATUS_DISK_SLEEP:
                return f"{who} waits for a disk or a network file system"
            return f"{who} does not answer: it is in a call of C that does not let Python run"
        return f"rank {rank} has ended"

    def kill(self, ranks: list[int]) -> None:
        """Those that can't end themselves; the launcher would wait 30 s for each."""
        for rank in ranks:
            if rank in self._processes:
                with suppress(psutil.NoSuchProcess):
                    self._processes[rank].kill()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
