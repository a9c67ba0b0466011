"""The Estimate of a recorded run: closed forms for its real flags and its probed engine."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from slm_toolkit.base.typed_files import LARGEST
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.setup import Setup, config_as_launched
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy

_NO_MATTER_TO_ESTIMATES = ("seed", "learning_rate", "warmup_steps", "max_steps", "timing_warmup_steps")


def estimate_of(record: RunRecord) -> Estimate | None:
    """Return the estimate for a run.

    None if the run ended before its engine was probed, or if no closed form covers its strategy. None for
    offload without a GPU, too: there the host's bytes can't be separated from the others. None for another
    trainer's run, because the closed forms are of ours.
    """
    if record.engine is None or record.world_size is None or record.is_of_other_trainer:
        return None
    configuration = _configuration_of(msgspec.json.encode(_facts(record)))
    return None if configuration is None else _estimate_on(configuration, record.gpu)


def _facts(record: RunRecord) -> dict[str, Any]:
    """Return everything that an Estimate depends on, except the GPU.

    Repeats with other seeds or numbers of steps have the same facts, and share one estimate.
    """
    asked = record.asked
    config = {name: value for name, value in asked["config"].items() if name not in _NO_MATTER_TO_ESTIMATES}
    files = {name: asked.get(name) for name in ("accelerate_config", "deepspeed_config")}
    names = ("strategy", "model", "world_size", "tokens_per_step")
    names += ("engine", "zero_stage", "reshard_after_forward")
    return {"asked": {"config": config, **files}, **{name: getattr(record, name) for name in names}}


@dataclass(frozen=True, eq=False)
class _Configuration:
    """The setup and memory estimate of runs that differ only in their GPU."""

    setup: Setup
    "without a GPU"
    memory: MemoryEstimate


@cache
def _configuration_of(facts: bytes) -> _Configuration | None:
    """Return the configuration with these facts; None if no closed form covers it."""
    irrelevant = {"run_name": "", "identity": "", "status": "ok", "versions": {}, "started_at": "", "cpu": ""}
    record = RunRecord(**irrelevant, gpu=None, **msgspec.json.decode(facts))
    num_ranks = record.world_size
    try:
        strategy = strategy_that_ran(record)
        spec, config = record.spec, config_that_ran(record)
        num_nodes = strategy.num_machines
        per_node = min(num_ranks, REHEARSED_RANKS_PER_NODE) if record.is_rehearsal else num_ranks // num_nodes
        per_node = max(1, per_node)
        strategy = fit_groups(strategy, num_ranks=num_ranks, ranks_per_node=per_node)
        setup = Setup(spec, strategy, config, num_gpus=num_ranks, gpus_per_node=per_node)
        return _Configuration(setup, peak(setup))
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None


@cache
def _estimate_on(configuration: _Configuration, gpu: str | None) -> Estimate | None:
    if configuration.setup.strategy.offloads and gpu is None:
        return None
    try:
        setup = dataclasses.replace(configuration.setup, gpu=find_gpu(gpu))
        result = estimate(setup, memory=configuration.memory)
    except ValueError:  # no closed form for its communication
        return None
    return result if result.peak_reserved_high_bytes <= LARGEST else None  # larger: the record is made up


def offloads(record: RunRecord) -> bool:
    """Return whether the strategy keeps part of the training state in host RAM or on disk."""
    return strategy_that_ran(record).offloads


def strategy_that_ran(record: RunRecord) -> Strategy:
    """Return the strategy with engine, stage and sharding as probed, and everything else as configured."""
    return Strategy(
        name=record.strategy,
        engine=record.engine,
        num_processes=record.world_size,
        zero_stage=record.zero_stage,
        reshard_after_forward=record.reshard_after_forward,
        path=record.strategy,
        accelerate_config=record.asked.get("accelerate_config"),
        deepspeed_config=record.asked.get("deepspeed_config"),
    )


def config_that_ran(record: RunRecord) -> RunConfig:
    """Return the run's flags with the values of the user's files and the counted accumulation steps."""
    config, changes = config_as_launched(record.config, strategy_that_ran(record)), {}
    if record.tokens_per_step is not None:
        micro_step_tokens = record.world_size * config.per_device_train_batch_size * config.seq_len
        changes["gradient_accumulation_steps"] = max(1, record.tokens_per_step // micro_step_tokens)
        if changes["gradient_accumulation_steps"] == config.gradient_accumulation_steps:
            return config
    return dataclasses.replace(config, **changes)
