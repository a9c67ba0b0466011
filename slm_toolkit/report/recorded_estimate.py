"""The Estimate of a recorded run: closed forms for its real flags and its probed engine."""

import dataclasses
from functools import cache
from typing import Any

import msgspec

from slm_toolkit.base.typed_files import LARGEST
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.setup.other_trainers import trainer_named
from slm_toolkit.predict.setup.setup import Setup, config_as_launched
from slm_toolkit.record.numerics import numerics_from
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy

_NO_MATTER_TO_ESTIMATES = ("seed", "learning_rate", "warmup_steps", "max_steps", "max_tokens")


def estimate_of(record: RunRecord) -> Estimate | None:
    """Return the estimate for a run.

    None if the run ended before its engine was probed, or if no closed form covers its strategy. None for
    offload without a GPU, too: there the host's bytes can't be separated from the others. None for another
    trainer's run, because the closed forms are of ours. A user's own script is estimated as Hugging Face's
    Trainer with the settings that were observed, or not at all if its model or optimizer is unknown.
    """
    if record.engine is None or record.world_size is None:
        return None
    if record.is_of_script and not _is_known(record):
        return None
    return _estimate_of(msgspec.json.encode(_facts(record)), record.gpu)


def _facts(record: RunRecord) -> dict[str, Any]:
    """Return everything that an Estimate depends on, except the GPU.

    Repeats with other seeds or numbers of steps have the same facts, and share one estimate.
    """
    asked = record.asked
    config = {name: value for name, value in asked["config"].items() if name not in _NO_MATTER_TO_ESTIMATES}
    files = {name: asked.get(name) for name in ("accelerate_config", "deepspeed_config")}
    names = ("strategy", "model", "world_size", "tokens_per_step")
    names += ("engine", "zero_stage", "reshard_after_forward")
    if record.is_of_script:
        names += ("first_batch", "numerics")
        files["script"] = asked["script"][:1]
    return {"asked": {"config": config, **files}, **{name: getattr(record, name) for name in names}}


@cache
def _estimate_of(facts: bytes, gpu_name: str | None) -> Estimate | None:
    """Return the estimate of runs with these facts; None if no closed form covers them."""
    irrelevant = {"run_name": "", "identity": "", "status": "ok", "versions": {}, "started_at": "", "cpu": ""}
    record = RunRecord(**irrelevant, gpu=None, **msgspec.json.decode(facts))
    num_ranks, gpu = record.world_size, find_gpu(gpu_name)
    try:
        strategy = _strategy_that_ran(record)
        config = _config_of_script(record) if record.is_of_script else _config_that_ran(record)
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
                like=trainer_named("trainer") if record.is_of_script else None,
            ).launched
        )
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None
    offloads_without_gpu = gpu_name is None and result.setup.strategy.offloads
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


def _is_known(record: RunRecord) -> bool:
    """Return whether closed forms know a script's model and optimizer, and its first step was observed."""
    seen = record.numerics or {}
    optimizer = seen.get("optimizer_class") or ""
    trains_with_adam = "Adam" in optimizer and "Muon" not in optimizer
    return record.has_known_shapes and record.first_batch is not None and trains_with_adam


def _config_of_script(record: RunRecord) -> RunConfig:
    """Return our flags for what a script's first step showed."""
    seen, batch = numerics_from(record.numerics), record.first_batch
    updates_bf16 = (seen.master_weight_dtype or "").startswith("bfloat16")
    plain = "fp32" if seen.compute_dtype == "float32" else "pure_bf16" if updates_bf16 else "stock"
    attention = (seen.attention or "sdpa").split()[0]
    return RunConfig(
        numerics=plain,
        seq_len=batch["seq_len"],
        per_device_train_batch_size=batch["num_sequences"],
        gradient_accumulation_steps=seen.accumulation or 1,
        attn_implementation="flash_attention_2" if attention == "flash_attn" else attention,
        gradient_checkpointing="full" if seen.recomputed else "none",
        kernels="compile" if seen.compiled else "plain",
        optim="adamw_torch_fused" if seen.optimizer_kernel == "fused" else "adamw_torch",
        max_grad_norm=seen.clipping or 0.0,
    )


def _config_that_ran(record: RunRecord) -> RunConfig:
    """Return the run's flags with the values of the user's files and the counted accumulation steps."""
    config = config_as_launched(record.config, _strategy_that_ran(record))
    if record.tokens_per_step is None:
        return config
    micro_step_tokens = record.world_size * config.per_device_train_batch_size * config.seq_len
    num_micro_steps = max(1, record.tokens_per_step // micro_step_tokens)
    return dataclasses.replace(config, gradient_accumulation_steps=num_micro_steps)
