"""One message when a run can't go on: which rank was killed, failed or hangs, and where it can go on from.

A rank's thread looks once a second whether the processes of this machine's other ranks are there, and how
long its own main thread has been at one step. Nothing is sent between ranks while nothing is wrong.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from slm_toolkit.base.errors import KILLED_OR_CRASHED, STOPPED_AFTER, TIME_LIMIT_VARIABLE
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.launcher_gone import end_with_launcher, launcher_pid
from slm_toolkit.launch.torch_extensions import CompilerNews
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR
from slm_toolkit.run.checkpoint.checkpoint import by_order
from slm_toolkit.run.faults.known_errors import one_line
from slm_toolkit.run.faults.lost_ranks import LocalRanks, Stall, explain, stall_of
from slm_toolkit.run.peers.failure import is_out_of_memory, write_failure
from slm_toolkit.run.peers.machines import UNREACHED, Machines
from slm_toolkit.run.peers.peer_store import open_board

_LOOK_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
"for the cause of a broken collective to be seen: a process takes a while to end"
_ANSWER_SECONDS = 10.0
"for a rank whose thread can run to write the place of its main thread on the board"
_WITNESS_SECONDS = 5.0
"for another rank of this machine to print the message"
_FROZEN_SECONDS = 5.0
"more than that between two looks: the process, or the whole machine, was stopped meanwhile"
_COMPILING_SECONDS = 3600.0
"for the first step of --torch_compile; collectives wait as long"


@dataclass(frozen=True)
class _Followed:
    """The run that is watched, once it is set up."""

    record: RunRecord
    run_dir: Path
    mark: int | None
    "see `write_failure`"
    limit_seconds: float
    first_limit_seconds: float


class Watchdog:
    """`with Watchdog() as watchdog` around all that a rank does; `follow` its run, `beat` at every step."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._board = open_board()
        self._local_ranks = LocalRanks(self._board)
        self._launcher = launcher_pid()
        self.machines = Machines()
        limit = os.environ.get(TIME_LIMIT_VARIABLE, "inf inf").split()
        self._limit_seconds, self._ends_at = float(limit[0]), float(limit[1])
        by_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        self._compilers = CompilerNews() if by_deepspeed and is_first_here else None
        self._run: _Followed | None = None
        self._where = "before its first step"
        self._num_beats = 0
        self._beat_at = 0.0
        self._frozen_seconds = 0.0
        self._looked_at = time.monotonic()
        self._ended = threading.Event()
        self._voice = threading.Lock()

    def __enter__(self) -> "Watchdog":
        if self._board is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        threading.excepthook = self._thread_failed
        threading.Thread(target=self._watch, daemon=True).start()
        end_with_launcher(how=False)  # from here on the thread looks, and the message names the launcher
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the board a note of this end; the traceback of a bug follows, on the rank that failed."""
        if isinstance(error, Exception):
            self.settle(error)
            self._leave(_named(error))
        else:
            self._leave(None)
        self._ended.set()
        threading.excepthook = threading.__excepthook__
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow(self, record: RunRecord, run_dir: Path, *, mark: int | None, config: RunConfig) -> None:
        """The run is set up: a message is written to its record, too, and its steps have their limit."""
        limit = config.ddp_timeout
        first = max(limit, _COMPILING_SECONDS) if config.torch_compile else limit
        self._run = _Followed(record, run_dir, mark, limit, first)

    def beat(self, where: str) -> None:
        """The main thread goes on: with a step, an evaluation, a checkpoint."""
        self._where = where
        self._frozen_seconds = 0.0
        self._beat_at = time.monotonic()
        self._num_beats += 1

    def rest(self) -> None:
        """What follows has no steps."""
        self._num_beats = 0

    def settle(self, error: Exception) -> None:
        """End this rank, with one message of all ranks, where one line explains `error`: a full disk, bad
        data, or a collective that broke off because another rank has ended. Returns for a bug."""
        self._tell(error)
        if self._board is None or not (isinstance(error, RuntimeError) and UNREACHED.search(str(error))):
            return
        if is_out_of_memory(error):
            return
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._look(has_failed=True)
            time.sleep(_LOOK_SECONDS / 10)

    def _tell(self, error: BaseException) -> None:
        """End this rank with one line about `error`; returns for an error that needs its traceback."""
        if (message := one_line(error, self._run.run_dir if self._run else None)) is not None:
            self._leave(_named(error))
            problem, _, hint = message.partition("\nhint: ")
            self._give_up(f"rank {self.rank} {self._where}: {problem}", hint=hint)

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """A tracker writes in a thread of its own; its traceback would interrupt the message."""
        if failed.exc_value is not None:
            self._tell(failed.exc_value)
        threading.__excepthook__(failed)

    def _watch(self) -> None:
        """In a thread of its own."""
        while not self._ended.wait(_LOOK_SECONDS):
            self._look(has_failed=False)
            if self._run is None and self._compilers is not None:
                self._compilers.look()
            if time.monotonic() > self._ends_at:
                self._confer(f"{STOPPED_AFTER} {self._limit_seconds:g} s, {self._where}")
            late = self._seconds_over(fraction=1.0)
            alarmed = self._seconds_over(fraction=0.5) and self._board and self._board.read("alarm")
            if late or alarmed:
                self._confer(
                    f"no progress for {self._step_limit_seconds:g} s (--ddp_timeout) {self._where}",
                    hint="where a step does take that long, raise --ddp_timeout",
                )

    def _look(self, *, has_failed: bool) -> None:
        """End this rank where a rank of this machine, the launcher or another machine is gone."""
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        if (lost := self.machines.lost(has_failed=has_failed)) is not None:
            self._give_up(lost, asks_board=False)

    def _lost(self) -> str | None:
        """The rank of this machine, or the launcher, that is gone and should not be."""
        for rank, pid in self._local_ranks.ended().items():
            left = self._board.read(f"left {rank}")
            if left is None:
                return f"rank {rank} (pid {pid}) {KILLED_OR_CRASHED} {self._where}"
            if left["failed"] is not None:
                return f"rank {rank} (pid {pid}) failed {self._where}: {left['failed']}"
        if self._launcher is not None and os.getppid() != self._launcher:
            return f"the launcher (pid {self._launcher}) {KILLED_OR_CRASHED} {self._where}"
        return None

    def _seconds_over(self, *, fraction: float) -> float:
        """How much longer than a fraction of its limit the main thread has been where it is, or 0."""
        now = time.monotonic()
        frozen = now - self._looked_at - _LOOK_SECONDS
        if frozen > _FROZEN_SECONDS:
            self._frozen_seconds += frozen
        self._looked_at = now
        if self._run is None or self._num_beats == 0:
            return 0.0
        return max(0.0, now - self._beat_at - self._frozen_seconds - fraction * self._step_limit_seconds)

    @property
    def _step_limit_seconds(self) -> float:
        return self._run.limit_seconds if self._num_beats > 1 else self._run.first_limit_seconds

    def _confer(self, problem: str, *, hint: str = "") -> NoReturn:
        """Write this rank's place on the board, read the others', and end with `problem` and its cause."""
        mine = stall_of(self.rank, os.getpid())
        stalls = {self.rank: mine}
        if self._board is not None:
            self._board.write(f"stall {self.rank}", asdict(mine))
            self._board.write("alarm", self.rank)
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(stalls) < self._num_ranks and time.monotonic() < deadline:
                for rank in set(range(self._num_ranks)) - stalls.keys():
                    if (stall := self._board.read(f"stall {rank}")) is not None:
                        stalls[rank] = Stall(**stall)
                time.sleep(_LOOK_SECONDS / 4)
        silent = sorted(set(range(self._num_ranks)) - stalls.keys())
        states = [self._local_ranks.state_of(rank) for rank in silent]
        cause = explain([stalls[rank] for rank in sorted(stalls)], states)
        self._give_up(f"{problem}: {cause}", hint=hint, silent=silent)

    def _leave(self, failed: str | None) -> None:
        """Write on the board that this process ends, and its error if it failed, for the other ranks."""
        if self._board is not None:
            self._board.write(f"left {self.rank}", {"failed": failed})

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM comes from a launcher that has lost a rank, or from somebody who wants the run to end."""
        if self._voice.locked():  # another thread prints the message already
            return
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        self._leave(None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _give_up(
        self, problem: str, *, hint: str = "", silent: list[int] | None = None, asks_board: bool = True
    ) -> NoReturn:
        """Print and record the problem on one rank of each machine, kill the `silent`, end this process.

        Not `asks_board`: this rank alone knows the problem, and the board may be on the machine that is gone.
        """
        if not self._voice.acquire(blocking=False):
            time.sleep(6 * _WITNESS_SECONDS)  # the other thread ends the process
            os._exit(1)
        machine = os.environ.get("GROUP_RANK", "0")
        board = self._board if asks_board else None
        first = board.is_first(f"speaks {machine}", self.rank) if board is not None else True
        alone = first is None  # the launcher is gone, and with it what is written
        if alone:
            first = self.rank < min(self._local_ranks.living(), default=self.rank + 1)
        if first:
            self._say(problem, hint, alone=alone)
            time.sleep(2 * _LOOK_SECONDS * alone)  # until the others have seen that this rank lives
            self._local_ranks.kill(silent or [])
            if board is not None:
                board.write(f"spoken {machine}", True)
        else:
            deadline = time.monotonic() + _WITNESS_SECONDS
            while time.monotonic() < deadline and not board.read(f"spoken {machine}"):
                time.sleep(_LOOK_SECONDS / 10)
        os._exit(1)  # the thread that trains may wait for ever

    def _say(self, problem: str, hint: str, *, alone: bool) -> None:
        saved = by_order(self._run.run_dir / CHECKPOINTS_DIR) if self._run is not None else []
        hints = [hint] if hint else []
        if saved:
            newer = ", or from one that the other ranks write meanwhile" if alone else ""
            hints.append(f"--resume_from_checkpoint latest goes on from {saved[-1]}{newer}")
        with suppress(OSError):  # it may be what is full
            lines = [f"error: {problem}", *[f"hint: {'; '.join(hints)}"][: len(hints)]]
            sys.stderr.write("\n".join(lines) + "\n")  # at once: others may be writing
            sys.stderr.flush()
        if self._run is not None:
            run = self._run
            write_failure(run.record, RuntimeError(problem), run.run_dir, mark=run.mark)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
