"""End a broken run with one message: which rank was killed, failed or hangs, and which checkpoint to resume.

Once a second a thread of each rank checks whether this machine's other ranks are alive, and how long its own
main thread has been at one step. While nothing is wrong, ranks send each other nothing.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil
import torch

from slm_toolkit.base.errors import (
    KILLED_OR_CRASHED,
    STOPPED_AFTER,
    TIME_LIMIT_VARIABLE,
    RunEnded,
    about_path,
    first_line,
)
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.processes import end_with_launcher, launcher_pid
from slm_toolkit.launch.torch_extensions import CompilerNews
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR
from slm_toolkit.run.checkpoint.start import by_order
from slm_toolkit.run.data.documents import BadData
from slm_toolkit.run.observe.progress import Observer, say
from slm_toolkit.run.peers.failure import is_out_of_memory, write_failure
from slm_toolkit.run.peers.machines import UNREACHED, Machines
from slm_toolkit.run.peers.peer_store import open_peer_store

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
_COMPILING_SECONDS = 3600.0
"time limit for the first step of --kernels compiled; collectives have the same limit"


class Watchdog(Observer):
    """Watches a whole rank: `with Watchdog() as watchdog`. Set-up calls `follow`, the loop `before_step`."""

    def __init__(self) -> None:
        self.rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        self._num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._is_first_here = local_rank == 0
        first_here = self.rank - local_rank
        self._others = {*range(first_here, first_here + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))}
        self._others.discard(self.rank)
        self._pids: dict[int, int] = {}
        "of this machine's other ranks, which write them in the peer store"
        self._store = open_peer_store()
        self._write("pid", os.getpid())
        self._launcher = launcher_pid()
        self.machines = Machines()
        limit = os.environ.get(TIME_LIMIT_VARIABLE, "inf inf").split()
        self._limit_seconds, self._ends_at = float(limit[0]), float(limit[1])
        self._compilers = CompilerNews()
        self._record: RunRecord | None = None
        self._run_dir: Path | None = None
        self._where, self._num_beats = "before its first step", 0
        self._ended = threading.Event()
        self._message_lock = threading.Lock()

    def __enter__(self) -> "Watchdog":
        if self._store is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
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
            self._settle(error)
            failed = _named(error)
        if isinstance(error, Exception) and (failed or self.rank == 0):
            self._write_failure(error)
        self._write("left", {"failed": failed})
        self._ended.set()
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
        self._where = where
        self._num_beats += 1

    def rest(self) -> None:
        """Stop applying the time limit, because no more steps follow, and take leave of other machines."""
        self._num_beats = 0
        self.machines.part()

    def _settle(self, error: Exception) -> None:
        """End this rank with a message if one line explains `error`; return if it is a bug.

        One line explains a full disk, bad data, and a collective that failed because another rank ended.
        Only one rank of each machine prints it.
        """
        message = None
        if isinstance(error, BadData):  # a DataLoader puts its worker's traceback before the message
            message = str(error).rpartition(f"{BadData.__module__}.{BadData.__name__}: ")[2]
        elif isinstance(error, OSError):
            error.filename = error.filename or self._run_dir  # a failed write names no file
            message = about_path(error)
        if message is not None:
            self._write("left", {"failed": _named(error)})
            problem, _, hint = message.partition("\nhint: ")
            self._give_up(f"rank {self.rank} {self._where}: {problem}", hint=hint)
        is_collectives = isinstance(error, RuntimeError) and UNREACHED.search(str(error))
        if self._store is None or not is_collectives or is_out_of_memory(error):
            return
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._look(has_failed=True)
            time.sleep(_LOOK_SECONDS / 10)

    def _watch(self) -> None:
        """Look once a second, in a thread of its own."""
        num_beats, waited, looked_at = 0, 0.0, time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS):
            self._look(has_failed=False)
            if self._record is None:
                self._compilers.look()
            if time.monotonic() > self._ends_at:
                self._confer(f"{STOPPED_AFTER} {self._limit_seconds:g} s, {self._where}")
            now = time.monotonic()
            waited = 0.0 if num_beats != self._num_beats else waited + min(now - looked_at, _FROZEN_SECONDS)
            num_beats, looked_at = self._num_beats, now
            if num_beats == 0:
                continue
            limit = self._step_seconds if num_beats > 1 else self._first_step_seconds
            if waited > limit or (waited > limit / 2 and self._store and self._store.read("alarm")):
                self._confer(
                    f"no progress for {limit:g} s (--ddp_timeout) {self._where}",
                    hint="if a step does take that long, raise --ddp_timeout",
                )

    def _look(self, *, has_failed: bool) -> None:
        """End this rank if a rank of this machine, the launcher or another machine is gone."""
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        if (lost := self.machines.lost(has_failed=has_failed)) is not None:
            self._give_up(lost, uses_store=False)

    def _lost(self) -> str | None:
        """Return a message about a rank of this machine, or the launcher, that ended too early; else None."""
        for rank in sorted(self._others) if self._store is not None else ():
            if rank not in self._pids and (pid := self._store.read(f"pid {rank}")) is not None:
                self._pids[rank] = pid
            if rank not in self._pids or status_of(self._pids[rank]) is not None:
                continue
            left, who = self._store.read(f"left {rank}"), f"rank {rank} (pid {self._pids[rank]})"
            if left is None:
                return f"{who} {KILLED_OR_CRASHED} {self._where}"
            if left["failed"] is not None:
                return f"{who} failed {self._where}: {left['failed']}"
        if self._launcher is not None and os.getppid() != self._launcher:
            return f"the launcher (pid {self._launcher}) {KILLED_OR_CRASHED} {self._where}"
        return None

    def _confer(self, problem: str, *, hint: str = "") -> NoReturn:
        """Publish this rank's place, read those of the others, and end with `problem` and its cause."""
        stalls = {self.rank: stall()}
        self._write("stall", stalls[self.rank])
        if self._store is not None:
            self._store.write("alarm", self.rank)
            deadline = time.monotonic() + _ANSWER_SECONDS
            for rank in {*range(self._num_ranks)} - stalls.keys():
                while (found := self._store.read(f"stall {rank}")) is None and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS / 4)
                if found is not None:
                    stalls[rank] = found
        silent = {rank: self._pids.get(rank) for rank in range(self._num_ranks) if rank not in stalls}
        self._give_up(f"{problem}: {explain(stalls, silent)}", hint=hint, silent=silent)

    def _write(self, name: str, value: Any) -> None:
        if self._store is not None:
            self._store.write(f"{name} {self.rank}", value)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: it comes from a launcher that lost a rank, or from a user who stops the run."""
        if self._message_lock.locked():  # another thread is printing the message
            return
        if (lost := self._lost()) is not None:
            self._give_up(lost)
        self._write("left", {"failed": None})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _give_up(
        self,
        problem: str,
        *,
        hint: str = "",
        silent: dict[int, int | None] | None = None,
        uses_store: bool = True,
    ) -> NoReturn:
        """Print and record the problem on one rank per machine, kill the `silent` ranks, end this process.

        Pass uses_store=False if the store may be on the machine that is gone; then this rank prints.
        """
        if not self._message_lock.acquire(blocking=False):
            time.sleep(10 * _PRINT_SECONDS)  # the other thread ends the process
            os._exit(1)
        prints = True
        if self._store is not None and uses_store:
            prints = self._store.is_first(f"prints {os.environ.get('GROUP_RANK', '0')}", self.rank)
        if prints or (prints is None and self._is_first_here):  # None: the launcher and its store are gone
            self._report(problem, hint)
            for pid in (silent or {}).values():  # the launcher would wait 30 s for each
                with suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGKILL if pid else 0)
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
_STATES = {
    None: "has ended",
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP, a debugger?)",
    psutil.STATUS_TRACING_STOP: "is stopped (SIGSTOP, a debugger?)",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
}
"by the state of a rank's process that does not answer; None: there is none"


def status_of(pid: int) -> str | None:
    """Return the state of a process; None if it has ended."""
    with suppress(psutil.NoSuchProcess):
        if (status := psutil.Process(pid).status()) != psutil.STATUS_ZOMBIE:
            return status
    return None


def explain(stalls: dict[int, dict[str, Any]], silent: dict[int, int | None]) -> str:
    """Return a sentence that names the hanging ranks, their place, and the ranks that waited for them.

    `stalls`: what `stall` returned on each rank. `silent`: the ranks that did not answer with their process
    ids, None on other machines.
    """
    clauses = []
    for rank, pid in silent.items():
        state = "does not answer"
        if pid is not None:
            state = _STATES.get(status_of(pid), f"{state}: it is stuck in native code that holds the GIL")
        clauses.append(f"rank {rank}{f' (pid {pid})' if pid else ''} {state}")
    stuck = [rank for rank in sorted(stalls) if not stalls[rank]["is_waiting"]]
    waiting = [str(rank) for rank in sorted(stalls) if rank not in stuck]
    if not silent and not stuck:  # all wait, such as a single rank for its GPU
        stuck, waiting = sorted(stalls), []
    for rank in stuck:
        # it may wait for a rank that does not answer
        verb = "is still at work" if stalls[rank]["has_moved"] else "is" if silent else "hung"
        clauses.append(f"rank {rank} (pid {stalls[rank]['pid']}) {verb} in {stalls[rank]['place']}")
    ranks = f", while rank{'s' * (len(waiting) > 1)} {', '.join(waiting)} waited" if waiting else ""
    return "; ".join(clauses) + ranks


def stall() -> dict[str, Any]:
    """Look at the stack of this process's main thread twice, from another thread.

    is_waiting: it waits for other ranks, or for its GPU, which then waits for other ranks. has_moved: its
    stack changed between the looks. place: the innermost function, and our line that called it.
    """
    before = _frames_of_main_thread()
    time.sleep(_LOOK_SECONDS)
    frames = _frames_of_main_thread()
    place = _with_short_path(frames[0])
    if ours := next((frame for frame in frames[1:] if frame.startswith(_OURS)), None):
        place += f", called from {_with_short_path(ours)}"
    is_waiting = waits_for_others(frames) or _gpu_is_busy()
    return {"pid": os.getpid(), "is_waiting": is_waiting, "has_moved": before != frames, "place": place}


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
