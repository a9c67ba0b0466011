"""The learning rate of each step, by --lr_scheduler_type."""

import math

from slm_toolkit.config.run_config import OWN_SCHEDULE, RunConfig


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """The rate of a step, which counts from 0.

    A function of the step alone, so that a run that resumes needs no state, and every engine gets the same
    rate. All types but cosine_to_tenth equal transformers' get_scheduler (transformers/optimization.py 5.23).
    """
    return config.learning_rate * share_of_peak(config, step, num_steps)


def share_of_peak(config: RunConfig, step: int, num_steps: int) -> float:
    """The rate of a step, which counts from 0, by the peak rate."""
    kind, warmup_steps = config.lr_scheduler_type, config.warmup_steps
    if kind == "constant":
        return 1.0
    if step < warmup_steps:
        # transformers' warm-up begins at 0, ours one step later
        return (step + 1 if kind == OWN_SCHEDULE else step) / warmup_steps
    share_done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if kind == OWN_SCHEDULE:
        return 0.1 + 0.9 * _cosine(share_done)
    if kind == "cosine":
        return _cosine(share_done)
    if kind == "linear":
        return 1 - share_done
    if kind == "inverse_sqrt":
        return ((step - warmup_steps) / (warmup_steps or 10_000) + 1) ** -0.5
    if kind == "warmup_stable_decay":
        decay_steps = max(1, num_steps // 10)
        return _cosine(max(0, step - (num_steps - decay_steps)) / decay_steps)
    assert kind == "constant_with_warmup", kind
    return 1.0


def _cosine(share_done: float) -> float:
    """From 1 to 0 in half a wave."""
    return 0.5 * (1 + math.cos(math.pi * share_done))
