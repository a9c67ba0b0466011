"""The learning rate of each step: a function of the step alone, so that a resume needs no state for it."""

import math

import torch

from slm_toolkit.config import RunConfig


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: RunConfig, step: int, num_steps: int
) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; `step` counts from 0."""
    if step < config.warmup_steps:
        rate = config.learning_rate * (step + 1) / config.warmup_steps
    else:
        share_done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
        rate = config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share_done)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
