"""Executes planned runs as Slurm jobs: submits them, finds earlier jobs again, waits for their records."""

import dataclasses
import math
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.base.user_files import check_name
from slm_toolkit.compare import local
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.local import Progress, Slot
from slm_toolkit.compare.outcome import LOG_FILE, planned_record, reason_in_log, written_record
from slm_toolkit.config.flags import flags_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.launch.processes import safe_environment
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import PROGRESS_FILE, RECORD_FILE, RunRecord
from slm_toolkit.strategy.strategy import Strategy, on_nodes, write_resolved

# The script of a run's Slurm job, filled in from a readable template.

_TEMPLATE = Path(__file__).parent / "slurm.sh"
SCRIPT_FILE = "slurm.sh"
"name of the script in the run's folder; jobs are found again by its path, which Slurm's queue shows"


@dataclass(frozen=True)
class SlurmNodes:
    """The nodes and options that every job of a comparison requests."""

    num_nodes: int
    gpus_per_node: int
    "0: CPU processes"
    options: tuple[str, ...]
    "the user's options for sbatch"

    @property
    def machine(self) -> Machine:
        """All nodes as one machine. The GPU's name is unknown; options that choose hardware replace it."""
        chosen = [word for word, name in _named(self.options) if name in _CHOOSES_HARDWARE]
        return Machine(self.num_nodes * self.gpus_per_node, shlex.join(chosen) or None)

    def with_strategy(self, strategy: Strategy) -> Strategy:
        """Return the strategy for the number of nodes; a single-process strategy uses one node."""
        num_nodes = 1 if strategy.is_single else self.num_nodes
        return strategy if strategy.num_machines == num_nodes else on_nodes(strategy, num_nodes)


def slurm_nodes(*, num_nodes: int, gpus_per_node: int, options: str) -> SlurmNodes:
    """Check the options. Raises ValueError with all problems."""
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:  # a quote that is not closed
        raise ValueError(
            f"--slurm_options {options!r}: {error}\nhint: write them as on sbatch's command line"
        ) from None
    problems = []
    if not gpus_per_node and (gpu_options := {name for _, name in _named(words)} & _ASKS_FOR_GPUS):
        problems.append(f"--slurm_options has {min(gpu_options)}: also set --gpus_per_node, one rank per GPU")
    if not options.isprintable():
        problems.append("--slurm_options has a character that can't be shown, such as a newline")
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: `slm compare --help all` explains --slurm_options")
    return SlurmNodes(num_nodes, gpus_per_node, words)


def script_path(run: PlannedRun) -> Path:
    return run.folder / SCRIPT_FILE


def write_script(run: PlannedRun, nodes: SlurmNodes, *, timeout_seconds: float) -> Path:
    """Write the run's YAML and its job's script. Return the script's path."""
    check_name(str(run.folder), "a run's folder")  # a newline would end the script's #SBATCH line
    num_nodes = run.strategy.num_machines
    processes_per_node = run.num_processes // num_nodes
    filled = {
        "run_name": shlex.quote(run.run_name),
        "log": shlex.quote(str(run.folder / LOG_FILE).replace("%", "%%")),  # % begins Slurm's patterns
        "num_nodes": str(num_nodes),
        "processes_per_node": str(processes_per_node),
        "num_processes": str(run.num_processes),
        "options": _options(nodes, processes_per_node, timeout_seconds),
        "python": shlex.quote(sys.executable),
        "config_file": shlex.quote(
            str(write_resolved(run.strategy, run.folder / "launch", run.num_processes))
        ),
        "train_flags": shlex.join(flags_of(run.config)),
    }
    script, template = script_path(run), _TEMPLATE.read_text()
    if run.words:  # a user's own script: another module, which gets the run's folder by an option
        _, module, *words = run.words
        template = template.replace("slm_toolkit.train", module)
        filled["train_flags"] = shlex.join(["--run_dir", str(run.folder), *words])
    write_new(script, re.sub(r"\{\{(.*?)\}\}", lambda match: filled[match[1]], template))
    return script


_ASKS_FOR_GPUS = {"gres", "gpus", "G", "gpus-per-node", "gpus-per-task"}
_CHOOSES_HARDWARE = (
    *("partition", "p", "constraint", "C", "nodelist", "w", "reservation"),
    *_ASKS_FOR_GPUS,
)
"these options are part of a run's identity; others, such as --time, change no measured number"
_CORES_PER_GPU = 4
"default --cpus-per-task per GPU: for a rank, its data loader and NCCL's threads"


def _options(nodes: SlurmNodes, processes_per_node: int, timeout_seconds: float) -> str:
    """Return the job's options: defaults for those that the user did not give, then the user's options."""
    given = {name for _, name in _named(nodes.options)}
    ours = []
    if not given & {"time", "t"}:
        ours.append(f"--time={math.ceil(timeout_seconds / 60)}")  # Slurm counts minutes
    if not given & {"cpus-per-task", "c"}:
        cores = _CORES_PER_GPU if nodes.gpus_per_node else 1
        ours.append(f"--cpus-per-task={processes_per_node * cores}")
    if nodes.gpus_per_node and not given & _ASKS_FOR_GPUS:
        ours.append(f"--gpus-per-node={processes_per_node}")
    return shlex.join([*ours, *nodes.options])


def _named(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each word with the name of its option; a value belongs to the option before it."""
    named, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
        elif word.startswith("-"):
            name = word[1:2]
        named.append((word, name))
    return named


UNKNOWN = "UNKNOWN"
"our state for a job that left the queue unobserved: Slurm shows a job for 300 s after its end (MinJobAge)"


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm last showed it."""

    job_id: int
    state: str
    "Slurm's state: PENDING, RUNNING, COMPLETED, TIMEOUT, ..."
    reason: str
    "Slurm's reason why the job waits or ended"
    seconds: float
    "run time so far"

    @property
    def is_live(self) -> bool:
        return self.state in _LIVE


def queue() -> dict[str, SlurmJob]:
    """Return this user's newest job of each script, including jobs that ended a few minutes ago."""
    jobs: dict[str, SlurmJob] = {}
    output = command("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%M|%o")
    for line in output.splitlines():
        number, state, reason, elapsed, script = line.strip().split("|", 4)
        if not number.isdigit():  # a job array: not one of our jobs
            continue
        job = SlurmJob(int(number), state, reason, _seconds(elapsed))
        if script not in jobs or jobs[script].job_id < job.job_id:
            jobs[script] = job
    return jobs


def command(*words: str) -> str:
    """Run one of Slurm's commands and return its stdout. If it fails, raises ValueError with its stderr."""
    try:
        done = subprocess.run(  # sbatch passes its environment to the job
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=safe_environment()
        )
    except FileNotFoundError:
        raise ValueError(
            f"no {words[0]} on this machine\nhint: use --launcher slurm on a login node of the cluster"
        ) from None
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"{words[0]}: {message}\nhint: --dry_run only writes the scripts")
    return done.stdout


# https://slurm.schedmd.com/squeue.html, JOB STATE CODES; in all other states a job has ended
_LIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING"),
    *("RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)


def _seconds(elapsed: str) -> float:
    """Parse Slurm's days-hours:minutes:seconds; the first parts may be missing."""
    days, _, clock = elapsed.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + (float(part) if part.isdigit() else 0.0)
    return seconds + 86400 * float(days or 0)


class SlurmJobs:
    """The jobs of one comparison. Needs no file to find them again: the queue shows each job's script."""

    def __init__(self, nodes: SlurmNodes, console: Console, *, timeout_seconds: float) -> None:
        self.nodes, self.console, self.timeout_seconds = nodes, console, timeout_seconds
        self.waiting: list[PlannedRun] = []
        "runs that are not submitted yet"
        self.jobs: dict[str, SlurmJob] = {}
        "our jobs, by script"
        self.last_line, self.refusal = "", ""
        self.next_look = 0.0
        self.has_accepted = False
        "True once Slurm accepted or showed a job of ours: a later refusal may be temporary"
        self.unseen: set[str] = set()
        "scripts whose live job was unknown to Slurm at the last look"
        self.ended_at: dict[str, float] = {}
        "time when a job was first seen to have ended, by script"

    def begin(self, runs: list[PlannedRun], *, force: bool) -> None:
        """Find the live jobs of an earlier comparison, and submit all runs that are not done.

        Raises ValueError if Slurm does not answer, or if it refuses a job and has never accepted one.
        """
        for run in runs if force else ():
            self.forget(run)
        self.waiting += [run for run in runs if self.kept_record(run) is None]
        self._submit_waiting({} if force else queue())

    def kept_record(self, run: PlannedRun) -> RunRecord | None:
        """Like `local.kept_record`, but with the record's GPU, which was unknown when the run was planned."""
        if str(script_path(run)) in self.jobs or (record := written_record(run.folder)) is None:
            return None
        return local.kept_record(dataclasses.replace(run, gpu=record.gpu))

    def forget(self, run: PlannedRun) -> None:
        """Cancel an earlier comparison's job and remove its folder, unless this comparison started it."""
        if (script := str(script_path(run))) in self.jobs or run in self.waiting:
            return
        if (job := queue().get(script)) is not None and job.is_live:
            command("scancel", str(job.job_id))
        local.forget(run)

    def execute(
        self,
        run: PlannedRun,
        slot: Slot,
        *,
        timeout_seconds: float,
        stop: threading.Event,
        on_progress: Progress,
    ) -> RunRecord:
        """Wait for a run's job, submit it if needed, and return the run's record.

        Ignores `slot` and `timeout_seconds`: Slurm chooses the nodes, and the script has the time limit.
        If `stop` is set, raises CancelledError; `cancel` then ends the job.
        """
        script = str(script_path(run))
        if script not in self.jobs and run not in self.waiting:  # a trial of a search
            self.waiting.append(run)
            self.next_look = 0.0
        while run in self.waiting or self.jobs[script].is_live:
            if time.monotonic() > self.next_look:
                self._look()
            on_progress(local.progress_of(run.folder))
            _pause(stop, 0.2)
        if (job := self.jobs.pop(script)).state in _ENDED_BY_ITSELF:
            # a record that was written on another host shows here after the file system's delay
            until = self.ended_at[script] + _SHARED_FOLDER_SECONDS
            while not (run.folder / RECORD_FILE).is_file() and time.monotonic() < until:
                _pause(stop, 0.5)
        return _record_of(run, job)

    def cancel(self) -> None:
        """Cancel all live jobs of this comparison."""
        # waiting runs, too: one may have been submitted just now
        scripts = {*self.jobs, *(str(script_path(run)) for run in self.waiting)}
        live = [job for script, job in queue().items() if script in scripts and job.is_live]
        if live:
            command("scancel", *(str(job.job_id) for job in live))
            self._say(f"cancelled {_ids(live)}")

    def _look(self) -> None:
        """Update all jobs from the queue, print their states, and submit runs that Slurm refused before."""
        try:
            jobs = queue()
        except ValueError:  # slurmctld restarts and is overloaded at times; its jobs continue
            if not self.has_accepted:
                raise
            line = "slurm: no answer from squeue, trying again"
        else:
            for script, job in self.jobs.items():
                if job.is_live:
                    self.jobs[script] = self._now(script, job, jobs.get(script))
            self._submit_waiting(jobs)
            line = _counts(self.jobs.values(), num_waiting=len(self.waiting))
        is_new, self.last_line = line != self.last_line, line
        self.next_look = time.monotonic() + (_PAUSE_SECONDS if is_new else _LONG_PAUSE_SECONDS)
        if is_new:
            self._say(line)

    def _now(self, script: str, job: SlurmJob, in_queue: SlurmJob | None) -> SlurmJob:
        """Return a live job's present state. It counts as lost only if it is unknown twice in a row."""
        now = in_queue
        if now is None or now.job_id < job.job_id:  # an older job: ours is not listed yet
            now = dataclasses.replace(job, state=UNKNOWN)
        if now.state == UNKNOWN and script not in self.unseen:
            self.unseen.add(script)
            return job
        self.unseen.discard(script)
        if not now.is_live:
            self.ended_at[script] = time.monotonic()
        return now

    def _submit_waiting(self, in_queue: dict[str, SlurmJob]) -> None:
        """Find the jobs of waiting runs, or submit the runs until Slurm refuses one.

        Raises ValueError if Slurm has never accepted a job.
        """
        found, submitted = [], []
        while self.waiting:
            run = self.waiting[0]
            job = in_queue.get(script := str(script_path(run)))
            # of a job that is completing, the result is decided
            if job is not None and job.is_live and job.state != "COMPLETING":
                found.append(job)
            else:
                try:
                    job = self._submit(run)
                except ValueError as error:  # usually a limit on jobs per user: some must end first
                    if not self.has_accepted:
                        raise
                    if str(error) != self.refusal:
                        self.refusal = str(error)
                        self._say(f"{len(self.waiting)} runs wait: {error}")
                    break
                submitted.append(job)
            self.jobs[script] = job
            self.has_accepted = True
            self.waiting.pop(0)
        if found:
            self._say(f"found {_ids(found)} of an earlier comparison")
        if submitted:
            self._say(f"submitted {_ids(submitted)}")

    def _submit(self, run: PlannedRun) -> SlurmJob:
        script = write_script(run, self.nodes, timeout_seconds=self.timeout_seconds)
        local.clear(run.folder, RECORD_FILE, LOG_FILE)
        answer = command("sbatch", "--parsable", str(script))
        return SlurmJob(int(answer.partition(";")[0]), "PENDING", "None", 0.0)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


_ENDED_BY_ITSELF = ("COMPLETED", "FAILED", UNKNOWN)
"in these states the run's own record explains the end"
_MEANING = {
    "COMPLETED": "it left no record; is its folder on a file system that all nodes share?",
    "OUT_OF_MEMORY": 'it ran out of host memory; --slurm_options="--mem=..." requests more',
    UNKNOWN: "Slurm no longer has its final state",
}
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 1.0, 10.0
"time between two looks at the queue; longer if nothing changes, because all users share the queue"
_SHARED_FOLDER_SECONDS = 60.0  # nfs(5): acdirmax, after which new files in a folder must be visible


def _pause(stop: threading.Event, seconds: float) -> None:
    """Sleep; raise CancelledError if `stop` is set meanwhile."""
    if stop.wait(seconds):
        raise CancelledError


def _record_of(run: PlannedRun, job: SlurmJob) -> RunRecord:
    """Return the record that the run wrote, or a record of Slurm's reason for its end."""
    log = run.folder / LOG_FILE
    last = local.last_step_of(run.folder)
    with suppress(OSError):
        (run.folder / PROGRESS_FILE).unlink(missing_ok=True)
    record = written_record(run.folder)
    if record is not None and job.state in _ENDED_BY_ITSELF:
        if record.status != "ok" or job.state != "FAILED":
            return record
    elif record is not None and record.status == "oom":
        return record
    meaning = _MEANING.get(job.state, job.reason)
    where = f" at step {last['step']} of {last['num_steps']}" if last else ""
    quoted = f"; {reason_in_log(log)}" if log.is_file() and log.stat().st_size else ""
    record = planned_record(
        run,
        status="timeout" if job.state == "TIMEOUT" else "failed",
        started_at=datetime.fromtimestamp(time.time() - job.seconds, UTC).isoformat(timespec="seconds"),
        reason=f"Slurm job {job.job_id} {job.state}: {meaning}{where}{quoted}",
        command=f"sbatch {script_path(run)}",
        seconds_total=job.seconds,
    )
    with suppress(OSError):  # if it can't be written, only this comparison's table shows it
        write_record(record, run.folder)
    return record


def _counts(jobs: Iterable[SlurmJob], *, num_waiting: int) -> str:
    """Return a line with the number of jobs in each state, and Slurm's reason why the first waits."""
    jobs = list(jobs)
    numbers = Counter(job.state for job in jobs)
    reasons = [job.reason for job in jobs if job.state == "PENDING" and job.reason != "None"]
    words = [f"{number} {state.lower()}" for state, number in sorted(numbers.items())]
    words += [f"{num_waiting} not submitted yet"] * bool(num_waiting)
    return "slurm: " + ", ".join(words) + (f" ({reasons[0]})" if reasons else "")


def _ids(jobs: Iterable[SlurmJob]) -> str:
    return "Slurm job " + ", ".join(str(job.job_id) for job in jobs)
