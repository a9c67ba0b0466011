"""Steps and seconds until a training reached a loss: --until_loss, in a run and in its record."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from slm_toolkit.record.run_record import RunRecord

MEAN_OF = 10
"steps whose mean loss must be low enough: the loss of one step depends on its batch"


@dataclass(frozen=True)
class TimeToLoss:
    """What a run needed until the mean of its last MEAN_OF losses was low enough."""

    num_steps: int
    seconds: float
    "in steps, on the slowest rank of each: neither starting, nor evaluations, nor checkpoints"
    num_tokens: int | None


def is_reached(losses: Sequence[float | None], limit: float | None) -> bool:
    """Return whether the mean of the last MEAN_OF losses is at most `limit`; False without a limit."""
    last = losses[-MEAN_OF:]
    return limit is not None and len(last) == MEAN_OF and None not in last and fmean(last) <= limit


def time_to_loss(record: RunRecord, limit: float) -> TimeToLoss | None:
    """Return when the run reached the loss; None if it did not, or if another launch did its first steps."""
    if record.first_step:
        return None
    for num_steps in range(MEAN_OF, len(record.losses) + 1):
        if is_reached(record.losses[num_steps - MEAN_OF : num_steps], limit):
            seconds = sum(record.slowest_rank_seconds[:num_steps])
            tokens = record.tokens_per_step and record.tokens_per_step * num_steps
            return TimeToLoss(num_steps, seconds, tokens)
    return None
