"""Seconds of one optimizer step, by part: a roofline over its operations, and the communication that shows.

Arithmetic alone, some tens of microseconds for each configuration. S: sequence length. Constants that were
fitted stand in `software.py`, those counted by hand in `kernels.py` or beside their use.
"""

import math
from dataclasses import dataclass

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import Gpu
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.activations import AUTOCAST, FP32
from slm_toolkit.predict.bandwidth import Cluster, transfer_seconds
from slm_toolkit.predict.kernels import LOGIT_BYTES, layer_traffic
from slm_toolkit.predict.matmul import Rates, next_aligned, product_seconds, rates_of
from slm_toolkit.predict.memory import compute_of
from slm_toolkit.predict.software import Software
from slm_toolkit.predict.traffic import Transfer
from slm_toolkit.strategy import Strategy

PARTS = (
    *("matmul", "attention", "memory_traffic", "recomputation", "optimizer", "communication"),
    *("launch_overhead", "fixed"),
)
"""of a step's seconds, in the order of reports: matrix products; attention; element-wise kernels, loss and
accumulation; what checkpointing does again; the optimizer; communication not hidden; waiting for the host to
launch kernels; what no operation explains"""

_FLASH_BACKWARD = 2.5  # of forward: five products for two (Dao, arXiv 2307.08691, section 3)
_AUTOCAST_SLOWDOWN = 1.5  # of element-wise kernels over an fp32 residual stream; hand count
_COMPILED_AUTOCAST_SLOWDOWN = 1.2  # with the casts inside other kernels; hand count
_AUTOCAST_CAST_BYTES = 12  # per parameter: each weight to bf16 for forward, its gradient back to fp32
_ADAM_BYTES = {"pure_bf16": 20, "other": 28}
"""per parameter: gradient 2 read; master 8, both moments 16 read and written; weight 2 written. pure_bf16:
the same in bf16, with the temporaries of the norm"""
_UNFUSED_ADAM = 1.8  # reads and writes of the for-each kernels over the fused one's; hand count
_FP32_SHARE = 0.85  # of the fp32 peak; unverified
_SELECTIVE_RECOMPUTED = 0.5
_LAYERS_AGAIN = {"none": 0.0, "full": 1.0, "selective_layer": 0.5, "selective_op": 1.0}
"share of forward's kernels that checkpointing launches again"
_SCORE_KERNELS = 6  # of eager attention beside the one of a fused kernel: two products, scale, mask, softmax
_HEAD_KERNELS = 40  # of embedding, final norm, head and loss, forward and backward
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
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    *,
    gpu: Gpu,
    cluster: Cluster,
    transfers: tuple[Transfer, ...],
    num_gpus: int,
    num_shards: int,
    software: Software,
    loss_kernel: str | None = None,
    first_step: bool = False,
) -> StepTime | None:
    """None where the network between nodes is unknown.

    `num_shards`: ranks that the state is sharded over; `loss_kernel`: of LOGIT_BYTES, where it is none of the
    trainer's; `first_step`: with what the paper's protocol adds.
    """
    rates = rates_of(gpu, software)
    micro_steps = config.gradient_accumulation_steps
    compute = compute_of(config.numerics, strategy.engine)
    work = _micro_step(spec, config, rates, software, compute, gpu, loss_kernel or config.loss_kernel)
    sharded = strategy.engine in ("fsdp1", "fsdp2") or strategy.zero_stage == 3
    num_kernels = work.num_kernels + (3 * spec.num_layers * _SHARDED_KERNELS if sharded else 0)
    device = work.total
    launch = max(0.0, num_kernels * software.kernel_seconds - device)

    communication = _communication(
        transfers, cluster, software, beside=micro_steps * (device + launch), micro_steps=micro_steps
    )
    if communication is None:
        return None
    exposed, hidden = communication
    if num_gpus > 1:
        crowd = math.exp(-software.few_ranks / (num_gpus - 1))
        per_layer = software.layer_seconds + (micro_steps * software.sharded_layer_seconds if sharded else 0)
        exposed += spec.num_layers * crowd * per_layer
        exposed += software.ddp_seconds if strategy.engine == "ddp" else 0
    return StepTime(
        parts_seconds={
            "matmul": micro_steps * work.matmul,
            "attention": micro_steps * work.attention,
            "memory_traffic": micro_steps * work.memory_traffic
            + (micro_steps - 1) * _accumulation_seconds(spec, compute, rates),
            "recomputation": micro_steps * work.recomputation,
            "optimizer": _optimizer_seconds(spec, strategy, config, rates, num_shards),
            "communication": exposed,
            "launch_overhead": micro_steps * launch,
            "fixed": software.step_seconds + (software.first_step_seconds if first_step else 0),
        },
        tokens=num_gpus * micro_steps * config.per_device_train_batch_size * config.seq_len,
        hidden_communication_seconds=hidden,
        overlappable_seconds=micro_steps * (device + launch),
        last_micro_step_seconds=device + launch,
        misaligned_seconds=micro_steps * work.misaligned,
    )


@dataclass(frozen=True)
class _Work:
    """Seconds of one micro-step on the device."""

    matmul: float
    attention: float
    memory_traffic: float
    recomputation: float
    misaligned: float
    num_kernels: int

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_traffic + self.recomputation


def _micro_step(
    spec: ModelSpec,
    config: RunConfig,
    rates: Rates,
    software: Software,
    compute: str,
    gpu: Gpu,
    loss_kernel: str,
) -> _Work:
    tokens = config.per_device_train_batch_size * config.seq_len
    element_bytes = 4 if compute == FP32 else 2
    compiled = config.torch_compile
    if compute == FP32:
        rates = _fp32_rates(rates, gpu)
    products = _products(spec, tokens, rates, padded=compiled, element_bytes=element_bytes)
    forward, backward, aligned = (spec.num_layers * seconds for seconds in products)
    head, ideal_head = (
        product_seconds(
            rates,
            rows=tokens,
            inputs=spec.hidden_size,
            outputs=width,
            padded=loss_kernel == "compiled",
            element_bytes=element_bytes,
        ).total
        for width in (spec.vocab_size, next_aligned(spec.vocab_size))
    )
    attention_forward, attention_backward = (
        spec.num_layers * seconds for seconds in _attention(spec, config, tokens, rates, software)
    )
    traffic = layer_traffic(
        spec,
        compiled=compiled,
        fused_norm=config.norm_kernel == "fused",
        fused_mlp=config.mlp_kernel == "fused",
    )
    slowdown = software.compiled_slowdown if traffic.is_compiled else software.eager_slowdown
    slowdown *= _slowdown_of(compute, compiled)
    elementwise = spec.num_layers * slowdown * traffic.bytes_per_token * tokens / rates.memory_bytes
    logits = tokens * spec.vocab_size * LOGIT_BYTES[loss_kernel] / rates.memory_bytes
    casts = spec.num_params * _AUTOCAST_CAST_BYTES / rates.memory_bytes if compute == AUTOCAST else 0.0

    layer_forward = forward + attention_forward + elementwise / 3
    again = {
        "none": 0.0,
        "full": layer_forward,
        "selective_layer": layer_forward / 2,
        # all but attention, and every second product
        "selective_op": _SELECTIVE_RECOMPUTED * forward + elementwise / 3,
    }[config.gradient_checkpointing]
    of_scores = _SCORE_KERNELS if config.attn_implementation == "eager" and not compiled else 0
    forward_kernels = spec.num_layers * (traffic.num_kernels + of_scores)
    kernels = 3 * forward_kernels + _HEAD_KERNELS
    return _Work(
        matmul=forward + backward + head,
        attention=attention_forward + attention_backward,
        memory_traffic=elementwise + logits + casts,
        recomputation=again,
        misaligned=forward + backward + head - aligned - ideal_head,
        num_kernels=kernels + round(_LAYERS_AGAIN[config.gradient_checkpointing] * forward_kernels),
    )


def _slowdown_of(compute: str, compiled: bool) -> float:
    if compute == AUTOCAST:
        return _COMPILED_AUTOCAST_SLOWDOWN if compiled else _AUTOCAST_SLOWDOWN
    return 2.0 if compute == FP32 else 1.0


def _products(
    spec: ModelSpec, tokens: int, rates: Rates, *, padded: bool, element_bytes: int
) -> tuple[float, float, float]:
    """Forward and backward seconds of one layer's matrix products, and both if all widths were aligned."""
    h, f = spec.hidden_size, spec.ffn_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = ((h, query + 2 * key, 1), (query, h, 1), (h, f, spec.num_ffn_matrices - 1), (f, h, 1))
    forward = backward = aligned = 0.0
    for inputs, outputs, count in shapes:
        size = {"rows": tokens, "element_bytes": element_bytes}
        seconds = product_seconds(rates, inputs=inputs, outputs=outputs, padded=padded, **size)
        ideal = product_seconds(
            rates, inputs=next_aligned(inputs), outputs=next_aligned(outputs), padded=padded, **size
        )
        forward += count * seconds.forward
        backward += count * seconds.backward
        aligned += count * ideal.total
    return forward, backward, aligned


def _attention(
    spec: ModelSpec, config: RunConfig, tokens: int, rates: Rates, software: Software
) -> tuple[float, float]:
    """Forward and backward seconds of one layer's attention, projections not counted."""
    width = spec.num_heads * spec.head_dim
    if config.attn_implementation != "eager":
        forward = 2.0 * config.seq_len * tokens * width / rates.flash_flops  # half of 4 S T width: causal
        return forward, _FLASH_BACKWARD * forward
    scores = tokens * config.seq_len * spec.num_heads
    per_score = software.compiled_score_bytes if config.torch_compile else software.score_bytes
    moved = scores * per_score / rates.memory_bytes
    products = 4.0 * config.seq_len * tokens * width / rates.matmul_flops  # the whole square
    return moved + products, 2 * (moved + products)


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


def _optimizer_seconds(
    spec: ModelSpec, strategy: Strategy, config: RunConfig, rates: Rates, num_shards: int
) -> float:
    shards = num_shards if strategy.sharded_parts else 1
    per_param = _ADAM_BYTES.get(config.numerics, _ADAM_BYTES["other"])
    per_param *= 1.0 if config.optim == "adamw_torch_fused" else _UNFUSED_ADAM
    return per_param * spec.num_params / shards / rates.memory_bytes


def _accumulation_seconds(spec: ModelSpec, compute: str, rates: Rates) -> float:
    """A further micro-step reads the gradients there are, reads the new ones and writes their sum."""
    element_bytes = 2 if compute not in (AUTOCAST, FP32) else 4
    return 3 * element_bytes * spec.num_params / rates.memory_bytes


def _fp32_rates(rates: Rates, gpu: Gpu) -> Rates:
    """Without tensor cores alignment matters little."""
    rate = gpu.fp32_flops_per_second * _FP32_SHARE
    return Rates(rate, 1.0, rate / 2, rates.memory_bytes, rates.num_sms)
