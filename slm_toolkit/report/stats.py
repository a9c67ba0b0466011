"""Rates derived from records' raw steps: warm-up found, the median, and an interval around it."""

from dataclasses import dataclass, replace
from math import comb, sqrt
from statistics import fmean, median, stdev

from slm_toolkit.record.measurement_warnings import OTHER_CORES, USED_BYTES, padding_share
from slm_toolkit.record.run_record import RunRecord

STEPS_PER_BLOCK = 10
"as in the paper: at least three runs of ten steps"
LAUNCH_NOISE = 0.05
"""how far another launch of the same run may lie from this one, either way, while fewer than three were seen:
bench/baseline_noise.py found at most 5.1 % on two otherwise idle CPU cores (2026-11-20, slm-10m)"""
# Student's t, two-sided 95 %, for 3, 4, ... launches (2, 3, ... degrees of freedom); more take the last.
_STUDENT_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


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

    def times(self, factor: float) -> "Throughput":
        """Of a share of the tokens."""
        return replace(
            self,
            tokens_per_second=self.tokens_per_second * factor,
            lowest=self.lowest * factor,
            highest=self.highest * factor,
        )


def throughput(repeats: list[RunRecord]) -> Throughput | None:
    """The rate of one run's launches; None where no step was timed.

    A step is as long as its slowest rank took. The timed steps of a launch are cut into blocks of ten (a
    remainder makes them a little longer); its rate is the median of theirs. With three launches or more the
    interval is Student's prediction interval for another launch. Fewer can't show how much launches differ:
    then it is that of the blocks' median (of the steps', below three blocks), and at least LAUNCH_NOISE wide
    either way. A launch that was disturbed widens it, see `disturbance`.
    """
    timed = [(record, timed_seconds(record)) for record in repeats]
    timed = [(record, seconds) for record, seconds in timed if seconds and record.tokens_per_step]
    if not timed:
        return None
    medians = [median(_block_rates(record, seconds)) for record, seconds in timed]
    rate = median(medians)
    if len(medians) >= 3:
        lowest, highest = _prediction_interval(medians)
    else:
        sample = [each for record, seconds in timed for each in _sample(record, seconds)]
        lowest, highest = interval_of_median(sample)
        lowest, highest = min(lowest, rate * (1 - LAUNCH_NOISE)), max(highest, rate * (1 + LAUNCH_NOISE))
    factor = max(disturbance(record) for record, _ in timed)
    return Throughput(
        tokens_per_second=rate,
        lowest=min(lowest, rate / factor),
        highest=max(highest, rate * factor),
        num_timed_steps=sum(len(seconds) for _, seconds in timed),
        num_launches=len(timed),
        num_warmup_steps=max(len(record.slowest_rank_seconds) - len(seconds) for record, seconds in timed),
    )


def disturbance(record: RunRecord) -> float:
    """By what factor others on the machine may have changed the rate; 1: nobody was seen.

    CPU processes of c cores of which others kept b busy: (c / (c - b)) squared, for ranks wait for each
    other, and what one loses all lose. A GPU that somebody else uses: 2, not a measurement at all.
    """
    watches = record.gpu_watch
    if any((watch.get("num_processes_before") or 0) > 0 for watch in watches):
        return 2.0
    if any((watch.get("used_bytes_before") or 0) > USED_BYTES for watch in watches):
        return 2.0
    busy, cores = record.other_busy_cores or 0.0, record.num_cores
    if record.gpu or busy <= OTHER_CORES or not cores:
        return 1.0
    return (cores / max(0.1, cores - busy)) ** 2


def timed_seconds(record: RunRecord) -> list[float]:
    """Of each step after the warm-up, the time of the rank that took longest."""
    return record.slowest_rank_seconds[record.num_warmup_steps :]


def _block_rates(record: RunRecord, seconds: list[float]) -> list[float]:
    num_blocks = max(1, len(seconds) // STEPS_PER_BLOCK)
    bounds = [len(seconds) * index // num_blocks for index in range(num_blocks + 1)]
    return [
        (end - begin) * record.tokens_per_step / sum(seconds[begin:end])
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


def _sample(record: RunRecord, seconds: list[float]) -> list[float]:
    blocks = _block_rates(record, seconds)
    return blocks if len(blocks) >= 3 else [record.tokens_per_step / each for each in seconds]


def _prediction_interval(medians: list[float]) -> tuple[float, float]:
    """Where one more launch lies in 95 % of cases: t s sqrt(1 + 1/n) around the median."""
    count = len(medians)
    half = _STUDENT_T[min(count - 3, len(_STUDENT_T) - 1)] * stdev(medians) * sqrt(1 + 1 / count)
    return max(0.0, median(medians) - half), median(medians) + half


def mean_phases(record: RunRecord) -> dict[str, float] | None:
    """Seconds of a timed step, and of its phases, on the slowest rank; None where nothing was timed."""
    start = record.num_warmup_steps
    steps = [seconds[start:] for seconds in record.step_seconds]
    if not steps or not steps[0] or not record.phase_seconds:
        return None
    slowest = max(range(len(steps)), key=lambda rank: sum(steps[rank]))
    phases = {name: seconds[start:] for name, seconds in record.phase_seconds[slowest].items()}
    return {name: fmean(seconds) for name, seconds in {"step": steps[slowest], **phases}.items()}


def joules_per_token(records: list[RunRecord]) -> float | None:
    """Energy of all ranks' GPUs in the timed steps of all launches, over the tokens of those but padding.

    None below two seconds: the counter moves every 20 to 100 ms, which would be 5 % and more.
    """
    joules = tokens = seconds = 0.0
    for record in records:
        of_ranks = [watch.get("energy_joules") for watch in record.gpu_watch]
        if not of_ranks or None in of_ranks or record.tokens_per_step is None:
            return None
        start = record.num_warmup_steps
        joules += sum(sum(of_rank[start:]) for of_rank in of_ranks)
        num_steps = len(record.losses) - start
        tokens += record.tokens_per_step * num_steps * (1 - padding_share(record))
        seconds += sum(timed_seconds(record))
    return joules / tokens if seconds >= 2 and joules else None


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
