"""Rates derived from a record's raw steps."""

from dataclasses import dataclass
from statistics import median

from slm_toolkit.record import RunRecord

STEPS_PER_REPEAT = 10
"as in the paper: at least three runs of ten steps"


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over all ranks: the median of the repeats, and how far they lie apart."""

    tokens_per_second: float
    lowest: float
    highest: float
    num_repeats: int


def throughput(record: RunRecord) -> Throughput | None:
    """Rate of the timed steps, each as long as its slowest rank took; None where no step was timed.

    The timed steps are cut into repeats of ten (a remainder makes them a little longer).
    """
    slowest = [max(seconds) for seconds in zip(*record.step_seconds, strict=True)]
    timed = slowest[record.timing_warmup_steps :]
    if not timed or record.tokens_per_step is None:
        return None
    num_repeats = max(1, len(timed) // STEPS_PER_REPEAT)
    bounds = [len(timed) * index // num_repeats for index in range(num_repeats + 1)]
    rates = [
        (end - start) * record.tokens_per_step / sum(timed[start:end])
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return Throughput(median(rates), min(rates), max(rates), num_repeats)
