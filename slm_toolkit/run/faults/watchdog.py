"""One message when a run can't go on: which rank was killed, failed or hangs, and where it can go on from.

A rank's thread looks once a second whether the processes of this machine's other ranks are there, and how
long its own main thread has been at one step. Nothing is sent between ranks while nothing is wrong.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import psutil
import torch

from slm_toolkit.base.errors import (
    DISK_FULL,
    KILLED_OR_CRASHED,
    SAYS_DISK_FULL,
    STOPPED_AFTER,
    TIME_LIMIT_VARIABLE,
    first_line,
)
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.processes import end_with_launcher, launcher_pid
from slm_toolkit.launch.torch_extensions import CompilerNews
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR
from slm_toolkit.run.checkpoint.checkpoint import by_order
from slm_toolkit.run.data.sources import BadData
from slm_toolkit.run.peers.failure import is_out_of_memory, write_failure
from slm_toolkit.run.peers.machines import UNREACHED, Machines
from slm_toolkit.run.peers.peer_store import PeerStore, open_peer_store

_LOOK_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
"for the cause of a broken collective to be seen: a process takes a while to end"
_ANSWER_SECONDS = 10.0
"for a rank whose thread can run to write the place of its main thread in the peer store"
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
        self._peer_store = open_peer_store()
        self._local_ranks = LocalRanks(self._peer_store)
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
        if self._peer_store is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        threading.excepthook = self._thread_failed
        threading.Thread(target=self._watch, daemon=True).start()
        end_with_launcher(how=False)  # from here on the thread looks, and the message names the launcher
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave a note of this end; the traceback of a bug follows, on the rank that failed."""
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
        if self._peer_store is None or not (isinstance(error, RuntimeError) and UNREACHED.search(str(error))):
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
            alarmed = self._seconds_over(fraction=0.5) and self._peer_store and self._peer_store.read("alarm")
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
            self._give_up(lost, asks_peers=False)

    def _lost(self) -> str | None:
        """The rank of this machine, or the launcher, that is gone and should not be."""
        for rank, pid in self._local_ranks.ended().items():
            left = self._peer_store.read(f"left {rank}")
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
        """Write this rank's place down, read the others', and end with `problem` and its cause."""
        mine = stall_of(self.rank, os.getpid())
        stalls = {self.rank: mine}
        if self._peer_store is not None:
            self._peer_store.write(f"stall {self.rank}", asdict(mine))
            self._peer_store.write("alarm", self.rank)
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(stalls) < self._num_ranks and time.monotonic() < deadline:
                for rank in set(range(self._num_ranks)) - stalls.keys():
                    if (stall := self._peer_store.read(f"stall {rank}")) is not None:
                        stalls[rank] = Stall(**stall)
                time.sleep(_LOOK_SECONDS / 4)
        silent = sorted(set(range(self._num_ranks)) - stalls.keys())
        states = [self._local_ranks.state_of(rank) for rank in silent]
        cause = explain([stalls[rank] for rank in sorted(stalls)], states)
        self._give_up(f"{problem}: {cause}", hint=hint, silent=silent)

    def _leave(self, failed: str | None) -> None:
        """Write in the peer store that this process ends, and its error if it failed, for the other ranks."""
        if self._peer_store is not None:
            self._peer_store.write(f"left {self.rank}", {"failed": failed})

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
        self, problem: str, *, hint: str = "", silent: list[int] | None = None, asks_peers: bool = True
    ) -> NoReturn:
        """Print and record the problem on one rank of each machine, kill the `silent`, end this process.

        Not `asks_peers`: this rank alone knows the problem; the store may be on the machine that is gone.
        """
        if not self._voice.acquire(blocking=False):
            time.sleep(6 * _WITNESS_SECONDS)  # the other thread ends the process
            os._exit(1)
        machine = os.environ.get("GROUP_RANK", "0")
        peer_store = self._peer_store if asks_peers else None
        first = peer_store.is_first(f"speaks {machine}", self.rank) if peer_store is not None else True
        alone = first is None  # the launcher is gone, and with it what is written
        if alone:
            first = self.rank < min(self._local_ranks.living(), default=self.rank + 1)
        if first:
            self._say(problem, hint, alone=alone)
            time.sleep(2 * _LOOK_SECONDS * alone)  # until the others have seen that this rank lives
            self._local_ranks.kill(silent or [])
            if peer_store is not None:
                peer_store.write(f"spoken {machine}", True)
        else:
            deadline = time.monotonic() + _WITNESS_SECONDS
            while time.monotonic() < deadline and not peer_store.read(f"spoken {machine}"):
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


# Which rank of the launch has ended, is stopped or hangs, and in which line.

_OURS = str(Path(__file__).parents[2])
_WAITING = re.compile(
    r"torch/distributed/|torch/autograd/graph\.py|torch/cuda/(streams|__init__)\.py|deepspeed/comm/|"
    r"slm_toolkit/run/peers/step_exchange\.py"
)
"files whose innermost frames wait for other ranks: collectives, those of a backward, the GPU's own"


class LocalRanks:
    """The processes of this machine's other ranks, known once they have written their ids in the peer store.

    Creating it writes this rank's process id there.
    """

    def __init__(self, peer_store: PeerStore | None) -> None:
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first = rank - local_rank
        self._peer_store = peer_store
        self._unknown = {other for other in range(first, first + num_local) if other != rank}
        self._processes: dict[int, psutil.Process] = {}
        self._ended: dict[int, int] = {}
        "process ids by rank"
        if peer_store is None:
            self._unknown = set()
        else:
            peer_store.write(f"pid {rank}", os.getpid())

    def ended(self) -> dict[int, int]:
        """Process ids by rank of the processes that have ended; reads nothing once all ranks are known."""
        for rank in sorted(self._unknown):
            pid = self._peer_store.read(f"pid {rank}")
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
    time.sleep(_LOOK_SECONDS)
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
    asking.join(_LOOK_SECONDS)
    return answers != [True]


# Errors of a run that are nobody's bug, in a line: a folder that can't be written, data that went bad.

_LITTLE_BYTES = 2**20


def one_line(error: BaseException, run_dir: Path | None) -> str | None:
    """What to say of it, with a hint on a second line; None for a bug, whose traceback says more."""
    if isinstance(error, BadData):  # of a DataLoader's worker after the worker's traceback
        return str(error).rpartition(f"{BadData.__module__}.{BadData.__name__}: ")[2]
    chain, cause = [], error
    while cause is not None and not any(cause is link for link in chain):  # pynvml's errors can't be compared
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    full = next((link for link in chain if _is_disk_full(link)), None)
    if full is not None:
        return _no_room(full, run_dir)
    barred = next((link for link in chain if run_dir is not None and _is_of(link, run_dir)), None)
    return barred and (
        f"can't write {barred.filename}: {barred.strerror}\n"
        f"hint: is {run_dir} still there, and its disk writable?"
    )


def _is_of(error: BaseException, run_dir: Path) -> bool:
    """Whether it is the system's, about a file in the run's folder."""
    names = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    return any(isinstance(name, str) and Path(name).is_relative_to(run_dir) for name in names)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL
    return SAYS_DISK_FULL.search(str(error)) is not None


def _no_room(error: BaseException, run_dir: Path | None) -> str:
    """A write names no file, but its disk is one that is full now: the run's, of caches, of scratch files."""
    named, reason = (error.filename, error.strerror) if isinstance(error, OSError) else (None, None)
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = [Path(named)] if named else [run_dir or Path.cwd(), cache, Path(tempfile.gettempdir())]
    free = [(_free_bytes(place), place) for place in places]
    full = [found for found in free if found[0] < _LITTLE_BYTES]
    free_bytes, place = (full or free)[0]
    return (
        f"no room to write {'' if named else 'under '}{place} ({free_bytes:,} bytes free now): "
        f"{reason or first_line(error)}\n"
        "hint: free some, or --output_dir on another disk, with fewer checkpoints kept (--save_total_limit)"
    )


def _free_bytes(place: Path) -> int:
    folder = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return shutil.disk_usage(folder).free
