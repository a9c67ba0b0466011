"""Seconds of one optimizer step, by part: a roofline over its operations, and the communication that shows.

Arithmetic alone, some tens of microseconds for each configuration. S: sequence length. Constants that were
fitted stand in `software.py`, those counted by hand beside their use.
"""

import math
from dataclasses import dataclass

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.network import LINK_SHARE, NODE_NETWORK_SHARE, Cluster
from slm_toolkit.predict.setup.dtypes import AUTOCAST, FP32, engine_dtypes
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.predict.speed.matmul import Rates, rates_of
from slm_toolkit.predict.speed.roofline import micro_step_work
from slm_toolkit.predict.speed.software import Software
from slm_toolkit.predict.speed.traffic import Transfer
from slm_toolkit.strategy.strategy import Strategy

PARTS = (
    *("matmul", "attention", "memory_traffic", "dequantization", "recomputation", "optimizer"),
    *("communication", "launch_overhead", "fixed"),
)
"""of a step's seconds, in the order of reports: matrix products; attention; element-wise kernels, loss and
accumulation; 4-bit weights to bf16; what checkpointing does again; the optimizer; communication not hidden;
waiting for the host to launch kernels; what the host does between two steps"""

CALL_SECONDS = 20e-6  # of a collective inside a node, beside its bytes; hand count, not fitted
HOP_SECONDS = 10e-6  # more for each doubling of the nodes; hand count, not fitted
_UNFUSED_ADAM = 1.8  # reads and writes of AdamW's for-each kernels over the fused one's; hand count
_STEP_KERNELS = 30  # of a step beside its passes and parameters: loss and norm summed, tokens copied, counted
_SHARDED_KERNELS = (
    30  # per layer and pass, what FSDP's and ZeRO-3's hooks cost the host, in kernels; unverified
)


@dataclass(frozen=True)
class StepTime:
    """What one rank's optimizer step takes."""

    parts_seconds: dict[str, float]
    "by PARTS; they add up to step_seconds"
    tokens: int
    "of all ranks in one step"
    hidden_communication_seconds: float
    "that costs nothing because something is computed beside it"
    overlappable_seconds: float
    "of compute, what communication could hide behind"
    last_micro_step_seconds: float
    "of it, that of the last micro-step"
    misaligned_seconds: float
    "of matmul: what the widths off the multiple of 8 cost"

    @property
    def step_seconds(self) -> float:
        return sum(self.parts_seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def step_time(
    setup: Setup,
    transfers: tuple[Transfer, ...],
    software: Software,
    *,
    loss_kernel: str | None = None,
    first_step: bool = False,
) -> StepTime | None:
    """Seconds of one step on the setup's GPU; None where the network between nodes is unknown.

    `transfers`: what a rank sends in the step; `software`: its constants, of `setup.software` or others;
    `loss_kernel`: of LOGIT_BYTES, where it is none of the trainer's; `first_step`: with what the paper's
    protocol adds.
    """
    spec, strategy, config = setup.spec, setup.strategy, setup.config
    rates = rates_of(setup.gpu, software)
    micro_steps = config.gradient_accumulation_steps
    work = micro_step_work(setup, rates, software, loss_kernel or config.loss_kernel)
    sharded = strategy.shards_parameters
    num_kernels = work.num_kernels + (3 * spec.num_layers * _SHARDED_KERNELS if sharded else 0)
    device = work.total
    shards = setup.shard_ranks if strategy.sharded_parts else 1
    optimizer_seconds = (
        optimizer_bytes(strategy, config) * setup.weights.trained / shards / rates.optimizer_bytes
    )
    optimizer_launch = max(0.0, _optimizer_kernels(setup) * software.kernel_seconds - optimizer_seconds)
    launch = max(0.0, num_kernels * software.kernel_seconds - device)

    communication = _communication(
        transfers, setup.cluster, software, beside=micro_steps * (device + launch), micro_steps=micro_steps
    )
    if communication is None:
        return None
    exposed, hidden = communication
    if setup.num_gpus > 1:
        crowd = math.exp(-software.few_ranks / (setup.num_gpus - 1))
        per_layer = software.layer_seconds + (micro_steps * software.sharded_layer_seconds if sharded else 0)
        exposed += spec.num_layers * crowd * per_layer
        exposed += software.ddp_seconds if strategy.is_replicated and not strategy.is_single else 0
    return StepTime(
        parts_seconds={
            "matmul": micro_steps * work.matmul,
            "attention": micro_steps * work.attention,
            "memory_traffic": micro_steps * work.memory_traffic
            + (micro_steps - 1) * _accumulation_seconds(setup, rates),
            "dequantization": micro_steps * work.dequantization,
            "recomputation": micro_steps * work.recomputation,
            "optimizer": optimizer_seconds,
            "communication": exposed,
            "launch_overhead": micro_steps * launch + optimizer_launch,
            "fixed": software.step_seconds + (software.first_step_seconds if first_step else 0),
        },
        tokens=setup.num_gpus * micro_steps * setup.num_tokens,
        hidden_communication_seconds=hidden,
        overlappable_seconds=micro_steps * (device + launch),
        last_micro_step_seconds=device + launch,
        misaligned_seconds=micro_steps * work.misaligned,
    )


def _communication(
    transfers: tuple[Transfer, ...],
    cluster: Cluster,
    software: Software,
    *,
    beside: float,
    micro_steps: int,
) -> tuple[float, float] | None:
    """Exposed and hidden seconds of a step: what overlaps costs `contention` of its time, and what is longer
    than the compute beside it costs all of that. What is sent once goes first, beside the last micro-step;
    the rest hides behind the compute that is left."""
    late = early = alone = 0.0
    for transfer in transfers:
        seconds = transfer_seconds(transfer, cluster)
        if seconds is None:
            return None
        if not transfer.overlaps:
            alone += seconds
        elif transfer.in_last_micro_step:
            late += seconds
        else:
            early += seconds
    of_last = beside / micro_steps
    exposed = alone + _exposed(late, of_last, software)
    exposed += _exposed(early, beside - min(late, of_last), software)
    return exposed, alone + early + late - exposed


def _exposed(seconds: float, beside: float, software: Software) -> float:
    return software.contention * min(seconds, beside) + max(0.0, seconds - beside)


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float | None:
    """Latency and bytes of all calls; None between nodes of an unknown network.

    On the bus all ranks send at once. Inside a node that is the link's rate; between nodes the rings of a
    node's ranks share its network, and groups beside each other share it again.
    """
    if transfer.ranks == 1:
        return 0.0
    nodes = transfer.num_nodes
    sharing = transfer.groups_per_node if nodes > 1 else 1
    if cluster.is_measured(num_nodes=nodes):
        line = cluster.fits[transfer.collective]
        rate = line.bus_bytes_per_second or math.inf
        return transfer.num_calls * line.latency_seconds + transfer.sent_bytes * sharing / rate
    calls = transfer.num_calls * (CALL_SECONDS + HOP_SECONDS * math.log2(nodes))
    in_node = transfer.sent_bytes / (LINK_SHARE * cluster.link_bytes_per_second)
    if nodes == 1:
        return calls + in_node
    network = cluster.node_bytes_per_second(transfer.ranks_per_node * transfer.groups_per_node)
    if network is None:
        return None
    between = transfer.sent_bytes * sharing / (NODE_NETWORK_SHARE * network)
    return calls + max(between, in_node)


def optimizer_bytes(strategy: Strategy, config: RunConfig) -> float:
    """Read and written per parameter by one optimizer step: `aligned` 2 + 6 + 8 + 28 + 6 = 50.

    bf16's rounding is done by whoever holds the masters: `run/engine/optimizer.py`, DeepSpeed likewise.
    """
    fp32_reduction = config.reduce_dtype == "fp32"
    dtypes = engine_dtypes(config.numerics, strategy.engine, fp32_reduction=fp32_reduction)
    gradient, updated = dtypes.kept_gradient, dtypes.master or dtypes.parameter
    norm = gradient
    cast = gradient + updated if gradient != updated else 0
    clip = 2 * updated if config.max_grad_norm or config.numerics == "stock" else 0  # stock: times 1, if none
    adamw = 3 * updated + 2 * dtypes.moments  # gradient read; master and moments read and written
    adamw *= 1.0 if config.optim == "adamw_torch_fused" else _UNFUSED_ADAM
    copy_back = updated + dtypes.parameter if dtypes.master else 0
    return norm + cast + clip + adamw + copy_back


def _optimizer_kernels(setup: Setup) -> int:
    """A gradient is cast by itself, all else is done for a list of them at once."""
    num_params = setup.spec.num_layers * (2 + 4 + setup.spec.num_ffn_matrices) + 3
    return _STEP_KERNELS + (num_params if setup.config.numerics == "aligned" else 0)


def _accumulation_seconds(setup: Setup, rates: Rates) -> float:
    """A further micro-step reads the gradients there are, reads the new ones and writes their sum."""
    element_bytes = 2 if setup.compute not in (AUTOCAST, FP32) else 4
    return 3 * element_bytes * setup.weights.trained / rates.memory_bytes


BOTTLENECKS = (
    *("matmul", "attention", "memory_traffic", "dequantization", "communication", "optimizer"),
    "launch_overhead",
)


def bottleneck_of(time: StepTime) -> str:
    """The largest of BOTTLENECKS' parts; what checkpointing does again is counted to none of them."""
    return max(BOTTLENECKS, key=lambda name: time.parts_seconds[name])
