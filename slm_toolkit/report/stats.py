"""Compute rates from records' raw steps: the median after warm-up, and an interval around it."""

from dataclasses import dataclass
from math import comb, exp, log, sqrt
from statistics import fmean, median, stdev

from slm_toolkit.record.measurement_warnings import OTHER_CORES, padding_share, was_in_use
from slm_toolkit.record.run_record import RunRecord, round_of
from slm_toolkit.record.steady_rate import STEPS_PER_BLOCK, block_rates

LAUNCH_NOISE = 0.05
"""Assumed relative difference of another launch, in both directions, while a run has fewer than three:
measured: at most 5.1 % on two otherwise idle CPU cores (2026-11-20, slm-10m)."""
# Student's t, two-sided 95 %, for 3, 4, ... launches (2, 3, ... degrees of freedom); more use the last value.
_STUDENT_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


MIN_ROUNDS = 3
"rounds of `slm compare --repeats` from which two rows are compared round by round"
_STUDENT_T_99 = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250)
"Student's t, two-sided 99 %, for 3, 4, ... paired rounds: among many rows, a wrong winner should be rare"


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over all ranks, and the interval in which another measurement is expected."""

    tokens_per_second: float
    tokens_per_second_lowest: float | None
    "None, like the highest: fewer than STEPS_PER_BLOCK steps were timed, too few to tell how much they vary"
    tokens_per_second_highest: float | None
    num_timed_steps: int
    num_launches: int
    by_round: dict[int, float]
    "each launch's rate by `round_of`; empty if two launches have the same round"
    num_warmup_steps: int
    "steps left out at the start; the largest number of all launches"


def throughput(repeats: list[RunRecord]) -> Throughput | None:
    """Return the rate of one run's launches, without padding; None if no step was timed.

    A step takes as long as its slowest rank. The timed steps of a launch are split into blocks of ten (a
    remainder makes blocks a little longer); a launch's rate is the median of its blocks' rates, and the rate
    of several launches is their median. With three or more launches, the interval is Student's prediction
    interval for another launch. Fewer launches don't show how much launches differ. Then it is the interval
    of the blocks' median (below three blocks: of the steps' median), but at least LAUNCH_NOISE in both
    directions. Disturbed launches widen it: see `disturbance`.
    Fewer than ten timed steps have no interval.
    """
    timed = [
        (record, seconds)
        for record in repeats
        if record.tokens_per_step and (seconds := timed_seconds(record))
    ]
    if not timed:
        return None
    blocks = [block_rates(seconds, _tokens_per_step(record)) for record, seconds in timed]
    medians = [*map(median, blocks)]
    by_round = {round_of(record.run_name): rate for (record, _), rate in zip(timed, medians, strict=True)}
    num_timed_steps = sum(len(seconds) for _, seconds in timed)
    is_enough = num_timed_steps >= STEPS_PER_BLOCK
    lowest, highest = _interval(timed, blocks, medians) if is_enough else (None, None)
    return Throughput(
        tokens_per_second=median(medians),
        tokens_per_second_lowest=lowest,
        tokens_per_second_highest=highest,
        num_timed_steps=num_timed_steps,
        num_launches=len(timed),
        by_round=by_round if len(by_round) == len(timed) else {},
        num_warmup_steps=max(record.num_warmup_steps for record, _ in timed),
    )


def _interval(
    timed: list[tuple[RunRecord, list[float]]], blocks: list[list[float]], medians: list[float]
) -> tuple[float, float]:
    """Return the interval of the launches' rates, whose blocks and medians these are; see `throughput`."""
    rate, count = median(medians), len(medians)
    if count >= 3:  # 95 % of further launches: median +- t s sqrt(1 + 1/n)
        half = _STUDENT_T[min(count - 3, len(_STUDENT_T) - 1)] * stdev(medians) * sqrt(1 + 1 / count)
        lowest, highest = max(0.0, rate - half), rate + half
    else:
        sample = []
        for (record, seconds), rates in zip(timed, blocks, strict=True):
            of_steps = (_tokens_per_step(record) / step_seconds for step_seconds in seconds)
            sample += rates if len(rates) >= 3 else of_steps
        lowest, highest = interval_of_median(sample)
        lowest, highest = min(lowest, rate * (1 - LAUNCH_NOISE)), max(highest, rate * (1 + LAUNCH_NOISE))
    factor = max(disturbance(record) for record, _ in timed)
    return min(lowest, rate / factor), max(highest, rate * factor)


def disturbance(record: RunRecord) -> float:
    """Return the factor by which other programs may have changed the rate; 1: none was observed.

    On CPU, with b of c cores kept busy by others: (c / (c - b)) squared, because all ranks wait for the
    slowest rank. On a GPU that another process uses: 2, because that is hardly a measurement.
    """
    if any(map(was_in_use, record.gpu_watch)):
        return 2.0
    busy, cores = record.other_busy_cores or 0.0, record.num_cores
    if record.gpu or busy <= OTHER_CORES or not cores:
        return 1.0
    return (cores / max(0.1, cores - busy)) ** 2


def paired_lead(rates: dict[int, float], others: dict[int, float]) -> tuple[float, float] | None:
    """Return the 99 % interval of rates / others over the rounds of both; None below three rounds.

    A machine that gets slower for a while slows all launches of a round, so their ratio hardly changes. The
    interval is Student's, of the mean of the logarithms of the ratios.
    """
    logs = [log(rates[number] / others[number]) for number in rates.keys() & others.keys()]
    if len(logs) < MIN_ROUNDS:
        return None
    half = _STUDENT_T_99[min(len(logs) - MIN_ROUNDS, len(_STUDENT_T_99) - 1)] * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - half), exp(fmean(logs) + half)


def timed_seconds(record: RunRecord) -> list[float]:
    """Return the time of each step after the warm-up, on its slowest rank."""
    return record.slowest_rank_seconds[record.num_warmup_steps :]


def _tokens_per_step(record: RunRecord) -> float:
    """Return the tokens of a step without padding."""
    return record.tokens_per_step * (1 - padding_share(record))


def mean_phases(record: RunRecord) -> dict[str, float] | None:
    """Return the mean seconds of a timed step and its phases on the slowest rank; None if none was timed."""
    if not record.phase_seconds or not timed_seconds(record):
        return None
    start = record.num_warmup_steps
    steps, phases = max(
        zip(record.step_seconds, record.phase_seconds, strict=True), key=lambda rank: sum(rank[0][start:])
    )
    return {name: fmean(seconds[start:]) for name, seconds in {"step": steps, **phases}.items()}


def joules_per_token(records: list[RunRecord]) -> float | None:
    """Return the energy of all GPUs per token, over the timed steps of all launches, without padding tokens.

    None below two seconds: the counter updates every 20 to 100 ms and is read every 100 ms, so the error
    could be 10 % or more.
    """
    joules = tokens = seconds = 0.0
    for record in records:
        joules_by_rank = [watch.get("energy_joules") for watch in record.gpu_watch]
        if not joules_by_rank or None in joules_by_rank or record.tokens_per_step is None:
            return None
        start = record.num_warmup_steps
        joules += sum(sum(step_joules[start:]) for step_joules in joules_by_rank)
        tokens += _tokens_per_step(record) * (len(record.losses) - start)
        seconds += sum(timed_seconds(record))
    return joules / tokens if seconds >= 2 and joules else None


def interval_of_median(sample: list[float]) -> tuple[float, float]:
    """Return the narrowest symmetric pair of order statistics that contains the median in 95 % of samples.

    Below six values no pair reaches 95 %; then it is the lowest and the highest value (75 % for three).
    Source: the number of values below the median has a binomial distribution, e.g. Conover, Practical
    Nonparametric Statistics, section 3.2.
    """
    ordered, count = sorted(sample), len(sample)
    skipped, outside = 0, 2 * 0.5**count  # probability of both tails for the outermost pair
    while skipped < (count - 1) // 2:
        outside += 2 * comb(count, skipped + 1) * 0.5**count
        if outside > 0.05:
            break
        skipped += 1
    return ordered[skipped], ordered[count - 1 - skipped]
