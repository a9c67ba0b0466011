"""The Estimate of a recorded run: what the closed forms say of what really was asked and ran."""

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
    """What the run should have taken of a GPU.

    None for a run that ended before its engine was known, for a strategy that no estimate covers, and for
    offload without a GPU, where nobody can tell the host's bytes from the rest.
    """
    if record.engine is None or record.world_size is None:
        return None
    ran = _what_ran(msgspec.json.encode(_facts(record)))
    return None if ran is None else _estimate_on(ran, record.gpu)


def _facts(record: RunRecord) -> dict[str, Any]:
    """All that an Estimate depends on but the GPU: launches, seeds and lengths of one configuration share
    theirs."""
    asked = record.asked
    config = {name: value for name, value in asked["config"].items() if name not in _NO_MATTER_TO_ESTIMATES}
    files = {name: asked.get(name) for name in ("accelerate_config", "deepspeed_config")}
    names = ("strategy", "model", "world_size", "tokens_per_step")
    names += ("engine", "zero_stage", "reshard_after_forward")
    return {"asked": {"config": config, **files}, **{name: getattr(record, name) for name in names}}


@dataclass(frozen=True, eq=False)
class _Ran:
    """What runs of one configuration have in common on all GPUs."""

    setup: Setup
    "without a GPU"
    memory: MemoryEstimate


@cache
def _what_ran(facts: bytes) -> _Ran | None:
    """None where no closed form covers it."""
    nothing = {"run_name": "", "identity": "", "status": "ok", "versions": {}, "started_at": "", "cpu": ""}
    record = RunRecord(**nothing, gpu=None, **msgspec.json.decode(facts))
    num_ranks = record.world_size
    try:
        strategy = strategy_that_ran(record)
        spec, config = record.spec, config_that_ran(record)
        num_nodes = strategy.num_machines
        per_node = min(num_ranks, REHEARSED_RANKS_PER_NODE) if record.is_rehearsal else num_ranks // num_nodes
        per_node = max(1, per_node)
        strategy = fit_groups(strategy, num_ranks=num_ranks, ranks_per_node=per_node)
        setup = Setup(spec, strategy, config, num_gpus=num_ranks, gpus_per_node=per_node)
        return _Ran(setup, peak(setup))
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None


@cache
def _estimate_on(ran: _Ran, gpu: str | None) -> Estimate | None:
    if ran.setup.strategy.offloads and gpu is None:
        return None
    try:
        found = estimate(dataclasses.replace(ran.setup, gpu=find_gpu(gpu)), memory=ran.memory)
    except ValueError:  # what is sent has no closed form
        return None
    return found if found.peak_reserved_high_bytes <= LARGEST else None  # of a model that nobody trained


def offloads(record: RunRecord) -> bool:
    """Whether part of the training state was to lie in the host's RAM or on its disk."""
    return strategy_that_ran(record).offloads


def strategy_that_ran(record: RunRecord) -> Strategy:
    """Engine, stage and sharding as probed, all else as asked."""
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
    """What was asked, but for what the user's own files decide, and for the accumulation that was counted."""
    config, changes = config_as_launched(record.config, strategy_that_ran(record)), {}
    if record.tokens_per_step is not None:
        of_micro_step = record.world_size * config.per_device_train_batch_size * config.seq_len
        changes["gradient_accumulation_steps"] = max(1, record.tokens_per_step // of_micro_step)
        if changes["gradient_accumulation_steps"] == config.gradient_accumulation_steps:
            return config
    return dataclasses.replace(config, **changes)
