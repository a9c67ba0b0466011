"""Rates derived from records' raw steps: warm-up found, the median, and an interval around it."""

from dataclasses import dataclass
from math import comb
from statistics import median

from slm_toolkit.record import RunRecord

STEPS_PER_BLOCK = 10
"as in the paper: at least three runs of ten steps"
LAUNCH_NOISE = 0.05
"""how far another launch of the same run may lie from this one, either way, while fewer than three were seen:
python bench/baseline_noise.py found at most 2.3 % on two busy-free CPU cores (2026-11-20, slm-10m)"""
SLOW = 1.1
"a first step above this multiple of the steady time is warm-up"


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over all ranks, with the interval that another measurement is expected in."""

    tokens_per_second: float
    lowest: float
    highest: float
    num_timed_steps: int
    num_launches: int
    num_warmup_steps: int
    "left out at the start, of the launch with most"


def throughput(repeats: list[RunRecord]) -> Throughput | None:
    """The rate of one run's launches; None where no step was timed.

    A step is as long as its slowest rank took. The timed steps of a launch are cut into blocks of ten (a
    remainder makes them a little longer); its rate is the median of theirs. With three launches or more the
    interval is that of their medians; with fewer it is that of the blocks, and at least LAUNCH_NOISE wide
    either way, since one launch can't show how much launches differ.
    """
    of_launches, num_timed, warmups = [], 0, []
    for record in repeats:
        slowest = slowest_rank_seconds(record)
        start = num_warmup_steps(record)
        timed = slowest[start:]
        if not timed or record.tokens_per_step is None:
            continue
        num_timed += len(timed)
        warmups.append(start)
        num_blocks = max(1, len(timed) // STEPS_PER_BLOCK)
        bounds = [len(timed) * index // num_blocks for index in range(num_blocks + 1)]
        of_launches.append(
            [
                (end - begin) * record.tokens_per_step / sum(timed[begin:end])
                for begin, end in zip(bounds, bounds[1:], strict=False)
            ]
        )
    if not of_launches:
        return None
    medians = [median(blocks) for blocks in of_launches]
    rate = median(medians)
    if len(of_launches) >= 3:
        lowest, highest = interval_of_median(medians)
    else:
        lowest, highest = interval_of_median([block for blocks in of_launches for block in blocks])
        lowest, highest = min(lowest, rate * (1 - LAUNCH_NOISE)), max(highest, rate * (1 + LAUNCH_NOISE))
    return Throughput(rate, lowest, highest, num_timed, len(of_launches), max(warmups))


def slowest_rank_seconds(record: RunRecord) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    return [max(seconds) for seconds in zip(*record.step_seconds, strict=True)]


def num_warmup_steps(record: RunRecord) -> int:
    """First steps that don't count: as many as asked, else those that were slow or that compiled.

    The steady time is the median of the second half. Warm-up ends before the first two steps in a row that
    are within SLOW of it, after the last compilation of the first half, at the latest in the middle. The
    first step, which is probed, never counts.
    """
    if record.timing_warmup_steps is not None:
        return record.timing_warmup_steps
    slowest = slowest_rank_seconds(record)
    half = len(slowest) // 2
    if half == 0:
        return len(slowest)
    limit = SLOW * median(slowest[half:])
    compiled = [step for step, graphs in enumerate(record.num_graphs_compiled[:half]) if graphs]
    start = max(1, compiled[-1] + 1 if compiled else 1)
    while start < half and max(slowest[start : start + 2]) > limit:
        start += 1
    return start


def interval_of_median(sample: list[float]) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that holds the median in 95 % of samples.

    Below six values there is none and the pair is the lowest and the highest (three values: 75 %). Source:
    the binomial distribution of how many values lie below the median, e.g. Conover, Practical Nonparametric
    Statistics, section 3.2.
    """
    ordered, count = sorted(sample), len(sample)
    skipped, outside = 0, 2 * 0.5**count  # both tails, with the outermost values as the pair
    while skipped < (count - 1) // 2:
        outside += 2 * comb(count, skipped + 1) * 0.5**count
        if outside > 0.05:
            break
        skipped += 1
    return ordered[skipped], ordered[count - 1 - skipped]


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether two intervals share a value: then their figures are a tie."""
    return first[0] <= second[1] and second[0] <= first[1]
