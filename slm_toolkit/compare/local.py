"""Executes planned runs on this machine; each run is a separate process tree and ends as a record."""

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, TypeVar

import psutil

from slm_toolkit.base.errors import DISK_FULL, TIME_LIMIT_VARIABLE
from slm_toolkit.base.safe_files import hold, open_new, read_end
from slm_toolkit.base.typed_files import Count, Finite, NonNegative, converted
from slm_toolkit.base.user_files import json_of
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.outcome import (
    LOG_FILE,
    MOST_LOG_BYTES,
    Ended,
    own_record,
    record_of,
    written_record,
)
from slm_toolkit.config.flags import flags_of
from slm_toolkit.hardware.gpus import Machine, num_cores
from slm_toolkit.hardware.machine import look_at_host_ram, who_killed
from slm_toolkit.launch.processes import adopt_orphans, safe_environment
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import PROGRESS_FILE, RECORD_FILE, RUN_DIR_VARIABLE, RunRecord
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, finished, model_damage, saved_model
from slm_toolkit.strategy.strategy import config_options, write_resolved

# Slots for runs that run at the same time: disjoint GPUs of this machine.

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time."""

    num_slots: int = 1
    "number of slots on this machine"
    visible_devices: tuple[str, ...] | None = None
    "names for CUDA_VISIBLE_DEVICES; None: all GPUs that are visible here"


def slots_of(machine: Machine, *, gpus_per_run: int | None, num_processes: int | None) -> list[Slot]:
    """Return the requested slots, by default one. Raises ValueError for too few GPUs."""
    if gpus_per_run is None:
        return [Slot()]
    if gpus_per_run > machine.num_gpus:
        raise ValueError(f"--gpus_per_run is {gpus_per_run}: this machine has {machine.num_gpus}")
    if num_processes is not None and num_processes > gpus_per_run:
        raise ValueError(
            f"--num_processes is {num_processes}, --gpus_per_run {gpus_per_run}: each rank needs its own GPU"
        )
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
    """Run the jobs in order, each in a free slot. Yield a job's index and result when it ends.

    If Ctrl-C or a bug in a job ends this early, sets `stop` and waits for the running jobs to end.
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
        for future in as_completed(index_of):
            yield index_of[future], future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


Progress = Callable[[dict[str, Any] | None], None]
"called several times a second with the content of the run's progress file, None before there is one"
_GRACE_SECONDS = 20.0
"extra time at the time limit, in which the run names its hanging rank and ends itself"


def kept_record(run: PlannedRun) -> RunRecord | None:
    """Return the record of an earlier run with the same identity that ended ok or out of memory.

    Returns None, too, if this run must save a model or a tracker's log that the earlier run did not save.
    """
    if (record := written_record(run.folder)) is None:
        return None
    lacks_model = run.config.saves_model and (
        record.model_dir is None or model_damage(Path(record.model_dir)) is not None
    )
    lacks_log = run.config.report_to not in ("none", record.reported_to)
    if record.status == "ok" and (lacks_model or lacks_log):
        return None
    return record if record.identity == run.identity and record.status in ("ok", "oom") else None


def begin(runs: Sequence[PlannedRun], *, force: bool) -> None:
    """Raise ValueError if one of the runs would replace what an earlier run saved, unless `force`."""
    for run in () if force else runs:
        if run.config.overwrite_output_dir or kept_record(run) is not None:
            continue
        record = written_record(run.folder)  # with --save_steps, an unfinished run resumes
        resumes = run.config.save_steps is not None and (record is None or record.status != "ok")
        saved = [*finished(run.folder / CHECKPOINTS_DIR), *filter(None, [saved_model(run.folder)])]
        if saved and not resumes:
            raise ValueError(
                f"this comparison would replace {saved[-1]} of an earlier run\n"
                "hint: --overwrite_output_dir starts such runs again from the beginning, --force starts all "
                "runs again; another --output_dir keeps them"
            )


def cancel() -> None:
    """Nothing is left to cancel: each run has ended with the thread that launched it."""


def execute(
    run: PlannedRun, slot: Slot, *, timeout_seconds: float, stop: threading.Event, on_progress: Progress
) -> RunRecord:
    """Launch one run and return its record. If `stop` is set, raises CancelledError without a record."""
    started_at, started = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        clear(run.folder, RECORD_FILE, LOG_FILE)
        ended = launch(run, slot, timeout_seconds=timeout_seconds, stop=stop, on_progress=on_progress)
        clear(run.folder)
        if (record := own_record(run, ended)) is not None:
            return record
        record = record_of(run, ended)
    except OSError as error:  # an error in this run's folder must not stop the other runs
        full = "no room on the disk: " if error.errno in DISK_FULL else ""
        record = record_of(
            run,
            Ended([], started_at, time.monotonic() - started, 1, None, None, ""),
            reason=f"{full}{error.strerror}: {error.filename or run.folder}",
        )
    with suppress(OSError):  # if it can't be written, only this comparison's table shows it
        write_record(record, run.folder)
    return record


def launch_command(run: PlannedRun, yaml_path: Path) -> list[str]:
    """Return the command line of a run; the record shows it as `accelerate launch ...`."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *config_options(str(yaml_path)),
        *("--num_processes", str(run.num_processes)),
        *("--main_process_port", "0"),
        *(run.words or ("-m", "slm_toolkit.train", *flags_of(run.config))),
    ]


def forget(run: PlannedRun) -> None:
    """Remove an earlier run's folder with its checkpoints; the record first, so no half folder counts."""
    with suppress(OSError):
        clear(run.folder, RECORD_FILE)
    shutil.rmtree(run.folder, ignore_errors=True)


def clear(folder: Path, *names: str) -> None:
    """Remove `names`, the progress file and half-written files from `folder`.

    Raises OSError if one of `names` is a folder with files: they may be somebody's work.
    """
    for pattern in (*names, PROGRESS_FILE, "progress.new", f".{RECORD_FILE}.*"):
        for path in folder.glob(pattern):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            elif path.name in names:
                path.rmdir()
            else:
                shutil.rmtree(path)


def launch(
    run: PlannedRun, slot: Slot, *, timeout_seconds: float, stop: threading.Event, on_progress: Progress
) -> Ended:
    """Launch a run and wait until it ends, exceeds its time limit, or `stop` is set."""
    yaml_path = write_resolved(run.strategy, run.folder / "launch", run.num_processes)
    command = launch_command(run, yaml_path)
    folder, before = run.folder, look_at_host_ram()
    least_available_bytes = before.available_bytes
    started_at, started = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    flooded = False
    with open_new(folder / LOG_FILE, "xb") as log:
        keeper = start_kept(command, folder, log, _environment(run, slot, timeout_seconds))
        try:
            while keeper.poll() is None and not stop.is_set():
                on_progress(progress_of(folder))
                least_available_bytes = min(least_available_bytes, psutil.virtual_memory().available)
                flooded = os.fstat(log.fileno()).st_size > MOST_LOG_BYTES
                if flooded or time.monotonic() - started > timeout_seconds + _GRACE_SECONDS:
                    break
                time.sleep(0.2)
            timed_out = time.monotonic() - started > timeout_seconds and keeper.poll() != 0
        finally:
            end_kept(keeper, folder)
    if stop.is_set():
        raise CancelledError
    return Ended(
        command=command,
        started_at=started_at,
        seconds_total=time.monotonic() - started,
        exit_code=keeper.returncode,
        progress=last_step_of(folder),
        stopped_after_seconds=timeout_seconds if timed_out else None,
        flooded=flooded,
        killed_by=who_killed(before, look_at_host_ram(), least_available_bytes=least_available_bytes),
    )


def _environment(run: PlannedRun, slot: Slot, timeout_seconds: float) -> dict[str, str]:
    """Return the environment of a run: the slot's GPUs, and its share of CPU threads for each process."""
    env = safe_environment()
    env |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env[TIME_LIMIT_VARIABLE] = f"{timeout_seconds} {time.monotonic() + timeout_seconds}"
    env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // (run.num_processes * slot.num_slots))))
    if slot.visible_devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.visible_devices)
    return env


class _Progress(TypedDict, total=False):
    stage: str
    step: Count
    num_steps: Count | None
    loss: Finite | None
    tokens_per_second: NonNegative | None


_UNKNOWN = dict.fromkeys(("num_steps", "loss", "tokens_per_second"))
_PROGRESS_BYTES = 4096
"size limit of a progress file; real ones have a hundred bytes"


def progress_of(folder: Path) -> dict[str, Any] | None:
    """Return the step that a run has done with its loss and rate, or the stage before its first step."""
    data, _ = read_end(folder / PROGRESS_FILE, _PROGRESS_BYTES)
    try:
        state = converted(json_of(data.decode(), PROGRESS_FILE, hint=""), _Progress)
    except ValueError:  # not there yet, or written by something else
        return None
    if "step" in state:
        return _UNKNOWN | state
    return state if "stage" in state else None


def last_step_of(folder: Path) -> dict[str, Any] | None:
    """Return the last step that a run has shown; None before the first."""
    state = progress_of(folder)
    return state if state is not None and "step" in state else None


# The keeper: a process between `slm compare` and a launch; it ends the run's processes when either ends.
#
# Each rank is its own session, so a signal to a process group does not reach all ranks. The keeper adopts
# processes whose parents end, so it finds all processes of a launch. `slm compare` can't handle SIGKILL, so
# the keeper's stdin is a pipe from it. Nothing is written to the pipe. When `slm compare` dies, the kernel
# closes the pipe, and the keeper ends the launch.

_GENTLE_SECONDS = 5
"time that processes have to end after SIGTERM"
_LONGEST_SECONDS = 30
"time after which `end_processes_of` gives up"


def processes_of(folder: Path, *, keeper: int | None = None) -> list[psutil.Process]:
    """Return all processes of the run in `folder`, or of runs directly below it, except this process.

    Ignores runs further down, because they may belong to another comparison. Finds processes by their
    environment; with `keeper`, the pid of a running keeper, also all processes below it.
    """
    processes = [] if keeper is None else psutil.Process(keeper).children(recursive=True)
    for process in psutil.process_iter():
        try:
            run_dir = process.environ().get(RUN_DIR_VARIABLE)
        except (psutil.Error, OSError):  # another user's process, or it has just ended
            continue
        if run_dir and process.pid != os.getpid() and folder in (Path(run_dir), Path(run_dir).parent):
            processes.append(process)
    return list(dict.fromkeys(processes))


def end_processes_of(folder: Path, *, gently: bool = True, keeper: int | None = None) -> list[psutil.Process]:
    """End the processes of `processes_of`, and return those that can't be ended.

    Sends SIGTERM, and SIGKILL to processes that still run after 5 seconds. With gently=False, sends SIGKILL
    at once.
    """
    until = time.monotonic() + _LONGEST_SECONDS
    while (remaining := processes_of(folder, keeper=keeper)) and time.monotonic() < until:
        for process in remaining:
            try:
                process.terminate() if gently else process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=_GENTLE_SECONDS)
        gently = False  # the loop looks again, because a process may have started another
    return remaining


LOCK_FILE = ".compare.lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock `folder` for the block; the lock also ends with this process, for any reason.

    Ends processes that an earlier comparison left over, and yields their number. Raises ValueError if
    another comparison has the lock, or if leftover processes can't be ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = hold(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"another `slm compare` ({error.strerror}) is running in {folder}\n"
            "hint: wait until it ends, or give another --output_dir"
        ) from None
    except OSError as error:
        raise ValueError(
            f"can't write {error.filename}: {error.strerror}\nhint: choose another folder with --output_dir"
        ) from None
    with file:
        left_over = processes_of(folder)
        if stuck := end_processes_of(folder, gently=False):
            raise ValueError(
                f"processes {', '.join(str(process.pid) for process in stuck)} of an earlier comparison in "
                f"{folder} can't be ended and still use memory\nhint: check for a stuck driver or disk"
            )
        yield len(left_over)


def start_kept(
    command: list[str], run_dir: Path, log: BinaryIO, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` under a keeper. The keeper's exit code is the command's, or 128 + N after signal N."""
    return subprocess.Popen(
        [sys.executable, "-m", "slm_toolkit.compare.local", *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**env, RUN_DIR_VARIABLE: str(run_dir)},
    )


def end_kept(keeper: subprocess.Popen[bytes], run_dir: Path) -> None:
    """End the keeper and all processes of the run, even if the keeper was killed."""
    keeper.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(timeout=15)
    end_processes_of(run_dir, gently=False, keeper=keeper.pid if keeper.poll() is None else None)
    keeper.wait()


def main() -> None:
    """Run the command of the arguments; end all its processes when it or `slm compare` ends."""
    must_end = threading.Event()

    def wait_for_end_of_parent() -> None:
        os.read(sys.stdin.fileno(), 1)
        must_end.set()

    signal.signal(signal.SIGTERM, lambda *_: must_end.set())
    adopt_orphans()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=wait_for_end_of_parent, daemon=True).start()
    while child.poll() is None and not must_end.wait(0.05):
        pass
    code = child.returncode
    end_processes_of(Path(os.environ[RUN_DIR_VARIABLE]), keeper=os.getpid())
    sys.exit(1 if code is None else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
