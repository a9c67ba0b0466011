"""Run planned runs as Slurm jobs: submitted ahead, found again, waited for, each ending as a record."""

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
from slm_toolkit.base.user_files import check_name, read_text
from slm_toolkit.compare import local
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.local import Progress, Slot
from slm_toolkit.compare.outcome import LOG_FILE, planned_record, reason_in_log
from slm_toolkit.config.flags import flags_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.launch.processes import safe_environment
from slm_toolkit.record.files import read_record, write_record
from slm_toolkit.record.run_record import PROGRESS_FILE, RECORD_FILE, RunRecord, identity_of
from slm_toolkit.strategy.strategy import Strategy, on_nodes, write_resolved

# The Slurm job of a planned run as a script on disk, from a template that a person can read.

SLURM_TEMPLATE = Path(__file__).parent / "slurm.sh"
SCRIPT_FILE = "slurm.sh"
"what a run's script is called, in the run's folder; Slurm's queue shows its path, by which jobs are found"


@dataclass(frozen=True)
class SlurmNodes:
    """What every job of a comparison asks Slurm for."""

    num_nodes: int
    gpus_per_node: int
    "0: CPU processes"
    options: tuple[str, ...]
    "sbatch's, in the user's words"
    template: str
    "the script, with {{names}} to be filled in"

    @property
    def machine(self) -> Machine:
        """The nodes together. Nobody has asked their GPU's name: the options that choose it stand for it."""
        chosen = [word for word, name in _named(self.options) if name in _CHOOSES_HARDWARE]
        return Machine(self.num_nodes * self.gpus_per_node, shlex.join(chosen) or None)


def slurm_nodes(*, num_nodes: int, gpus_per_node: int, options: str, template: Path) -> SlurmNodes:
    """Raises ValueError with all that is wrong with the options or the template."""
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:  # a quote that is not closed
        raise ValueError(f"--slurm_options {options!r}: {error}\nhint: as sbatch takes them") from None
    text = read_text(template, hint=f"{SLURM_TEMPLATE} is ours")
    problems = [
        f"--slurm_options says {word}, which is for `slm compare` to say: {_OURS[ours]}"
        for word, name in _named(words)
        if word.startswith("-") and (ours := _ours(word, name)) is not None
    ]
    if not gpus_per_node and (asked := {name for _, name in _named(words)} & _ASKS_FOR_GPUS):
        problems.append(f"--slurm_options says {min(asked)}: add --gpus_per_node, for as many ranks")
    if not options.isprintable():
        problems.append(
            "--slurm_options has a character that can't be shown: a line of the script ends there"
        )
    if words and not words[0].startswith("-"):
        problems.append(f"--slurm_options begins with {words[0]!r}, which is no option of sbatch")
    found = re.findall(r"\{\{(.*?)\}\}", text)
    problems += [f"{template}: unknown {{{{{name}}}}}" for name in dict.fromkeys(found) if name not in _NAMES]
    problems += [f"{template} has no {{{{{name}}}}}" for name in _NEEDED if name not in found]
    if problems:
        raise ValueError("\n".join(problems) + f"\nhint: {SLURM_TEMPLATE} has and explains them all")
    return SlurmNodes(num_nodes, gpus_per_node, words, text)


def strategy_on_nodes(strategy: Strategy, nodes: SlurmNodes) -> Strategy:
    """The strategy for so many nodes; one process is on one."""
    num_nodes = 1 if strategy.is_single else nodes.num_nodes
    return strategy if strategy.num_machines == num_nodes else on_nodes(strategy, num_nodes)


def script_path(run: PlannedRun) -> Path:
    return run.folder / SCRIPT_FILE


def write_script(run: PlannedRun, nodes: SlurmNodes, *, timeout_seconds: float) -> Path:
    """Write the run's YAML and its job's script; returns the script."""
    check_name(str(run.folder), "a run's folder")  # in a line of #SBATCH, which a newline would end
    num_nodes = run.strategy.num_machines
    processes_per_node = run.num_processes // num_nodes
    filled = {
        "run_name": shlex.quote(run.run_name),
        "log": shlex.quote(str(run.folder / LOG_FILE).replace("%", "%%")),  # Slurm's pattern
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
    assert tuple(filled) == _NAMES
    script = script_path(run)
    write_new(script, re.sub(r"\{\{(.*?)\}\}", lambda match: filled[match[1]], nodes.template))
    return script


_NAMES = (
    *("run_name", "log", "num_nodes", "processes_per_node", "num_processes", "options", "python"),
    *("config_file", "train_flags"),
)
_NEEDED = ("log", "num_nodes", "num_processes", "options", "config_file", "train_flags")
"without these a job would not do what was asked, or nobody would see what it did"
_OURS = {
    **dict.fromkeys(("nodes", "N"), "--num_nodes"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "one task per node, --num_processes for ranks"),
    **dict.fromkeys(("output", "o", "error", "e", "job-name", "J"), "each run has its own"),
    "cpus-per-gpu": "--cpus-per-task, all ranks of a node being one task",
    **dict.fromkeys(("array", "a", "wrap", "wait", "W", "test-only"), "a job per run"),
    **dict.fromkeys(("clusters", "M"), "a login node of that cluster, where its jobs are seen"),
}
"sbatch's options that would contradict ours, and who says them"
_ASKS_FOR_GPUS = {"gres", "gpus", "G", "gpus-per-node", "gpus-per-task"}
_CHOOSES_HARDWARE = (
    *("partition", "p", "constraint", "C", "nodelist", "w", "reservation"),
    *_ASKS_FOR_GPUS,
)
"runs with other such options are other runs; a longer --time changes nothing that was measured"
_CORES_PER_GPU = 4
"for a rank, its data loader and NCCL's threads, where --slurm_options has no --cpus-per-task"


def _options(nodes: SlurmNodes, processes_per_node: int, timeout_seconds: float) -> str:
    """What `slm compare` asks for where the user's options don't, then these."""
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


def _ours(word: str, name: str) -> str | None:
    """The option of ours that a user's is; sbatch takes the first letters of a long one."""
    if name in _OURS:
        return name
    return next((ours for ours in _OURS if word.startswith("--") and ours.startswith(name)), None)


def _named(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each word with the name of the option that it is, or whose value it is."""
    found, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
        elif word.startswith("-"):
            name = word[1:2]
        found.append((word, name))
    return found


UNKNOWN = "UNKNOWN"
"the state, in our word, of a job that ended while nobody looked, on a cluster without accounting"


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm last showed it."""

    job_id: int
    state: str
    "in Slurm's words: PENDING, RUNNING, COMPLETED, TIMEOUT, ..."
    reason: str
    "why it waits, or ended"
    seconds: float
    "that it has run"

    @property
    def is_live(self) -> bool:
        return self.state in _LIVE


def queue() -> dict[str, SlurmJob]:
    """This user's jobs by script, the newest of each, with those that ended some minutes ago."""
    found: dict[str, SlurmJob] = {}
    shown = command("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%M|%o")
    for line in shown.splitlines():
        number, state, reason, elapsed, script = line.strip().split("|", 4)
        if not number.isdigit():  # of a job array, which is none of ours
            continue
        job = SlurmJob(int(number), state, reason, _seconds(elapsed))
        if script not in found or found[script].job_id < job.job_id:
            found[script] = job
    return found


def accounted(job: SlurmJob) -> SlurmJob:
    """The end of a job that has left the queue, as accounting has it, where there is any."""
    words = ("--jobs", str(job.job_id), "--allocations", "--noheader", "--parsable2")
    try:
        shown = command("sacct", *words, "--format=State,Elapsed").strip()
    except ValueError:
        shown = ""
    state, _, elapsed = shown.partition("|")
    state = state.partition(" ")[0]  # "CANCELLED by 1000"
    ended = state != "" and state not in _LIVE
    return (
        SlurmJob(job.job_id, state, "", _seconds(elapsed))
        if ended
        else dataclasses.replace(job, state=UNKNOWN)
    )


def command(*words: str) -> str:
    """What one of Slurm's commands prints. Raises ValueError with what it says where it fails."""
    try:
        done = subprocess.run(  # a job gets the environment of its sbatch
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=safe_environment()
        )
    except FileNotFoundError:
        raise ValueError(
            f"no {words[0]} here\nhint: --launcher slurm works where jobs are submitted, on a login node"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"{words[0]}: {said}\nhint: --slurm_only_write shows the scripts")
    return done.stdout


# https://slurm.schedmd.com/squeue.html, JOB STATE CODES; all others are ends
_LIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING"),
    *("RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)


def _seconds(elapsed: str) -> float:
    """Of Slurm's days-hours:minutes:seconds, of which the first parts may be left out."""
    days, _, clock = elapsed.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + (float(part) if part.isdigit() else 0.0)
    return seconds + 86400 * float(days or 0)


class SlurmJobs:
    """The jobs of one comparison. Nothing about them is kept on disk: the queue shows each one's script."""

    def __init__(self, nodes: SlurmNodes, console: Console, *, timeout_seconds: float) -> None:
        self.nodes, self.console, self.timeout_seconds = nodes, console, timeout_seconds
        self.waiting: list[PlannedRun] = []
        "that Slurm does not have yet"
        self.jobs: dict[str, SlurmJob] = {}
        "ours, by script"
        self.said, self.refusal = "", ""
        self.pause_seconds, self.next_look = _FIRST_PAUSE_SECONDS, 0.0
        self.has_accepted = False
        "whether Slurm ever took or showed a job of ours: what it refuses later it may take later still"
        self.num_processes: dict[str, int] = {}
        "by script"
        self.gpu_seconds: dict[int, float] = {}
        "that each job has used; a CPU process counts as one"
        self.unseen: set[str] = set()
        "scripts whose live job nobody knew at the last look"
        self.ended_at: dict[str, float] = {}
        "when a job was first seen to have ended, by script"

    def begin(self, runs: list[PlannedRun], *, force: bool) -> None:
        """Find the jobs of an earlier comparison that still run or wait, and submit what is not done.

        Raises ValueError where Slurm does not answer, or takes none of them and never took any.
        """
        mine = {str(script_path(run)) for run in runs}
        found = {
            script: job
            for script, job in queue().items()
            if script in mine and job.is_live and job.state != "COMPLETING"  # what it was is decided already
        }
        self.has_accepted |= bool(found)
        for run in runs:
            self.num_processes[str(script_path(run))] = run.num_processes
            job = found.get(str(script_path(run)))
            if force:
                self._forget(run, job)
            elif job is not None:
                self.jobs[str(script_path(run))] = job
            if (force or job is None) and self.kept_record(run) is None:
                self.waiting.append(run)
        if found and not force:
            self._say(f"found {_ids(found.values())} of an earlier comparison")
        self._submit_waiting()

    def kept_record(self, run: PlannedRun) -> RunRecord | None:
        """As `local.kept_record`; the record says the nodes' GPU, unknown when the run was planned."""
        path = run.folder / RECORD_FILE
        if str(script_path(run)) in self.jobs or not path.is_file():
            return None
        try:
            gpu = read_record(path).gpu
        except ValueError:  # of another version, or damaged: run again
            return None
        return local.kept_record(dataclasses.replace(run, identity=identity_of(run.asked, run.versions, gpu)))

    def forget(self, run: PlannedRun) -> None:
        """Cancel an earlier comparison's job and remove its folder, unless this comparison began it anew."""
        if str(script_path(run)) not in self.jobs and run not in self.waiting:
            self._forget(run, queue().get(str(script_path(run))))

    def execute(
        self,
        run: PlannedRun,
        slot: Slot,
        *,
        timeout_seconds: float,
        retries: int,
        stop: threading.Event,
        on_progress: Progress,
    ) -> RunRecord:
        """Wait for a run's job, submitted here if not yet, again up to `retries` times; returns its record.

        Slurm knows where (`slot` is all of this machine) and when to end it: `timeout_seconds` is in the
        job's script. With `stop` set the job is left to `cancel`: raises CancelledError.
        """
        record = self._execute_once(run, stop, on_progress)
        while record.status in ("failed", "timeout") and retries > 0:
            retries -= 1
            record = self._execute_once(run, stop, on_progress)
        return record

    def cancel(self) -> None:
        """Ask scancel to end what is left of this comparison's jobs."""
        mine = {*self.jobs, *(str(script_path(run)) for run in self.waiting)}  # one may be on its way
        live = [job for script, job in queue().items() if script in mine and job.is_live]
        if live:
            command("scancel", *(str(job.job_id) for job in live))
            self._say(f"cancelled {_ids(live)}")

    def _execute_once(self, run: PlannedRun, stop: threading.Event, on_progress: Progress) -> RunRecord:
        script = str(script_path(run))
        if script not in self.jobs and run not in self.waiting:  # a trial of a search, or another try
            self._begin_patiently(run, stop)
        while run in self.waiting or self.jobs[script].is_live:
            on_progress(local.progress_of(run.folder))
            _pause(stop, 0.2)
            if time.monotonic() > self.next_look:
                self._look()
        self._wait_for_record(run, stop)
        self.ended_at.pop(script, None)
        return _record_of(run, self.jobs.pop(script))

    def _begin_patiently(self, run: PlannedRun, stop: threading.Event) -> None:
        """Again while a Slurm that has taken jobs does not answer."""
        while True:
            try:
                return self.begin([run], force=False)
            except ValueError:
                if not self.has_accepted:
                    raise
                self._say_once(_SILENT)
                _pause(stop, _FIRST_PAUSE_SECONDS)

    def _wait_for_record(self, run: PlannedRun, stop: threading.Event) -> None:
        """Until this host sees what another one wrote in a shared folder, or must have seen it."""
        script = str(script_path(run))
        if self.jobs[script].state not in _ENDED_BY_ITSELF:
            return
        while not (run.folder / RECORD_FILE).is_file():
            if time.monotonic() > self.ended_at[script] + _SHARED_FOLDER_SECONDS:
                return
            self._say_once(
                f"slurm: {_ids([self.jobs[script]])} ended; its record may take "
                f"{_SHARED_FOLDER_SECONDS:.0f} s to show here"
            )
            _pause(stop, 0.5)

    def _look(self) -> None:
        """See what became of all jobs, say so, and submit what Slurm had refused before."""
        try:
            shown = queue()
        except ValueError:  # slurmctld restarts and is overloaded at times; its jobs go on
            shown = None
        if shown is not None:
            for script, job in self.jobs.items():
                if job.is_live:
                    self.jobs[script] = self._now(script, job, shown.get(script))
            self._submit_waiting()
        says = _counts(self.jobs.values(), num_waiting=len(self.waiting)) if shown is not None else _SILENT
        slower = min(self.pause_seconds * 1.5, _LONGEST_PAUSE_SECONDS)
        self.pause_seconds = slower if says == self.said else _FIRST_PAUSE_SECONDS
        self.next_look = time.monotonic() + self.pause_seconds
        self._say_once(says)

    def _now(self, script: str, job: SlurmJob, shown: SlurmJob | None) -> SlurmJob:
        """A live job as Slurm knows it now; lost only where nobody knows it twice in a row."""
        if shown is None or shown.job_id < job.job_id:  # an older one's: ours is not listed yet
            shown = accounted(job)
        if shown.state == UNKNOWN and script not in self.unseen:
            self.unseen.add(script)
            return job
        self.unseen.discard(script)
        self.gpu_seconds[shown.job_id] = shown.seconds * self.num_processes[script]
        if not shown.is_live:
            self.ended_at[script] = time.monotonic()
        return shown

    def _submit_waiting(self) -> None:
        """As many as Slurm takes. Raises ValueError where it refuses one and never took any."""
        submitted = []
        while self.waiting:
            run = self.waiting[0]
            script = write_script(run, self.nodes, timeout_seconds=self.timeout_seconds)
            for name in (RECORD_FILE, LOG_FILE, PROGRESS_FILE):
                (run.folder / name).unlink(missing_ok=True)
            try:
                answer = command("sbatch", "--parsable", str(script))
            except ValueError as error:  # most often a limit on jobs per user: some must end first
                if not self.has_accepted:
                    raise
                if str(error) != self.refusal:
                    self.refusal = str(error)
                    self._say(f"{len(self.waiting)} runs wait: {self.refusal}")
                break
            job = SlurmJob(int(answer.partition(";")[0]), "PENDING", "None", 0.0)
            self.jobs[str(script)] = job
            self.has_accepted = True
            submitted.append(job)
            self.waiting.pop(0)
        if submitted:
            self._say(f"submitted {_ids(submitted)}")

    def _say_once(self, line: str) -> None:
        """Not again while nothing else was said so."""
        if line != self.said:
            self.said = line
            self._say(line)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _forget(self, run: PlannedRun, job: SlurmJob | None) -> None:
        if job is not None and job.is_live:
            command("scancel", str(job.job_id))
        local.forget(run)


_ENDED_BY_ITSELF = ("COMPLETED", "FAILED", UNKNOWN)
"then the run's own record says best how"
_MEANING = {
    "COMPLETED": "it left no record; is its folder on a file system that all nodes share?",
    "FAILED": "its script failed",
    "TIMEOUT": "its time limit ended it",
    "DEADLINE": "its deadline ended it",
    "OUT_OF_MEMORY": 'it wanted more host memory than it had; --slurm_options="--mem=..." asks for more',
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "PREEMPTED": "another job took its place",
    "CANCELLED": "somebody cancelled it",
    UNKNOWN: "Slurm no longer knows how it ended",
}
_SILENT = "slurm: no answer from squeue, asking on"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0
"between two looks at the queue, which all users of the cluster share"
_SHARED_FOLDER_SECONDS = 60.0  # nfs(5): acdirmax, after which a folder's new files must be seen


def _pause(stop: threading.Event, seconds: float) -> None:
    """Raises CancelledError where `stop` is set meanwhile."""
    if stop.wait(seconds):
        raise CancelledError


def _record_of(run: PlannedRun, job: SlurmJob) -> RunRecord:
    """What the run wrote about itself, or what Slurm says about its end."""
    path, log = run.folder / RECORD_FILE, run.folder / LOG_FILE
    last = local.progress_of(run.folder)
    with suppress(OSError):
        (run.folder / PROGRESS_FILE).unlink(missing_ok=True)
    record = read_record(path) if path.is_file() else None
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
    with suppress(OSError):  # then this comparison's table alone has it
        write_record(record, run.folder)
    return record


def _counts(jobs: Iterable[SlurmJob], *, num_waiting: int) -> str:
    """One line on all jobs, with why the first one waits."""
    jobs = list(jobs)
    numbers = Counter(job.state for job in jobs)
    reasons = [job.reason for job in jobs if job.state == "PENDING" and job.reason != "None"]
    words = [f"{number} {state.lower()}" for state, number in sorted(numbers.items())]
    words += [f"{num_waiting} not submitted yet"] * bool(num_waiting)
    return "slurm: " + ", ".join(words) + (f" ({reasons[0]})" if reasons else "")


def _ids(jobs: Iterable[SlurmJob]) -> str:
    numbers = [str(job.job_id) for job in jobs]
    return f"Slurm job {numbers[0]}" if len(numbers) == 1 else f"Slurm jobs {', '.join(numbers)}"
