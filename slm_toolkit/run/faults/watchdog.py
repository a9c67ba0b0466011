"""End a broken run with one message: which rank was killed, failed or hangs, and which checkpoint to resume.

Once a second a thread of each rank checks whether this machine's other ranks are alive, and how long its own
main thread has been at one step. While nothing is wrong, ranks send each other nothing.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil
import torch

from slm_toolkit.base.errors import (
    KILLED_OR_CRASHED,
    SAYS_DISK_FULL,
    STOPPED_AFTER,
    TIME_LIMIT_VARIABLE,
    RunEnded,
    first_line,
)
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.processes import end_with_launcher, launcher_pid
from slm_toolkit.launch.torch_extensions import CompilerNews
from slm_toolkit.record.run_record import RUN_DIR_VARIABLE, RunRecord
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR
from slm_toolkit.run.checkpoint.start import by_order
from slm_toolkit.run.data.documents import BadData
from slm_toolkit.run.observe.progress import Observer, say
from slm_toolkit.run.peers.failure import is_out_of_memory, write_failure
from slm_toolkit.run.peers.machines import UNREACHED, Machines
from slm_toolkit.run.peers.peer_store import PeerStore, open_peer_store

_OURS = str(Path(__file__).parents[2])
_LOOK_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
"time to look for the cause of a failed collective: the process of the failed rank takes a while to end"
_ANSWER_SECONDS = 10.0
"a rank whose threads can run writes the place of its main thread in the peer store within this time"
_PRINT_SECONDS = 3.0
"time that another rank of this machine may take to print the message"
_FROZEN_SECONDS = 5.0
"if two looks are further apart, the process or the whole machine was stopped meanwhile"
_STANDSTILL_SECONDS = 45.0
"less than the minute after which `slm compare` shows a run's last line of output"
_COMPILING_SECONDS = 3600.0
"time limit for the first step of --kernels compiled; collectives have the same limit"


class Watchdog(Observer):
    """Watches a whole rank: `with Watchdog() as watchdog`. Set-up calls `follow`, the loop `before_step`."""

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
        self._standstill = Standstill() if RUN_DIR_VARIABLE in os.environ else None
        self._record: RunRecord | None = None
        self._run_dir: Path | None = None
        self._where = "before its first step"
        self._num_beats, self._beat_at, self._frozen_seconds = 0, 0.0, 0.0
        self._looked_at = time.monotonic()
        self._ended = threading.Event()
        self._message_lock = threading.Lock()

    def __enter__(self) -> "Watchdog":
        if self._peer_store is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        threading.excepthook = self._thread_failed
        threading.Thread(target=self._watch, daemon=True).start()
        end_with_launcher(how=False)  # from now on the thread checks the launcher, and the message names it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record a failure, and note in the peer store that this rank ends. For a bug, Python then prints."""
        failed = None
        if isinstance(error, RunEnded):
            say(f"{'error' if error.exit_code else 'note'}: {error}")
        elif isinstance(error, Exception):
            self.settle(error)
            failed = _named(error)
        if isinstance(error, Exception) and (failed or self.rank == 0):
            self._write_failure(error)
        self._leave(failed)
        self._ended.set()
        threading.excepthook = threading.__excepthook__
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if isinstance(error, RunEnded):
            raise SystemExit(error.exit_code) from None

    def follow(
        self, record: RunRecord, run_dir: Path, *, mark: int | None, config: RunConfig, num_steps: int
    ) -> None:
        """Write failures to this run's record, too, and apply its time limit to its steps.

        `mark`: see `write_failure`.
        """
        self._record, self._run_dir, self._mark, self._num_steps = record, run_dir, mark, num_steps
        self._step_seconds = config.ddp_timeout
        self._first_step_seconds = max(config.ddp_timeout, _COMPILING_SECONDS * config.compiles)

    def before_step(self, step: int) -> None:
        self.beat(f"at step {step + 1} of {self._num_steps}")

    def after_step(self, step: int, loss: torch.Tensor, norm: object) -> None:
        self.beat(f"after step {step + 1} of {self._num_steps}")

    def end(self, observed: dict[str, Any]) -> None:
        self.beat("after the last step")

    def beat(self, where: str) -> None:
        """Note that the main thread begins a step, an evaluation or a checkpoint."""
        self._where, self._frozen_seconds, self._beat_at = where, 0.0, time.monotonic()
        self._num_beats += 1

    def rest(self) -> None:
        """Stop applying the time limit, because no more steps follow, and take leave of other machines."""
        self._num_beats = 0
        self.machines.part()

    def settle(self, error: Exception) -> None:
        """End this rank with a message if one line explains `error`; return if it is a bug.

        One line explains a full disk, bad data, and a collective that failed because another rank ended.
        Only one rank of each machine prints it.
        """
        self._end_if_explained(error)
        if self._peer_store is None or not (isinstance(error, RuntimeError) and UNREACHED.search(str(error))):
            return
        if is_out_of_memory(error):
            return
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._look(has_failed=True)
            time.sleep(_LOOK_SECONDS / 10)

    def _end_if_explained(self, error: BaseException) -> None:
        """End this rank with one line about `error`; return if the error needs its traceback."""
        if (message := one_line(error, self._run_dir)) is not None:
            self._leave(_named(error))
            problem, _, hint = message.partition("\nhint: ")
            self._give_up(f"rank {self.rank} {self._where}: {problem}", hint=hint)

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Handle an error in another thread, such as a tracker's; a traceback would interrupt the message."""
        if failed.exc_value is not None:
            self._end_if_explained(failed.exc_value)
        threading.__excepthook__(failed)

    def _watch(self) -> None:
        """Look once a second, in a thread of its own."""
        while not self._ended.wait(_LOOK_SECONDS):
            self._look(has_failed=False)
            if self._record is None and self._compilers is not None:
                self._compilers.look()
            if self._standstill is not None:
                self._standstill.look(self._num_beats)
            if time.monotonic() > self._ends_at:
                self._confer(f"{STOPPED_AFTER} {self._limit_seconds:g} s, {self._where}")
            waited = self._waited_seconds()
            if self._num_beats == 0:
                continue
            limit = self._step_seconds if self._num_beats > 1 else self._first_step_seconds
            alarmed = waited > limit / 2 and self._peer_store and self._peer_store.read("alarm")
            if waited > limit or alarmed:
                self._confer(
                    f"no progress for {limit:g} s (--ddp_timeout) {self._where}",
                    hint="if a step does take that long, raise --ddp_timeout",
                )

    def _waited_seconds(self) -> float:
        """Return the seconds since the last beat, without those in which the process was frozen."""
        now = time.monotonic()
        frozen = now - self._looked_at - _LOOK_SECONDS
        if frozen > _FROZEN_SECONDS:
            self._frozen_seconds += frozen
        self._looked_at = now
        return now - self._beat_at - self._frozen_seconds

    def _look(self, *, has_failed: bool) -> None:
        """End this rank if a rank of this machine, the launcher or another machine is gone."""
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        if (lost := self.machines.lost(has_failed=has_failed)) is not None:
            self._give_up(lost, uses_peer_store=False)

    def _lost(self) -> str | None:
        """Return a message about a rank of this machine, or the launcher, that ended too early; else None."""
        for rank, pid in self._local_ranks.ended().items():
            left = self._peer_store.read(f"left {rank}")
            if left is None:
                return f"rank {rank} (pid {pid}) {KILLED_OR_CRASHED} {self._where}"
            if left["failed"] is not None:
                return f"rank {rank} (pid {pid}) failed {self._where}: {left['failed']}"
        if self._launcher is not None and os.getppid() != self._launcher:
            return f"the launcher (pid {self._launcher}) {KILLED_OR_CRASHED} {self._where}"
        return None

    def _confer(self, problem: str, *, hint: str = "") -> NoReturn:
        """Publish this rank's place, read those of the others, and end with `problem` and its cause."""
        stalls = {self.rank: stall_of(self.rank, os.getpid())}
        if (store := self._peer_store) is not None:
            store.write(f"stall {self.rank}", asdict(stalls[self.rank]))
            store.write("alarm", self.rank)
            deadline = time.monotonic() + _ANSWER_SECONDS
            for rank in {*range(self._num_ranks)} - stalls.keys():
                while (stall := store.read(f"stall {rank}")) is None and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS / 4)
                if stall is not None:
                    stalls[rank] = Stall(**stall)
        silent = sorted(set(range(self._num_ranks)) - stalls.keys())
        states = [self._local_ranks.state_of(rank) for rank in silent]
        cause = explain([stalls[rank] for rank in sorted(stalls)], states)
        self._give_up(f"{problem}: {cause}", hint=hint, silent=silent)

    def _leave(self, failed: str | None) -> None:
        """Write in the peer store that this process ends, with its error if it failed."""
        if self._peer_store is not None:
            self._peer_store.write(f"left {self.rank}", {"failed": failed})

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: it comes from a launcher that lost a rank, or from a user who stops the run."""
        if self._message_lock.locked():  # another thread is printing the message
            return
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        self._leave(None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _give_up(
        self, problem: str, *, hint: str = "", silent: list[int] | None = None, uses_peer_store: bool = True
    ) -> NoReturn:
        """Print and record the problem on one rank per machine, kill the `silent` ranks, end this process.

        Pass uses_peer_store=False if the store may be on the machine that is gone; then this rank prints.
        """
        if not self._message_lock.acquire(blocking=False):
            time.sleep(10 * _PRINT_SECONDS)  # the other thread ends the process
            os._exit(1)
        store = self._peer_store if uses_peer_store else None
        prints = store is None or store.is_first(f"prints {os.environ.get('GROUP_RANK', '0')}", self.rank)
        if prints is None:  # the launcher is gone, and its store too
            prints = self.rank < min(self._local_ranks.living(), default=self.rank + 1)
            time.sleep(2 * _LOOK_SECONDS)  # until other ranks have seen this rank alive
        if prints:
            self._report(problem, hint)
            self._local_ranks.kill(silent or [])
        else:
            time.sleep(_PRINT_SECONDS)
        os._exit(1)  # not sys.exit: the training thread may wait forever

    def _report(self, problem: str, hint: str) -> None:
        """Print the problem on stderr and write it to the record."""
        hints = [hint] if hint else []
        if self._run_dir is not None and (saved := by_order(self._run_dir / CHECKPOINTS_DIR)):
            hints.append(f"--resume_from_checkpoint latest resumes from {saved[-1]}")
        with suppress(OSError):  # stderr may go to the full disk
            lines = f"error: {problem}\n" + (f"hint: {'; '.join(hints)}\n" if hints else "")
            sys.stderr.write(lines)  # in one write, because other ranks may write too
            sys.stderr.flush()
        self._write_failure(RuntimeError(problem))

    def _write_failure(self, error: Exception) -> None:
        if self._record is not None:
            write_failure(self._record, error, self._run_dir, mark=self._mark)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# Find the rank that has ended, is stopped or hangs, and the line in which it hangs.

_WAITING = re.compile(
    r"torch/distributed/|torch/autograd/graph\.py|torch/cuda/(streams|__init__)\.py|deepspeed/comm/|"
    r"deepspeed/runtime/zero/\S+ in wait|slm_toolkit/run/peers/step_exchange\.py"
)
"a thread whose innermost frames are in these places waits for other ranks: in a collective or for the GPU"


class LocalRanks:
    """The processes of this machine's other ranks. Each rank writes its process id in the peer store."""

    def __init__(self, peer_store: PeerStore | None) -> None:
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._peer_store = peer_store
        self._others = {*range(rank - local_rank, rank - local_rank + num_local)} - {rank}
        self._pids: dict[int, int] = {}
        if peer_store is None:
            self._others = set()
        else:
            peer_store.write(f"pid {rank}", os.getpid())

    def ended(self) -> dict[int, int]:
        """Return {rank: process id} of the ended ranks. Stops reading the store once it has all ids."""
        for rank in sorted(self._others - self._pids.keys()):
            if (pid := self._peer_store.read(f"pid {rank}")) is not None:
                self._pids[rank] = pid
        return {rank: pid for rank, pid in sorted(self._pids.items()) if _status(pid) is None}

    def living(self) -> list[int]:
        """Return the ranks that have not ended. A rank whose process id is unknown counts as living."""
        return sorted(self._others - self.ended().keys())

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank that does not answer, from this machine's process table."""
        if (pid := self._pids.get(rank)) is None:
            return f"rank {rank} does not answer"
        state = _STATES.get(_status(pid), "does not answer: it is stuck in native code that holds the GIL")
        return f"rank {rank} (pid {pid}) {state}"

    def kill(self, ranks: list[int]) -> None:
        """Kill ranks that can't end themselves, because the launcher would wait 30 s for each."""
        for rank in self._pids.keys() & ranks:
            if _status(self._pids[rank]) is not None:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)


_STATES = {
    None: "has ended",
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP, a debugger?)",
    psutil.STATUS_TRACING_STOP: "is stopped (SIGSTOP, a debugger?)",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
}
"by the state of a rank's process that does not answer"


def _status(pid: int) -> str | None:
    """Return the state of a process; None if it has ended."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status


@dataclass(frozen=True)
class Stall:
    """Where a rank is that has exceeded the time limit of a step."""

    rank: int
    pid: int
    is_waiting: bool
    "True if it waits for other ranks or for its GPU, which then waits for other ranks"
    has_moved: bool
    "True if its stack changed between two looks: it is slow, but works"
    place: str
    "`file:line in function`, and the line of slm_toolkit that called it"


def stall_of(rank: int, pid: int) -> Stall:
    """Look at the stack of this process's main thread twice, from another thread."""
    first = _frames_of_main_thread()
    time.sleep(_LOOK_SECONDS)
    second = _frames_of_main_thread()
    waiting = waits_for_others(second) or _gpu_is_busy()
    return Stall(rank, pid, waiting, first != second, _place(second))


def explain(stalls: list[Stall], silent: list[str]) -> str:
    """Return a sentence that names the hanging ranks, their place, and the ranks that waited for them.

    `silent`: a clause for each rank that did not answer.
    """
    stuck = [stall for stall in stalls if not stall.is_waiting]
    waiting = [stall for stall in stalls if stall.is_waiting]
    verb = "waits" if silent else "hung"  # it may wait for the rank that does not answer
    clauses = silent + [
        f"rank {stall.rank} (pid {stall.pid}) "
        f"{'is still at work' if stall.has_moved else verb} in {stall.place}"
        for stall in stuck
    ]
    if not clauses:  # every rank waits, such as a single rank for its GPU
        return "; ".join(f"rank {stall.rank} (pid {stall.pid}) waits in {stall.place}" for stall in waiting)
    if not waiting:
        return "; ".join(clauses)
    ranks = ", ".join(str(stall.rank) for stall in waiting)
    return f"{'; '.join(clauses)}, while rank{'s' * (len(waiting) > 1)} {ranks} waited"


class Standstill:
    """Writes a line each time that this rank's main thread has made no step for a while, with its place.

    `folder`: of the script; the place names the line there that called the innermost function.
    """

    def __init__(self, folder: str = _OURS) -> None:
        self._folder, self._num_steps, self._since = folder, -1, 0.0

    def look(self, num_steps: int) -> None:
        """Call it every second. A rank that waits for other ranks is silent."""
        now = time.monotonic()
        if num_steps != self._num_steps:
            self._num_steps, self._since = num_steps, now
        elif now > self._since + _STANDSTILL_SECONDS:
            self._since, frames = now, _frames_of_main_thread()
            if not waits_for_others(frames):
                rank = os.environ.get("RANK", "0")
                print(f"rank {rank} is in {_place(frames, self._folder)}", file=sys.stderr, flush=True)


def _place(frames: list[str], folder: str = _OURS) -> str:
    ours = next((frame for frame in frames[1:] if frame.startswith(folder)), None)
    return _with_short_path(frames[0]) + (f", called from {_with_short_path(ours)}" if ours else "")


def _with_short_path(frame: str) -> str:
    """Return a frame with only the last two parts of its path."""
    path, _, rest = frame.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{rest}"


def waits_for_others(frames: Sequence[str]) -> bool:
    """Return True if a stack (`file:line in function`, innermost first) waits for other ranks."""
    return any(_WAITING.search(frame) for frame in frames[:2])


def _frames_of_main_thread() -> list[str]:
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
    return [f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in stack]


def _gpu_is_busy() -> bool:
    """Return True if work is queued on this rank's GPU.

    The CPU may be far ahead of a collective that the GPU waits in, so the stack alone does not show the wait.
    A separate thread queries the GPU, because the driver may not answer while a queue is full.
    """
    if not torch.cuda.is_initialized():
        return False
    answers: list[bool] = []
    stream = torch.cuda.default_stream(int(os.environ.get("LOCAL_RANK", "0")))
    query = threading.Thread(target=lambda: answers.append(stream.query()), daemon=True)
    query.start()
    query.join(_LOOK_SECONDS)
    return answers != [True]


# Explain errors that are not bugs in one line: a folder that can't be written, bad data.


def one_line(error: BaseException | None, run_dir: Path | None) -> str | None:
    """Return a message about `error`, with a hint on a second line; None for a bug: print its traceback."""
    if isinstance(error, BadData):  # a DataLoader puts its worker's traceback before the message
        return str(error).rpartition(f"{BadData.__module__}.{BadData.__name__}: ")[2]
    seen: list[int] = []  # not the errors: pynvml's can't be compared
    while error is not None and id(error) not in seen:
        if SAYS_DISK_FULL.search(str(error)):
            return _no_room(error, run_dir)
        is_of_run = run_dir is not None and str(run_dir) in str(error)
        if isinstance(error, OSError) and error.filename and is_of_run:
            return (
                f"can't write {error.filename}: {error.strerror}\n"
                f"hint: check that {run_dir} still exists and its disk is writable"
            )
        seen.append(id(error))
        error = error.__cause__ or error.__context__
    return None


def _no_room(error: BaseException, run_dir: Path | None) -> str:
    """Return a message that names the full disk.

    If the error names no file, it is the disk of the run, of the caches or of temporary files: the one with
    the least room now.
    """
    file_name, reason = (error.filename, error.strerror) if isinstance(error, OSError) else (None, None)
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = [Path(file_name)] if file_name else [run_dir or Path.cwd(), cache, Path(tempfile.gettempdir())]
    free_bytes, place = min((_free_bytes(place), place) for place in places)
    return (
        f"no room to write {'' if file_name else 'under '}{place} ({free_bytes:,} bytes free now): "
        f"{reason or first_line(error)}\n"
        "hint: free some space, put --output_dir on another disk, or keep fewer checkpoints "
        "(--save_total_limit)"
    )


def _free_bytes(place: Path) -> int:
    folder = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return shutil.disk_usage(folder).free
