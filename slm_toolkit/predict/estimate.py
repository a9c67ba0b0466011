"""Estimate: what one configuration needs, from closed forms alone; its fields are the keys of the JSON."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.calibration import calibration_of
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.deepspeed_estimator import DeepSpeedNeeds
from slm_toolkit.predict.deployment import Site, speed_and_cost
from slm_toolkit.predict.memory.adapters import adapters_of, weights_of
from slm_toolkit.predict.memory.gpu import (
    allocated_band,
    allocator_slack,
    context_bytes,
    reserved_band,
    verdict_of,
    workspace_bytes,
)
from slm_toolkit.predict.memory.host import Placement, host_bytes_per_node, memory_of_rank
from slm_toolkit.predict.memory.peak import MemoryEstimate
from slm_toolkit.strategy.strategy import Strategy

LARGEST_BATCH_TRIED = 2**20


@dataclass(frozen=True)
class Estimate:
    """One row. Bytes are of the rank that holds most; None is unknown."""

    model: str
    strategy: str
    evidence: str
    "estimated: closed forms, nothing ran"
    gpu: str | None
    num_gpus: int
    gpus_per_node: int
    per_device_train_batch_size: int
    "with --largest_batch the largest that fits; 0 where not even 1 does: the bytes are those of 1 then"
    seq_len: int
    attn_implementation: str
    numerics: str
    reduce_dtype: str | None
    gradient_checkpointing: str
    gradient_accumulation_steps: int
    loss_kernel: str
    norm_kernel: str
    mlp_kernel: str
    torch_compile: bool
    optim: str
    peft: str
    lora_r: int | None
    "None without LoRA's matrices"
    lora_dropout: float | None
    adapted_modules: list[str] | None
    "matrices of each layer that have an adapter; None where all is trained"
    num_trainable_params: int
    software: str
    "generation of torch and transformers, as in `predict.speed.software.SOFTWARE`"
    calibration: str | None
    "what was measured on this GPU, by `hardware/calibration.py`; None: constants fitted to published runs"
    peak_allocated_bytes: int
    peak_allocated_low_bytes: int
    peak_allocated_high_bytes: int
    peak_reserved_bytes: int
    peak_reserved_low_bytes: int
    peak_reserved_high_bytes: int
    host_bytes_per_node: int
    parts: dict[str, int]
    "at the peak; all but allocator_slack and cuda_context add up to peak_allocated_bytes"
    peak_instant: str
    fits: bool | None
    verdict: str | None
    "fits, tight or does not fit; see predict/memory/gpu.py"
    headroom_bytes: int | None
    "the GPU's memory less cuda_context and peak_allocated_bytes"
    batch_with_margin: int | None
    "with --largest_batch: the largest whose verdict is fits, not tight"
    deepspeed_bytes: int | None
    """what DeepSpeed's own estimator says; None for stages that it has none for, and with adapters: it knows
    of no frozen parameters"""
    deepspeed_host_bytes: int | None
    deepspeed_stage: int | None
    deepspeed_stands_in: bool
    "FSDP full shard has no estimator of its own: people take ZeRO-3's"
    deepspeed_version: str | None
    traffic_bytes: dict[str, float]
    "that each rank sends in a step: by purpose, and of all together inside a node and between nodes"
    step_seconds: float | None
    "None without a GPU, with offload, and between nodes of an unknown network"
    step_low_seconds: float | None
    step_high_seconds: float | None
    parts_seconds: dict[str, float] | None
    "by `predict.speed.step.PARTS`; they add up to step_seconds"
    misaligned_seconds: float | None
    "of matmul: what widths off the multiple of 8 cost"
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    "of 6 N + 12 L H S per token; with adapters of 4 N + 6 N_adapters + 12 L H S: `flops.py`"
    bottleneck: str | None
    "one of `predict.speed.step.BOTTLENECKS`"
    inter_node_gbps: float | None
    "gigabit per second that a node has, as given, measured, or as AWS rents it"
    inter_node_gbps_needed: float | None
    "with which communication between nodes takes no longer than the compute beside it; None on one node"
    network_evidence: str | None
    "of communication: measured, measured in part, given or data sheet; None where nothing is sent"
    usd_per_gpu_hour: float | None
    price_source: str | None
    usd_per_million_tokens: float | None
    tokens_per_usd: float | None


def estimate(
    spec: ModelSpec,
    strategy: Strategy,
    placement: Placement,
    config: RunConfig,
    *,
    num_gpus: int,
    gpus_per_node: int,
    gpu: Gpu | None,
    deepspeed_needs: Callable[..., DeepSpeedNeeds | None],
    deepspeed_version: str | None,
    software: str = "2026",
    site: Site | None = None,
    memory: MemoryEstimate | None = None,
) -> Estimate:
    """`config` has its defaults, `gpus_per_node` divides `num_gpus`; `deepspeed_needs`: ours or live;
    `memory`: what `memory_of_rank` says, where that is known already from another GPU."""
    num_ranks = placement.ranks_of_a_copy(num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    if memory is None:
        memory = memory_of_rank(spec, strategy, config, placement, num_ranks=num_ranks, software=software)
    calibration = calibration_of(gpu.name if gpu else None, software)
    held = {**memory.parts, "workspace": workspace_bytes(gpu)}
    allocated = allocated_band(held)
    slack = allocator_slack(
        spec,
        strategy,
        config,
        memory,
        allocated=allocated.middle,
        num_ranks=num_ranks,
        optimizer_on_gpu=placement.optimizer_device == "none",
        calibration=calibration,
    )
    reserved = reserved_band(allocated.middle, slack)
    context = context_bytes(num_gpus=num_gpus, calibration=calibration)
    usable = verdict = None
    if gpu is not None:
        usable = gpu.memory_bytes - context
        verdict = verdict_of(held, allocated=allocated.middle, reserved=reserved.middle, usable=usable)
    adapters = adapters_of(spec, config)
    weights = weights_of(spec, adapters)
    stage = deepspeed_stage(strategy) if adapters is None else None
    needs = deepspeed_needs(
        spec.num_params,
        spec.largest_layer_params,
        zero_stage=stage,
        num_gpus_per_node=gpus_per_node,
        num_nodes=num_gpus // gpus_per_node,
        offload_optimizer=placement.optimizer_device != "none",
        offload_params=placement.parameter_device != "none",
        zero_init=placement.zero_init,
    )
    return Estimate(
        model=spec.name,
        strategy=strategy.name,
        evidence="estimated",
        gpu=gpu.name if gpu else None,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        per_device_train_batch_size=config.per_device_train_batch_size,
        seq_len=config.seq_len,
        attn_implementation=config.attn_implementation,
        numerics=config.numerics,
        reduce_dtype=config.reduce_dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        loss_kernel=config.loss_kernel,
        norm_kernel=config.norm_kernel,
        mlp_kernel=config.mlp_kernel,
        torch_compile=config.torch_compile,
        optim=config.optim,
        peft=config.peft,
        lora_r=adapters.rank if adapters and adapters.rank else None,
        lora_dropout=config.lora_dropout if adapters and adapters.rank else None,
        adapted_modules=list(adapters.targets) if adapters else None,
        num_trainable_params=weights.trained,
        software=software,
        calibration=calibration.described,
        peak_allocated_bytes=allocated.middle,
        peak_allocated_low_bytes=allocated.low,
        peak_allocated_high_bytes=allocated.high,
        peak_reserved_bytes=reserved.middle,
        peak_reserved_low_bytes=reserved.low,
        peak_reserved_high_bytes=reserved.high,
        host_bytes_per_node=host_bytes_per_node(
            spec, strategy, config, placement, num_ranks=num_ranks, gpus_per_node=gpus_per_node
        ),
        parts={**held, "allocator_slack": slack, "cuda_context": context},
        peak_instant=memory.peak_instant,
        fits=None if verdict is None else verdict != "does not fit",
        verdict=verdict,
        headroom_bytes=None if usable is None else usable - allocated.middle,
        batch_with_margin=None,
        deepspeed_bytes=needs.gpu_bytes if needs else None,
        deepspeed_host_bytes=needs.host_bytes_per_node if needs else None,
        deepspeed_stage=stage,
        deepspeed_stands_in=stage is not None and strategy.engine != "deepspeed",
        deepspeed_version=deepspeed_version if needs else None,
        **speed_and_cost(
            spec,
            strategy,
            config,
            placement,
            num_gpus=num_gpus,
            gpus_per_node=gpus_per_node,
            gpu=gpu,
            software=software,
            site=site or Site(),
        ),
    )


def largest_batch(estimate_of: Callable[[RunConfig], Estimate], config: RunConfig) -> Estimate:
    """The Estimate of the largest batch that fits; `estimate_of` needs a GPU of known memory.

    More samples never take less memory, so that bisection finds it.
    """

    def of(size: int) -> Estimate:
        return estimate_of(dataclasses.replace(config, per_device_train_batch_size=size))

    def largest(is_small_enough: Callable[[Estimate], bool], most: int) -> int:
        return bisect_left(range(1, most + 1), True, key=lambda size: not is_small_enough(of(size)))

    num_fitting = largest(lambda found: bool(found.fits), LARGEST_BATCH_TRIED)
    with_margin = largest(lambda found: found.verdict == "fits", num_fitting)
    return dataclasses.replace(
        of(max(1, num_fitting)), per_device_train_batch_size=num_fitting, batch_with_margin=with_margin
    )


def deepspeed_stage(strategy: Strategy) -> int | None:
    """The stage whose estimator people use for a strategy: its own, 3 for FSDP full shard, else None."""
    if strategy.engine == "deepspeed":
        return strategy.zero_stage if strategy.zero_stage in (2, 3) else None
    is_full_shard = strategy.engine in ("fsdp1", "fsdp2") and strategy.reshard_after_forward is not False
    return 3 if is_full_shard else None
