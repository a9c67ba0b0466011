"""Steady steps: which first steps are warm-up, and the rates of the steps after them."""

from collections.abc import Sequence
from statistics import median

SLOW = 1.1
"a step that takes longer than SLOW times the steady time may still be warming up"
STEPS_PER_BLOCK = 10
"as in the paper: at least three runs of ten steps"


def num_warmup_steps(
    seconds: Sequence[float],
    *,
    num_probed_steps: int,
    num_graphs_compiled: Sequence[int],
) -> int:
    """Return the number of first steps that don't count as timed, because they are slow or compile.

    The steady time is the median of the second half. Warm-up ends before the first two consecutive steps
    within SLOW times the steady time. It includes all probed steps and all compilations of the first half,
    and ends in the middle at the latest.
    """
    half = len(seconds) // 2
    if half == 0:
        return len(seconds)
    limit = SLOW * median(seconds[half:])
    compiled = [step for step, graphs in enumerate(num_graphs_compiled[:half]) if graphs]
    start = max(num_probed_steps, compiled[-1] + 1 if compiled else 1)
    while start < half and max(seconds[start : start + 2]) > limit:
        start += 1
    return start


def block_rates(seconds: Sequence[float], tokens_per_step: float) -> list[float]:
    """Return tokens per second of blocks of ten steps; a remainder makes blocks a little longer."""
    num_blocks = max(1, len(seconds) // STEPS_PER_BLOCK)
    bounds = [len(seconds) * index // num_blocks for index in range(num_blocks + 1)]
    return [
        (end - begin) * tokens_per_step / sum(seconds[begin:end])
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
