"""How many sequences one optimizer step has, and how that is told."""

from slm_toolkit.config import RunConfig
from slm_toolkit.run.engine import micro_steps
from slm_toolkit.run.launched import Launch


def sequences_per_step(config: RunConfig, launch: Launch) -> int:
    """Over all ranks and micro-steps."""
    return config.per_device_train_batch_size * micro_steps(launch, config) * launch.num_processes


def describe_batch(config: RunConfig, per_step: int, launch: Launch) -> str:
    """The effective batch size and learning rate, as a line."""
    said = (
        f"a step is {per_step} sequences of {config.seq_len} tokens: {config.per_device_train_batch_size} x "
        f"{micro_steps(launch, config)} micro-steps x {launch.num_processes} processes"
    )
    if config.scale_lr == "none":
        return said
    base = config.base_batch_size or config.per_device_train_batch_size
    return (
        f"{said}; learning rate {config.learning_rate_of(per_step):.3g}: {config.learning_rate:g} for {base} "
        f"sequences, scaled by {config.scale_lr}"
    )
