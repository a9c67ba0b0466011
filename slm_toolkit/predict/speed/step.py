"""Seconds of one optimizer step, by part: a roofline over its operations, and the communication that shows.

Arithmetic alone, some tens of microseconds for each configuration. Constants that were fitted stand in
`software.py`, those counted by hand beside their use.

S: sequence length, h: hidden size, f: FFN width. Work is of forward and backward together, bf16, one layer,
of transformers' Llama in eager PyTorch unless it says otherwise. A kernel reads its inputs and writes its
outputs once: 2 bytes each in bf16, 4 where the code makes fp32 copies. That of adapters was counted by hand
from peft 0.21's and bitsandbytes 0.50's code, never timed; fp32 is for the caller's slowdown to say.
"""

import math
from dataclasses import dataclass

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import LINK_SHARE, NODE_NETWORK_SHARE, Cluster
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import NF4_BLOCK, Adapters, matrices_of
from slm_toolkit.predict.setup.setup import AUTOCAST, FP32, Setup, dtypes_of
from slm_toolkit.predict.speed.matmul import Rates, next_aligned, product_seconds, rates_of
from slm_toolkit.predict.speed.software import Software
from slm_toolkit.predict.speed.traffic import Transfer
from slm_toolkit.strategy.strategy import Strategy


@dataclass(frozen=True)
class LayerTraffic:
    """One layer's element-wise work."""

    bytes_per_token: float
    "forward and backward; a third of it in forward"
    num_kernels: int
    "of forward; backward launches twice as many"
    is_compiled: bool


# RMSNorm: to fp32 6, square 8, mean 4, scale 8, to bf16 6, weight 4 = 36 in forward, 54 in backward; two: 180
_TWO_EAGER_RMS_NORMS = 180
_TWO_FUSED_NORMS = 20  # each reads and writes 2 + 2 in forward, 2 + 2 + 2 in backward
_ROPE_AND_RESIDUAL = 188  # rotate, cos, sin, add on query and key: 132; transposed copies: 32; two adds: 24
_EAGER_SWIGLU = 28  # x f: silu 4, product 6; their backward 10 + 8
_RECOMPUTING_SWIGLU = 32  # silu 4, product 6; backward: silu again 4, then products of two: 6 each
_COMPILED_LLAMA = (60, 12)  # x h, x f: a norm, a residual add and RoPE each in one kernel, SwiGLU in one
_GPT = (86, 12)  # x h, x f: two fused LayerNorms 20, two adds 24, copies 32, biases' gradients 10; GELU 12
_COMPILED_GPT = (44, 6)  # the adds go into the norms; GELU and its backward once each
_COMPILED_KERNELS = 12
_EAGER_LLAMA_KERNELS = 48  # two norms 6 each, projections 7, RoPE 12, copies 6, attention, SwiGLU 2, adds 2
_EAGER_GPT_KERNELS = (
    30  # two norms, projections 4 with biases, copies 8, attention, GELU, adds; casts of weights 8
)
_FUSED_NORM_SAVES = 10


def layer_traffic(
    spec: ModelSpec, *, compiled: bool, fused_norm: bool, fused_mlp: bool = False
) -> LayerTraffic:
    """Of one decoder layer; a compiled one has its norms and its MLP fused anyway."""
    h, f = spec.hidden_size, spec.ffn_size
    if compiled:
        of_h, of_f = _COMPILED_LLAMA if spec.gated_ffn else _COMPILED_GPT
        return LayerTraffic(of_h * h + of_f * f, _COMPILED_KERNELS, is_compiled=True)
    if not spec.gated_ffn:
        return LayerTraffic(_GPT[0] * h + _GPT[1] * f, _EAGER_GPT_KERNELS, is_compiled=False)
    norms = _TWO_FUSED_NORMS if fused_norm else _TWO_EAGER_RMS_NORMS
    swiglu = _RECOMPUTING_SWIGLU if fused_mlp else _EAGER_SWIGLU
    return LayerTraffic(
        (norms + _ROPE_AND_RESIDUAL) * h + swiglu * f,
        _EAGER_LLAMA_KERNELS - _FUSED_NORM_SAVES * fused_norm,
        is_compiled=False,
    )


LOGIT_BYTES = {"hf": 60, "fused_logits": 16, "fused_linear": 12, "fused_kernel": 8, "compiled": 30}
"""moved per logit by the loss. hf: forward: fp32 copy 6, shifted copy 8, log-softmax 12; backward: of the
picked one 4, log-softmax 12, shift 12, to bf16 6. fused_logits: read twice, gradient in place. fused_linear:
the same in chunks, of which a part stays in cache. fused_kernel: flash-attn's, bf16 read and written, twice.
compiled: the whole loss by Inductor"""


# LoRA, of a matrix's outputs: scaled 4, added 6; backward: scaled 4. Of its inputs: two gradients added 6.
_LORA_BYTES_OF_OUTPUTS, _LORA_BYTES_OF_INPUTS = 14, 6
_DROPOUT_BYTES = 10  # of the inputs: read 2, written 2, a mask of 1, and the same in backward
_DEFENSIVE_CLONE_BYTES = 4  # of the outputs, where the base is in 4 bits
_IA3_BYTES = (
    16  # of what is scaled: 4; backward: 4, and 8 for the scale's own gradient, made whole and summed
)
_LORA_KERNELS, _IA3_KERNELS = 4, 1  # of forward, a matrix: two products, scale, add; scale
# Per weight: 4 bits read; of its block's scale 8 bits read and 32 written, 32 read and written as the scales'
# mean is added, 32 read; bf16 written. The product reads that, as it reads any weight.
_UNPACKED_BYTES = 0.5 + (1 + 4 + 8 + 4) / NF4_BLOCK + 2
_UNPACKING_KERNELS = 3  # a matrix: the scales, their mean added, the weights


@dataclass(frozen=True)
class AdapterWork:
    """Of one decoder layer."""

    forward_seconds: float
    "of A and B"
    backward_seconds: float
    "of both their gradients"
    bytes_per_token: float
    "of element-wise kernels, forward and backward; a third of it in forward"
    num_kernels: int
    "of forward; backward launches twice as many"
    unpacking_seconds: float
    "of all frozen matrices, each time that a pass goes through the layer"


def adapter_work(
    spec: ModelSpec, adapters: Adapters, *, tokens: int, rates: Rates, element_bytes: int
) -> AdapterWork:
    """LoRA's matrices are thin: what they move, not what they multiply, takes their time."""
    matrices = matrices_of(spec)
    forward = backward = moved = 0.0
    for name in adapters.targets:
        inputs, outputs = matrices[name]
        if not adapters.rank:
            moved += _IA3_BYTES * (inputs if name == "down_proj" else outputs)
            continue
        for width, height in ((inputs, adapters.rank), (adapters.rank, outputs)):
            seconds = product_seconds(
                *(rates,),
                rows=tokens,
                inputs=width,
                outputs=height,
                padded=False,
                element_bytes=element_bytes,
            )
            forward += seconds.forward
            backward += seconds.backward
        moved += _LORA_BYTES_OF_OUTPUTS * outputs + _LORA_BYTES_OF_INPUTS * inputs
        moved += _DROPOUT_BYTES * inputs * adapters.drops
        moved += _DEFENSIVE_CLONE_BYTES * outputs * adapters.is_quantized
    kernels = (_LORA_KERNELS + adapters.drops if adapters.rank else _IA3_KERNELS) * len(adapters.targets)
    unpacking = 0.0
    if adapters.is_quantized:
        size = sum(inputs * outputs for inputs, outputs in matrices.values())
        unpacking = _UNPACKED_BYTES * size / rates.memory_bytes
        kernels += _UNPACKING_KERNELS * len(matrices)
    return AdapterWork(forward, backward, moved, kernels, unpacking)


NO_ADAPTERS = AdapterWork(0.0, 0.0, 0.0, 0, 0.0)


_FLASH_BACKWARD = 2.5  # of forward: five products for two (Dao, arXiv 2307.08691, section 3)
_AUTOCAST_SLOWDOWN = 1.5  # of element-wise kernels over an fp32 residual stream; hand count
_COMPILED_AUTOCAST_SLOWDOWN = 1.2  # with the casts inside other kernels; hand count
_AUTOCAST_CAST_BYTES = 6  # per parameter: each weight to bf16 for forward; as many for a gradient to fp32
_FP32_SHARE = 0.85  # of the fp32 peak; unverified
_SELECTIVE_RECOMPUTED = 0.5
_LAYERS_AGAIN = {"none": 0.0, "full": 1.0, "selective_layer": 0.5, "selective_op": 1.0}
"share of forward's kernels that checkpointing launches again"
_SCORE_KERNELS = 6  # of eager attention beside the one of a fused kernel: two products, scale, mask, softmax
_HEAD_KERNELS = 40  # of embedding, final norm, head and loss, forward and backward


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-step on the device."""

    matmul: float
    attention: float
    memory_traffic: float
    dequantization: float
    recomputation: float
    misaligned: float
    num_kernels: int

    @property
    def total(self) -> float:
        on_weights = self.matmul + self.dequantization
        return on_weights + self.attention + self.memory_traffic + self.recomputation


def micro_step_work(setup: Setup, rates: Rates, software: Software, loss_kernel: str) -> Work:
    """Forward and backward of one micro-step; `loss_kernel`: a key of LOGIT_BYTES."""
    spec, config, adapters, compute = setup.spec, setup.config, setup.adapters, setup.compute
    tokens, compiled = setup.num_tokens, config.torch_compile
    element_bytes = 4 if compute == FP32 else 2
    if compute == FP32:
        rates = _fp32_rates(rates, setup.gpu)
    is_frozen, beside = adapters is not None, NO_ADAPTERS
    if is_frozen:
        beside = adapter_work(spec, adapters, tokens=tokens, rates=rates, element_bytes=element_bytes)
    products = _products(
        spec, tokens, rates, padded=compiled, element_bytes=element_bytes, is_frozen=is_frozen
    )
    forward, backward, aligned = (spec.num_layers * seconds for seconds in products)
    chunk = tokens
    if loss_kernel == "fused_linear":
        shape = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
        chunk = setup.config.loss_chunks.of_logits(tokens, **shape)
    head, ideal_head = (
        tokens
        / chunk
        * sum(
            _forward_and_backward(
                *(rates, is_frozen),
                rows=chunk,
                inputs=spec.hidden_size,
                outputs=width,
                padded=loss_kernel == "compiled",
                element_bytes=element_bytes,
            )
        )
        for width in (spec.vocab_size, next_aligned(spec.vocab_size))
    )
    misaligned = forward + backward + head - aligned - ideal_head
    forward += spec.num_layers * beside.forward_seconds
    backward += spec.num_layers * beside.backward_seconds
    attention_forward, attention_backward = (
        spec.num_layers * seconds for seconds in _attention(setup, rates, software)
    )
    traffic = layer_traffic(
        spec,
        compiled=compiled,
        fused_norm=config.norm_kernel == "fused",
        fused_mlp=config.mlp_kernel == "fused",
    )
    slowdown = software.compiled_slowdown if traffic.is_compiled else software.eager_slowdown
    slowdown *= _slowdown_of(compute, compiled)
    per_token = traffic.bytes_per_token + beside.bytes_per_token
    elementwise = spec.num_layers * slowdown * per_token * tokens / rates.memory_bytes
    logits = tokens * spec.vocab_size * LOGIT_BYTES[loss_kernel] / rates.loss_bytes(loss_kernel)
    num_cast = (setup.weights.total + setup.weights.trained) * (compute == AUTOCAST)
    casts = num_cast * _AUTOCAST_CAST_BYTES / rates.memory_bytes

    unpacking = spec.num_layers * beside.unpacking_seconds
    layer_forward = forward + attention_forward + elementwise / 3 + unpacking
    again = {
        "none": 0.0,
        "full": layer_forward,
        "selective_layer": layer_forward / 2,
        # all but attention, and every second product
        "selective_op": _SELECTIVE_RECOMPUTED * (forward + unpacking) + elementwise / 3,
    }[config.gradient_checkpointing]
    of_scores = _SCORE_KERNELS if config.attn_implementation == "eager" and not compiled else 0
    forward_kernels = spec.num_layers * (traffic.num_kernels + beside.num_kernels + of_scores)
    kernels = 3 * forward_kernels + _HEAD_KERNELS
    return Work(
        matmul=forward + backward + head,
        attention=attention_forward + attention_backward,
        memory_traffic=elementwise + logits + casts,
        dequantization=2 * unpacking,  # forward and backward
        recomputation=again,
        misaligned=misaligned,
        num_kernels=kernels + round(_LAYERS_AGAIN[config.gradient_checkpointing] * forward_kernels),
    )


def _slowdown_of(compute: str, compiled: bool) -> float:
    if compute == AUTOCAST:
        return _COMPILED_AUTOCAST_SLOWDOWN if compiled else _AUTOCAST_SLOWDOWN
    return 2.0 if compute == FP32 else 1.0


def _products(
    spec: ModelSpec, tokens: int, rates: Rates, *, padded: bool, element_bytes: int, is_frozen: bool
) -> tuple[float, float, float]:
    """Forward and backward seconds of one layer's matrix products, and both if all widths were aligned."""
    h, f = spec.hidden_size, spec.ffn_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    # GPT's query, key and value are one matrix, Llama's are three
    qkv = ((h, query, 1), (h, key, 2)) if spec.gated_ffn else ((h, query + 2 * key, 1),)
    shapes = (*qkv, (query, h, 1), (h, f, spec.num_ffn_matrices - 1), (f, h, 1))
    forward = backward = aligned = 0.0
    for inputs, outputs, count in shapes:
        size = {"rows": tokens, "element_bytes": element_bytes, "padded": padded}
        of_forward, of_backward = _forward_and_backward(
            rates, is_frozen, inputs=inputs, outputs=outputs, **size
        )
        ideal = {"inputs": next_aligned(inputs), "outputs": next_aligned(outputs)}
        forward += count * of_forward
        backward += count * of_backward
        aligned += count * sum(_forward_and_backward(rates, is_frozen, **ideal, **size))
    return forward, backward, aligned


def _forward_and_backward(
    rates: Rates,
    is_frozen: bool,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    padded: bool,
    element_bytes: int,
) -> tuple[float, float]:
    """A frozen matrix has no gradient, its input has."""
    seconds = product_seconds(
        *(rates,), rows=rows, inputs=inputs, outputs=outputs, padded=padded, element_bytes=element_bytes
    )
    return seconds.forward, seconds.input_gradient if is_frozen else seconds.backward


def _attention(setup: Setup, rates: Rates, software: Software) -> tuple[float, float]:
    """Forward and backward seconds of one layer's attention, projections not counted."""
    spec, config, tokens = setup.spec, setup.config, setup.num_tokens
    width = spec.num_heads * spec.head_dim
    if config.attn_implementation != "eager":
        flop = 2.0 * config.seq_len * tokens * width  # half of 4 S T width: causal
        shape = {"head_dim": spec.head_dim, "seq_len": config.seq_len}
        backward = rates.flash_seconds("backward", _FLASH_BACKWARD * flop, **shape)
        return rates.flash_seconds("forward", flop, **shape), backward
    scores = tokens * config.seq_len * spec.num_heads
    per_score = software.compiled_score_bytes if config.torch_compile else software.score_bytes
    moved = scores * per_score / rates.memory_bytes
    products = 4.0 * config.seq_len * tokens * width / rates.matmul_flops  # the whole square
    return moved + products, 2 * (moved + products)


def _fp32_rates(rates: Rates, gpu: Gpu) -> Rates:
    """Without tensor cores alignment matters little."""
    rate = gpu.fp32_flops_per_second * _FP32_SHARE
    return Rates(rate, 1.0, rate / 2, rates.memory_bytes, rates.num_sms)


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
    dtypes = dtypes_of(strategy, config)
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
