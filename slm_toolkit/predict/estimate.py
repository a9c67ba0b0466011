"""Estimate: the memory, speed and cost of one configuration, from closed forms only."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slm_toolkit.base.derived import Derived, Functions, attributes_of, unset
from slm_toolkit.hardware.network import NODE_NETWORK_SHARE
from slm_toolkit.model.model_spec import model_flops_utilization
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.predict.deepspeed_estimator import deepspeed_needs
from slm_toolkit.predict.memory.machine import (
    OUTSIDE_ERROR,
    allocator_slack,
    context_bytes,
    host_bytes,
    needed_bytes,
    probability_that_fits,
    verdict_of,
    workspace_bytes,
)
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates, with_flags
from slm_toolkit.predict.speed.offload import FASTEST, SLOWEST
from slm_toolkit.predict.speed.traffic import transfers
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
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


_FIELDS: Functions = {
    "model": lambda row: row.setup.spec.name,
    "strategy": lambda row: row.setup.strategy.name,
    # closed forms, nothing ran
    "evidence": lambda row: "estimated",
    "gpu": lambda row: row.setup.gpu and row.setup.gpu.name,
    **attributes_of("setup", "num_gpus", gpus_per_node="ranks_per_node"),
    # with --largest_batch, the largest that fits; 0 if not even 1 fits (the bytes are then those of 1)
    **attributes_of("config", "per_device_train_batch_size", "seq_len", "attn_implementation", "numerics"),
    # preset of `--like`: the trainer that this row estimates; None: slm_toolkit's own
    "like": lambda row: row.setup.like and row.setup.like.name,
    **attributes_of("config", "gradient_checkpointing", "gradient_accumulation_steps", "kernels", "fp8"),
    **attributes_of("config", "pad_widths", "optim", "peft"),
    # None without LoRA, like the next two; the third has the matrices of each layer that have an adapter
    **attributes_of("adapters", lora_r="rank"),
    "adapted_modules": lambda row: row.adapters and list(row.adapters.targets),
    "num_trainable_params": lambda row: (
        row.setup.unpadded.num_params if row.setup.unpadded else row.setup.weights.trained
    ),
    # the measurements of this GPU in `hardware/calibration.py`; None: constants fitted to published runs
    "calibration": lambda row: row.setup.calibration.described,
    **unset("peak_allocated_bytes", "peak_reserved_bytes"),
    "peak_reserved_low_bytes": lambda row: round((1 - OUTSIDE_ERROR) * row.peak_reserved_bytes),
    "peak_reserved_high_bytes": lambda row: round((1 + OUTSIDE_ERROR) * row.peak_reserved_bytes),
    "host_bytes_per_node": lambda row: host_bytes(row.setup),
    # bytes by part at the peak; all but allocator_slack and cuda_context add up to peak_allocated_bytes
    **unset("parts"),
    **attributes_of("memory", "peak_instant"),
    # bytes without which a step runs out of memory: peak_allocated_bytes and most of allocator_slack
    "needed_bytes": lambda row: needed_bytes(row.peak_allocated_bytes, row.parts["allocator_slack"]),
    "fits": lambda row: row.usable_bytes and row.fit_probability >= 0.5,
    # probability that needed_bytes and cuda_context fit on the GPU, given the errors on other people's runs
    "fit_probability": lambda row: (
        row.usable_bytes and probability_that_fits(row.needed_bytes, row.usable_bytes)
    ),
    # fits, may fit, unlikely to fit or does not fit; see predict/memory/machine.py
    "verdict": lambda row: row.usable_bytes and verdict_of(row.fit_probability),
    # it fits, but its reserved bytes do not: PyTorch then frees unused blocks and retries, which is slower
    "is_nearly_full": lambda row: (
        row.usable_bytes and row.needed_bytes <= row.usable_bytes < row.peak_reserved_bytes
    ),
    # the GPU's memory minus cuda_context and needed_bytes
    "headroom_bytes": lambda row: row.usable_bytes and row.usable_bytes - row.needed_bytes,
    # if it does not fit: the smallest changes that do, the fastest first; empty: none was found; None: it
    # fits, or `grid.estimates` did not search, because too many rows don't fit
    **unset("changes_that_fit"),
    # with --largest_batch: the largest batch whose verdict is fits
    **unset("batch_with_margin"),
    # DeepSpeed's own estimate; None for stages without an estimator, and with adapters, because DeepSpeed
    # counts frozen parameters as trained
    **attributes_of("deepspeed", deepspeed_bytes="gpu_bytes", deepspeed_host_bytes="host_bytes_per_node"),
    "deepspeed_stage": lambda row: deepspeed_stage(row.setup.strategy) if row.adapters is None else None,
    # True for FSDP full shard: DeepSpeed has no estimator for it, so the ZeRO-3 estimator stands in
    "deepspeed_stands_in": lambda row: (
        row.deepspeed_stage is not None and not row.setup.strategy.is_deepspeed
    ),
    # bytes that each rank sends in a step, by purpose; intra_node and inter_node are sums over purposes
    "traffic_bytes": lambda row: {
        **{transfer.name: transfer.sent_bytes for transfer in row.transfers},
        "intra_node": sum(transfer.intra_node_bytes for transfer in row.transfers),
        "inter_node": sum(transfer.inter_node_bytes for transfer in row.transfers),
    },
    # None without a GPU, or if the network between the nodes is unknown
    **attributes_of("time", "step_seconds"),
    "step_low_seconds": lambda row: row.time and _seconds(row.time, row.software.high, FASTEST),
    # includes the slow end of PCIe's range if PCIe links the GPUs of a node and was not measured
    "step_high_seconds": lambda row: row.time and _seconds(row.slow_time, row.software.low, SLOWEST),
    # seconds by part, for each of `predict.speed.step.PARTS`; they add up to step_seconds
    **attributes_of("time", "parts_seconds", "tokens_per_second"),
    "tokens_per_second_per_gpu": lambda row: row.time and row.tokens_per_second / row.num_gpus,
    # from 6 N + 12 L H S FLOPs per token; with adapters from 4 N + 6 N_adapters + 12 L H S
    "mfu": lambda row: _mfu(row),
    # one of `predict.speed.step.BOTTLENECKS`
    **unset("bottleneck"),
    # gigabits per second of a node: given by the user, measured, or from the usual AWS machine's data sheet
    "inter_node_gbps": lambda row: _inter_node_gbps(row.setup) if row.traffic_bytes["inter_node"] else None,
    # gigabits per second at which communication between nodes would hide behind compute; None on one node
    "inter_node_gbps_needed": lambda row: (
        row.time and row.traffic_bytes["inter_node"] and _gbps_needed(row) or None
    ),
    # True if PCIe links the GPUs of a node and was not measured
    "depends_on_pcie": lambda row: row.slow_time is not row.time,
    **attributes_of("price", "usd_per_gpu_hour", price_source="source"),
    "usd_per_million_tokens": lambda row: usd_per_million_tokens(
        row.tokens_per_second, row.usd_per_gpu_hour, row.num_gpus
    ),
}


class Estimate(Derived):
    """One row of estimates; the attributes of the table above are the keys of the JSON.

    Bytes are those of the rank that needs the most memory. None means unknown.
    """

    FIELDS = _FIELDS

    def __init__(self, setup: Setup, memory: MemoryEstimate) -> None:
        self.setup, self.config, self.adapters = setup, setup.config, setup.adapters
        self.price = setup.deployment.price
        self._set_memory(memory)
        self._set_time()

    def _set_memory(self, memory: MemoryEstimate) -> None:
        setup = self.setup
        allocated_parts = {**memory.parts, "workspace": workspace_bytes(setup.gpu)}
        self.memory, self.peak_allocated_bytes = memory, sum(allocated_parts.values())
        slack = allocator_slack(setup, memory, allocated=self.peak_allocated_bytes)
        self.peak_reserved_bytes = self.peak_allocated_bytes + slack
        context = context_bytes(num_gpus=setup.num_gpus, calibration=setup.calibration)
        self.parts = {**allocated_parts, "allocator_slack": slack, "cuda_context": context}
        self.usable_bytes = setup.gpu and setup.gpu.memory_bytes - context
        placement = setup.placement
        self.deepspeed = deepspeed_needs(
            setup.spec.num_params,
            setup.spec.largest_layer_params,
            zero_stage=self.deepspeed_stage,
            num_gpus_per_node=setup.ranks_per_node,
            num_nodes=setup.num_nodes,
            offload_optimizer=placement.optimizer_device != "none",
            offload_params=placement.parameter_device != "none",
            zero_init=placement.zero_init,
        )

    def _set_time(self) -> None:
        """Set the time of a step; None without a GPU, which skips the slow imports."""
        setup = self.setup
        self.transfers = transfers(setup)
        self.time = self.slow_time = self.software = None
        if setup.gpu is None:
            return
        from slm_toolkit.predict.speed.software import TODAY, calibrated
        from slm_toolkit.predict.speed.step import bottleneck_of, step_time

        compiled_loss = setup.own_loss is not None and setup.own_loss == setup.like.compiled_loss
        self.software = calibrated(TODAY, setup.calibration)
        step_time_of = partial(
            step_time,
            transfers=self.transfers,
            software=self.software,
            loss_kernel="compiled" if compiled_loss else None,
        )
        self.time = self.slow_time = step_time_of(setup)
        if self.time is None:
            return
        self.bottleneck = bottleneck_of(self.time)
        slow = setup.cluster.with_slow_pcie if setup.ranks_per_node > 1 else None
        if slow is not None:
            deployment = dataclasses.replace(setup.deployment, cluster=slow)
            self.slow_time = step_time_of(dataclasses.replace(setup, deployment=deployment))

    def as_json(self) -> dict[str, Any]:
        changes = self.changes_that_fit
        return {**super().as_json(), "changes_that_fit": changes and [*map(vars, changes)]}


def estimate(setup: Setup) -> Estimate:
    """Return the Estimate of a launched setup (see `Setup.launched`)."""
    if unknown := unknown_to_estimates(setup.config, gpu=setup.gpu, spec=setup.spec):
        raise ValueError(f"{unknown[0]}\nhint: `slm estimate --help all` explains each flag")
    return Estimate(setup, peak(setup))


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
    return of(max(1, num_fitting)).with_values(
        per_device_train_batch_size=num_fitting, batch_with_margin=with_margin
    )


def deepspeed_stage(strategy: Strategy) -> int | None:
    """Return the ZeRO stage whose estimator applies: the strategy's own, 3 for FSDP full shard, or None."""
    if strategy.is_deepspeed:
        return strategy.zero_stage if strategy.zero_stage in (2, 3) else None
    return 3 if strategy.is_fsdp and strategy.sharding.reshard_after_forward else None


def _seconds(time: "StepTime", share: float, of_offload: float) -> float:
    """Return a step's seconds at a share of the expected speed; `of_offload` multiplies offload's seconds."""
    offload = time.parts_seconds["offload"]
    return (time.step_seconds - offload) / share + of_offload * offload


def _mfu(row: Estimate) -> float | None:
    setup = row.setup
    if row.time is None or setup.config.numerics == "fp32":  # its peak without tensor cores is unknown
        return None
    return model_flops_utilization(
        setup.unpadded or setup.spec,  # products with padding are no progress
        seq_len=setup.config.seq_len,
        gpu=setup.gpu,
        tokens_per_second_per_gpu=row.tokens_per_second_per_gpu,
        adapter_params=setup.weights.trained if setup.weights.is_frozen else None,
    )


def _inter_node_gbps(setup: Setup) -> float | None:
    network = setup.cluster and setup.cluster.node_bytes_per_second(setup.ranks_per_node)
    return network * 8 / 1e9 if network else None


def _gbps_needed(row: Estimate) -> float:
    """Return the gigabits per second that a node needs to hide its communication behind compute.

    Communication after the optimizer can't hide, so it needs no bandwidth here.
    """
    sent = sum(transfer.inter_node_bytes for transfer in row.transfers if transfer.overlaps)
    return row.gpus_per_node * sent / row.time.overlappable_seconds / NODE_NETWORK_SHARE * 8 / 1e9
