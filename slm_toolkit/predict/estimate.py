"""Estimate: the memory, speed and cost of one configuration, from closed forms only."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slm_toolkit.hardware.network import NODE_NETWORK_SHARE, Cluster
from slm_toolkit.model.model_spec import model_flops_utilization
from slm_toolkit.predict.cost import tokens_per_usd, usd_per_million_tokens
from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION, deepspeed_needs
from slm_toolkit.predict.memory.machine import (
    allocator_slack,
    band_of,
    context_bytes,
    host_bytes,
    needed_bytes,
    probability_that_fits,
    verdict_of,
    workspace_bytes,
)
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates, with_flags
from slm_toolkit.predict.speed.traffic import Transfer, transfers
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.predict.speed.software import Software
    from slm_toolkit.predict.speed.step import StepTime

LARGEST_BATCH_TRIED = 2**20


@dataclass(frozen=True)
class Change:
    """A change, or several together, with which a configuration fits."""

    change: str
    "in words and flags of `slm`"
    speedup: float | None
    "tokens/s per GPU after over before; None if one of them is unknown"
    host_bytes_per_node: int | None
    "RAM of a node, for a strategy that offloads; else None"


@dataclass(frozen=True)
class Estimate:
    """One row of estimates; the fields are the keys of the JSON.

    Bytes are those of the rank that needs the most memory. None means unknown.
    """

    model: str
    strategy: str
    evidence: str
    "always estimated: closed forms, nothing ran"
    gpu: str | None
    num_gpus: int
    gpus_per_node: int
    per_device_train_batch_size: int
    "with --largest_batch, the largest that fits; 0 if not even 1 fits (the bytes are then those of 1)"
    seq_len: int
    attn_implementation: str
    numerics: str
    like: str | None
    "preset of `--like`: the trainer that this row estimates; None: slm_toolkit's own"
    gradient_checkpointing: str
    gradient_accumulation_steps: int
    kernels: str
    fp8: str
    pad_widths: bool
    optim: str
    peft: str
    lora_r: int | None
    "None without LoRA"
    lora_dropout: float | None
    adapted_modules: list[str] | None
    "matrices of each layer that have an adapter; None if all weights are trained"
    num_trainable_params: int
    calibration: str | None
    "the measurements of this GPU in `hardware/calibration.py`; None: constants fitted to published runs"
    peak_allocated_bytes: int
    peak_allocated_low_bytes: int
    peak_allocated_high_bytes: int
    peak_reserved_bytes: int
    peak_reserved_low_bytes: int
    peak_reserved_high_bytes: int
    host_bytes_per_node: int
    parts: dict[str, int]
    "bytes by part at the peak; all but allocator_slack and cuda_context add up to peak_allocated_bytes"
    peak_instant: str
    needed_bytes: int
    "bytes without which a step runs out of memory: peak_allocated_bytes and most of allocator_slack"
    fits: bool | None
    "whether fit_probability is at least 0.5"
    fit_probability: float | None
    "probability that needed_bytes and cuda_context fit on the GPU, given the errors on other people's runs"
    verdict: str | None
    "fits, may fit, unlikely to fit or does not fit; see predict/memory/machine.py"
    is_nearly_full: bool | None
    "it fits, but its reserved bytes do not: PyTorch then frees unused blocks and retries, which is slower"
    headroom_bytes: int | None
    "the GPU's memory minus cuda_context and needed_bytes"
    changes_that_fit: list[Change] | None
    """if it does not fit: the smallest changes that do, the fastest first; empty: none was found; None: it
    fits, or `grid.estimates` did not search, because too many rows don't fit"""
    batch_with_margin: int | None
    "with --largest_batch: the largest batch whose verdict is fits"
    deepspeed_bytes: int | None
    """DeepSpeed's own estimate; None for stages without an estimator, and with adapters, because DeepSpeed
    counts frozen parameters as trained"""
    deepspeed_host_bytes: int | None
    deepspeed_stage: int | None
    deepspeed_stands_in: bool
    "True for FSDP full shard: DeepSpeed has no estimator for it, so the ZeRO-3 estimator stands in"
    deepspeed_version: str | None
    traffic_bytes: dict[str, float]
    "bytes that each rank sends in a step, by purpose; intra_node and inter_node are sums over purposes"
    step_seconds: float | None
    "None without a GPU, or if the network between the nodes is unknown"
    step_low_seconds: float | None
    step_high_seconds: float | None
    "includes the slow end of PCIe's range if PCIe links the GPUs of a node and was not measured"
    parts_seconds: dict[str, float] | None
    "seconds by part, for each of `predict.speed.step.PARTS`; they add up to step_seconds"
    misaligned_seconds: float | None
    "seconds within matmul that are lost because widths are not multiples of 8"
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    "from 6 N + 12 L H S FLOPs per token; with adapters from 4 N + 6 N_adapters + 12 L H S"
    bottleneck: str | None
    "one of `predict.speed.step.BOTTLENECKS`"
    inter_node_gbps: float | None
    "gigabits per second of a node: given by the user, measured, or from the usual AWS machine's data sheet"
    inter_node_gbps_needed: float | None
    "gigabits per second at which communication between nodes would hide behind compute; None on one node"
    network_evidence: str | None
    "source of the network's speed: measured, measured in part, given or data sheet; None if nothing is sent"
    depends_on_pcie: bool
    "True if PCIe links the GPUs of a node and was not measured"
    usd_per_gpu_hour: float | None
    price_source: str | None
    usd_per_million_tokens: float | None
    tokens_per_usd: float | None


_OF_FLAGS = (
    *("per_device_train_batch_size", "seq_len", "gradient_accumulation_steps", "numerics"),
    *("gradient_checkpointing", "attn_implementation", "kernels", "fp8", "pad_widths", "optim", "peft"),
)
"fields of an Estimate that are flags"


def estimate(setup: Setup, *, memory: MemoryEstimate | None = None) -> Estimate:
    """Return the Estimate of a launched setup (see `Setup.launched`).

    `memory` is `peak(setup)` if the caller has computed it already, for another GPU.
    """
    spec, strategy, config, gpu = setup.spec, setup.strategy, setup.config, setup.gpu
    placement, adapters = setup.placement, setup.adapters
    if unknown := unknown_to_estimates(config, gpu=gpu, spec=spec):
        raise ValueError(f"{unknown[0]}\nhint: `slm estimate --help all` explains each flag")
    if memory is None:
        memory = peak(setup)
    parts = {**memory.parts, "workspace": workspace_bytes(gpu)}
    allocated = band_of(sum(parts.values()))
    slack = allocator_slack(setup, memory, allocated=allocated.middle)
    reserved = band_of(allocated.middle + slack)
    needed = needed_bytes(allocated.middle, slack)
    context = context_bytes(num_gpus=setup.num_gpus, calibration=setup.calibration)
    usable = probability = None
    if gpu is not None:
        usable = gpu.memory_bytes - context
        probability = probability_that_fits(needed, usable)
    stage = deepspeed_stage(strategy) if adapters is None else None
    needs = deepspeed_needs(
        spec.num_params,
        spec.largest_layer_params,
        zero_stage=stage,
        num_gpus_per_node=setup.ranks_per_node,
        num_nodes=setup.num_nodes,
        offload_optimizer=placement.optimizer_device != "none",
        offload_params=placement.parameter_device != "none",
        zero_init=placement.zero_init,
    )
    return Estimate(
        model=spec.name,
        strategy=strategy.name,
        evidence="estimated",
        gpu=gpu.name if gpu else None,
        num_gpus=setup.num_gpus,
        gpus_per_node=setup.ranks_per_node,
        **{name: getattr(config, name) for name in _OF_FLAGS},
        like=setup.like.name if setup.like else None,
        lora_r=adapters.rank if adapters else None,
        lora_dropout=config.lora_dropout if adapters else None,
        adapted_modules=list(adapters.targets) if adapters else None,
        num_trainable_params=setup.unpadded.num_params if setup.unpadded else setup.weights.trained,
        calibration=setup.calibration.described,
        peak_allocated_bytes=allocated.middle,
        peak_allocated_low_bytes=allocated.low,
        peak_allocated_high_bytes=allocated.high,
        peak_reserved_bytes=reserved.middle,
        peak_reserved_low_bytes=reserved.low,
        peak_reserved_high_bytes=reserved.high,
        host_bytes_per_node=host_bytes(setup),
        parts={**parts, "allocator_slack": slack, "cuda_context": context},
        peak_instant=memory.peak_instant,
        needed_bytes=needed,
        fits=None if probability is None else probability >= 0.5,
        fit_probability=probability,
        verdict=None if probability is None else verdict_of(probability),
        is_nearly_full=None if usable is None else needed <= usable < reserved.middle,
        headroom_bytes=None if usable is None else usable - needed,
        changes_that_fit=None,
        batch_with_margin=None,
        deepspeed_bytes=needs.gpu_bytes if needs else None,
        deepspeed_host_bytes=needs.host_bytes_per_node if needs else None,
        deepspeed_stage=stage,
        deepspeed_stands_in=stage is not None and not strategy.is_deepspeed,
        deepspeed_version=ESTIMATOR_VERSION if needs else None,
        **_speed_and_cost(setup),
    )


def largest_batch(setup: Setup) -> Estimate:
    """Return the Estimate of the largest batch that fits the setup's GPU, whose memory must be known.

    A larger batch never takes less memory, so bisection finds it.
    """

    def of(size: int) -> Estimate:
        return estimate(with_flags(setup, per_device_train_batch_size=size))

    def largest(is_small_enough: Callable[[Estimate], bool], most: int) -> int:
        return bisect_left(range(1, most + 1), True, key=lambda size: not is_small_enough(of(size)))

    num_fitting = largest(lambda row: bool(row.fits), LARGEST_BATCH_TRIED)
    with_margin = largest(lambda row: row.verdict == "fits", num_fitting)
    return dataclasses.replace(
        of(max(1, num_fitting)), per_device_train_batch_size=num_fitting, batch_with_margin=with_margin
    )


def deepspeed_stage(strategy: Strategy) -> int | None:
    """Return the ZeRO stage whose estimator applies: the strategy's own, 3 for FSDP full shard, or None."""
    if strategy.is_deepspeed:
        return strategy.zero_stage if strategy.zero_stage in (2, 3) else None
    return 3 if strategy.is_fsdp and strategy.sharding.reshard_after_forward else None


def _speed_and_cost(setup: Setup) -> dict[str, Any]:
    """Return the fields of Estimate from traffic_bytes on. Without a GPU, the slow imports are skipped."""
    sent = transfers(setup)
    time = software = None
    if setup.gpu is not None:
        from slm_toolkit.predict.speed.software import TODAY, calibrated
        from slm_toolkit.predict.speed.step import step_time

        software = calibrated(TODAY, setup.calibration)
        compiled_loss = setup.own_loss is not None and setup.own_loss == setup.like.compiled_loss
        loss_kernel = "compiled" if compiled_loss else None
        time = step_time(setup, sent, software, loss_kernel=loss_kernel)
    fields = {**_traffic(setup, sent, time), **_speed(setup, time, software), **_cost(setup, time)}
    slow = setup.cluster.with_slow_pcie if time is not None and setup.ranks_per_node > 1 else None
    fields["depends_on_pcie"] = slow is not None
    if slow is not None:
        deployment = dataclasses.replace(setup.deployment, cluster=slow)
        slow_setup = dataclasses.replace(setup, deployment=deployment)
        slow_time = step_time(slow_setup, sent, software, loss_kernel=loss_kernel)
        slow_fields = _speed(slow_setup, slow_time, software)
        fields["step_high_seconds"] = slow_fields["step_high_seconds"]
    return fields


def _traffic(setup: Setup, sent: tuple[Transfer, ...], time: "StepTime | None") -> dict[str, Any]:
    inter_node, cluster = sum(transfer.inter_node_bytes for transfer in sent), setup.cluster
    network = cluster.node_bytes_per_second(setup.ranks_per_node) if cluster and inter_node else None
    needed = _gbps_needed(sent, time, setup.ranks_per_node) if inter_node and time else None
    return {
        "traffic_bytes": {
            **{transfer.name: transfer.sent_bytes for transfer in sent},
            "intra_node": sum(transfer.intra_node_bytes for transfer in sent),
            "inter_node": inter_node,
        },
        "inter_node_gbps": network * 8 / 1e9 if network else None,
        "inter_node_gbps_needed": needed,
        "network_evidence": _network_evidence(sent, cluster) if time is not None and sent else None,
    }


def _gbps_needed(sent: tuple[Transfer, ...], time: "StepTime", gpus_per_node: int) -> float:
    """Return the gigabits per second that a node needs to hide its communication behind compute.

    Bytes sent once per step must hide behind the last micro-step; all bytes together must hide behind all
    micro-steps. Communication after the optimizer can't hide, so it needs no bandwidth here.
    """

    def bytes_of(transfers: list[Transfer]) -> float:
        return gpus_per_node * sum(transfer.inter_node_bytes for transfer in transfers)

    hideable = [transfer for transfer in sent if transfer.overlaps]
    late = [transfer for transfer in hideable if transfer.in_last_micro_step]
    of_last = bytes_of(late) / time.last_micro_step_seconds
    of_all = bytes_of(hideable) / time.overlappable_seconds
    return max(of_last, of_all) / NODE_NETWORK_SHARE * 8 / 1e9


def _network_evidence(sent: tuple[Transfer, ...], cluster: Cluster) -> str:
    measured = [cluster.is_measured(num_nodes=transfer.num_nodes) for transfer in sent]
    if any(measured):
        return "measured" if all(measured) else "measured in part"
    is_given = cluster.given_node_bytes_per_second is not None
    return "given" if is_given and any(transfer.num_nodes > 1 for transfer in sent) else "data sheet"


def _speed(setup: Setup, time: "StepTime | None", software: "Software | None") -> dict[str, Any]:
    if time is None:
        names = (
            "step_seconds",
            "step_low_seconds",
            "step_high_seconds",
            "parts_seconds",
            *("mfu", "bottleneck", "misaligned_seconds", "tokens_per_second", "tokens_per_second_per_gpu"),
        )
        return dict.fromkeys(names)
    from slm_toolkit.predict.speed.step import bottleneck_of

    seconds, rate = time.step_seconds, time.tokens_per_second
    weights, config = setup.weights, setup.config
    return {
        "step_seconds": seconds,
        "step_low_seconds": (seconds - time.offload.middle) / software.high + time.offload.low,
        "step_high_seconds": (seconds - time.offload.middle) / software.low + time.offload.high,
        "parts_seconds": time.parts_seconds,
        "misaligned_seconds": time.misaligned_seconds,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / setup.num_gpus,
        "mfu": None
        if config.numerics == "fp32"  # its peak without tensor cores is unknown
        else model_flops_utilization(
            setup.unpadded or setup.spec,  # products with padding are no progress
            seq_len=config.seq_len,
            gpu=setup.gpu,
            tokens_per_second_per_gpu=rate / setup.num_gpus,
            adapter_params=weights.trained if weights.is_frozen else None,
        ),
        "bottleneck": bottleneck_of(time),
    }


def _cost(setup: Setup, time: "StepTime | None") -> dict[str, Any]:
    price = setup.deployment.price
    per_million = per_usd = None
    if time is not None and price is not None:
        paid = {
            "tokens_per_second": time.tokens_per_second,
            "usd_per_gpu_hour": price.usd_per_gpu_hour,
            "num_gpus": setup.num_gpus,
        }
        per_million, per_usd = usd_per_million_tokens(**paid), tokens_per_usd(**paid)
    return {
        "usd_per_gpu_hour": price.usd_per_gpu_hour if price else None,
        "price_source": price.source if price else None,
        "usd_per_million_tokens": per_million,
        "tokens_per_usd": per_usd,
    }
