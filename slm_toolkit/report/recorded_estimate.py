"""The Estimate of a recorded run: closed forms for its real flags and its probed engine."""

import dataclasses

import msgspec

from slm_toolkit.base.typed_files import LARGEST
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.setup.setup import Setup, config_as_launched
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy

_ESTIMATES: dict[bytes, Estimate | None] = {}
_NO_MATTER = ("seed", "learning_rate", "warmup_steps", "max_steps", "max_tokens")


def estimate_of(record: RunRecord) -> Estimate | None:
    """Return the estimate for a run; None for a user's own script, which is not our trainer.

    None, too, if the run ended before its engine was probed, if no closed form covers its strategy, and for
    offload without a GPU: there the host's bytes can't be separated from the others.
    """
    if record.engine is None or record.world_size is None or record.is_of_script:
        return None
    # repeats with other seeds or numbers of steps share one estimate
    config = {name: value for name, value in record.asked["config"].items() if name not in _NO_MATTER}
    names = (
        "strategy",
        "model",
        "world_size",
        "tokens_per_step",
        "engine",
        "zero_stage",
        "reshard_after_forward",
        "gpu",
    )
    facts = [{**record.asked, "config": config, "files": None}, *(getattr(record, name) for name in names)]
    key = msgspec.json.encode(facts)
    if key not in _ESTIMATES:
        _ESTIMATES[key] = _estimate_of(record)
    return _ESTIMATES[key]


def _estimate_of(record: RunRecord) -> Estimate | None:
    num_ranks, gpu = record.world_size, find_gpu(record.gpu)
    try:
        strategy, config = _strategy_that_ran(record), _config_that_ran(record)
        per_node = num_ranks // strategy.num_machines
        per_node = max(1, min(num_ranks, REHEARSED_RANKS_PER_NODE) if record.is_rehearsal else per_node)
        result = estimate(
            Setup(
                record.spec,
                fit_groups(strategy, num_ranks=num_ranks, ranks_per_node=per_node),
                config,
                num_gpus=num_ranks,
                gpus_per_node=per_node,
                gpu=gpu,
            ).launched
        )
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None
    offloads_without_gpu = record.gpu is None and result.setup.strategy.offloads
    may_be_emulated = gpu is None and config.fp8 != "none" and config.rehearse is None
    is_made_up = result.peak_reserved_high_bytes > LARGEST
    return None if offloads_without_gpu or may_be_emulated or is_made_up else result


def _strategy_that_ran(record: RunRecord) -> Strategy:
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


def _config_that_ran(record: RunRecord) -> RunConfig:
    """Return the run's flags with the values of the user's files and the counted accumulation steps."""
    config = config_as_launched(record.config, _strategy_that_ran(record))
    if record.tokens_per_step is None:
        return config
    micro_step_tokens = record.world_size * config.per_device_train_batch_size * config.seq_len
    num_micro_steps = max(1, record.tokens_per_step // micro_step_tokens)
    return dataclasses.replace(config, gradient_accumulation_steps=num_micro_steps)
