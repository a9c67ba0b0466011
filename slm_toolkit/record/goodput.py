"""Goodput: the share of a run's wall time that went into steps whose work was kept, over all its launches."""

from dataclasses import dataclass
from typing import TypedDict

from slm_toolkit.base.typed_files import Count, NonNegative


class SavedAt(TypedDict):
    """A checkpoint of a launch."""

    step: Count
    step_seconds: NonNegative
    "the launch's seconds in steps until then"


class LaunchTimes(TypedDict):
    """The wall time of one launch of a run, as rank 0 noted it: until its end, or shortly before a kill."""

    started_at: str
    "ISO 8601, UTC"
    first_step: Count
    last_step: Count
    "finished steps of the run, those before first_step included"
    seconds: NonNegative
    "from the start of rank 0's process"
    start_seconds: NonNegative
    "until the first step began, or all of `seconds` if none did"
    step_seconds: NonNegative
    "in training steps"
    saving_seconds: NonNegative
    "in which training stood still for a checkpoint"
    saved_at: list[SavedAt]
    "the newest checkpoints, from which a run may still resume"


@dataclass(frozen=True)
class TimeShares:
    """How all launches of a run spent their wall time, in seconds. The parts add up to `total_seconds`."""

    num_launches: int
    total_seconds: float
    kept_seconds: float
    "in steps whose work is part of the run's result"
    lost_seconds: float
    "in steps after the checkpoint from which a later launch resumed; they were done again"
    saving_seconds: float
    starting_seconds: float
    other_seconds: float
    "evaluations, the final model, profiling"
    num_lost_steps: int

    @property
    def goodput(self) -> float:
        """Return the share of useful time, 0..1.

        "The time spent computing useful new steps over the elapsed time of the training job": Gemini Team,
        arXiv:2312.11805, section 3. The elapsed time is the sum of the launches here, since a record does not
        know why nothing ran between two launches; `bench/goodput.py` includes that time.
        """
        return self.kept_seconds / self.total_seconds

    @property
    def checkpoint_overhead(self) -> float:
        """Return the seconds in which training stood still for checkpoints, per second in steps."""
        return self.saving_seconds / (self.kept_seconds + self.lost_seconds)


def time_shares(launches: list[LaunchTimes]) -> TimeShares | None:
    """Return how a run's launches, in their order, spent their time; None if unknown or without any step."""
    total = sum(launch["seconds"] for launch in launches)
    in_steps = sum(launch["step_seconds"] for launch in launches)
    if not in_steps:
        return None
    kept_seconds, num_lost_steps = 0.0, 0
    resumed_at: int | None = None
    "the lowest first step of all later launches: what this launch did after it was done again"
    for launch in reversed(launches):
        kept, kept_until = _kept(launch, resumed_at)
        kept_seconds += kept
        num_lost_steps += launch["last_step"] - kept_until
        first = launch["first_step"]
        resumed_at = first if resumed_at is None else min(resumed_at, first)
    starting = sum(launch["start_seconds"] for launch in launches)
    saving = sum(launch["saving_seconds"] for launch in launches)
    return TimeShares(
        num_launches=len(launches),
        total_seconds=total,
        kept_seconds=kept_seconds,
        lost_seconds=in_steps - kept_seconds,
        saving_seconds=saving,
        starting_seconds=starting,
        other_seconds=total - starting - saving - in_steps,
        num_lost_steps=num_lost_steps,
    )


def _kept(launch: LaunchTimes, resumed_at: int | None) -> tuple[float, int]:
    """Return a launch's seconds in steps before `resumed_at`, and the last step among them."""
    first, last, seconds = launch["first_step"], launch["last_step"], launch["step_seconds"]
    if resumed_at is None or resumed_at >= last:
        return seconds, last
    if resumed_at <= first:
        return 0.0, first
    of_checkpoint = (saved["step_seconds"] for saved in launch["saved_at"] if saved["step"] == resumed_at)
    # a checkpoint that the launch did not note: its steps count as equally long
    return next(of_checkpoint, seconds * (resumed_at - first) / (last - first)), resumed_at
