"""What Slurm's commands say of this user's jobs."""

import dataclasses
import subprocess
from dataclasses import dataclass

from slm_toolkit.python_environment import safe_environment

UNKNOWN = "UNKNOWN"
"the state, in our word, of a job that ended while nobody looked, on a cluster without accounting"


@dataclass(frozen=True)
class Job:
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


def queue() -> dict[str, Job]:
    """This user's jobs by script, the newest of each, with those that ended some minutes ago."""
    found: dict[str, Job] = {}
    shown = command("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%M|%o")
    for line in shown.splitlines():
        number, state, reason, elapsed, script = line.strip().split("|", 4)
        if not number.isdigit():  # of a job array, which is none of ours
            continue
        job = Job(int(number), state, reason, _seconds(elapsed))
        if script not in found or found[script].job_id < job.job_id:
            found[script] = job
    return found


def accounted(job: Job) -> Job:
    """The end of a job that has left the queue, as accounting has it, where there is any."""
    words = ("--jobs", str(job.job_id), "--allocations", "--noheader", "--parsable2")
    try:
        shown = command("sacct", *words, "--format=State,Elapsed").strip()
    except ValueError:
        shown = ""
    state, _, elapsed = shown.partition("|")
    state = state.partition(" ")[0]  # "CANCELLED by 1000"
    ended = state != "" and state not in _LIVE
    return Job(job.job_id, state, "", _seconds(elapsed)) if ended else dataclasses.replace(job, state=UNKNOWN)


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
