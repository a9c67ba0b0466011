"""The learning rate of each step: a function of the step alone, so that a resume needs no state for it."""

import math


def learning_rate(peak: float, warmup_steps: int, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; `step` counts from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    share_done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share_done)))
