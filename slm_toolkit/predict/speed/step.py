"""Seconds of one optimizer step, by part: a roofline over its operations, plus the exposed communication.

This is arithmetic only: a few tens of microseconds per configuration. Fitted constants are in `software.py`,
constants counted by hand are next to their use.

S: sequence length, h: hidden size, f: FFN width. Unless a comment differs, constants are for forward and
backward together, in bf16, for one layer of transformers' Llama in eager PyTorch. A kernel reads its inputs
and writes its outputs once: 2 bytes each in bf16, 4 if the code makes fp32 copies. The constants of adapters
were counted by hand from the code of peft 0.21 and bitsandbytes 0.50, never timed. For fp32 the caller
applies a slowdown.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from slm_toolkit.config.loss_chunks import tokens_of_chunk
from slm_toolkit.config.run_config import fits_float8
from slm_toolkit.hardware.calibration import NOT_CALIBRATED
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import Cluster
from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices
from slm_toolkit.predict.setup.adapters import NF4_BLOCK, Adapters, adapter_shapes, matrices_of
from slm_toolkit.predict.setup.setup import AUTOCAST, FP32, Setup
from slm_toolkit.predict.speed.attention import attention_seconds
from slm_toolkit.predict.speed.collectives import transfer_seconds
from slm_toolkit.predict.speed.matmul import Rates, product_seconds, rates_of
from slm_toolkit.predict.speed.offload import offload_seconds, offloaded_fraction
from slm_toolkit.predict.speed.software import Software
from slm_toolkit.predict.speed.traffic import Transfer


@dataclass(frozen=True)
class LayerTraffic:
    """The work of one layer's element-wise kernels."""

    bytes_per_token: float
    "forward and backward; a third of it in forward"
    num_kernels: int
    "in forward; backward launches twice as many"


# RMSNorm: to fp32 6, square 8, mean 4, scale 8, to bf16 6, weight 4 = 36 in forward, 54 in backward; two: 180
_TWO_EAGER_RMS_NORMS = 180
_TWO_FUSED_NORMS = 20  # each reads and writes 2 + 2 in forward, 2 + 2 + 2 in backward
_ROPE_AND_RESIDUAL = 188  # rotate, cos, sin, add on query and key: 132; transposed copies: 32; two adds: 24
_EAGER_SWIGLU = 28  # x f: silu 4, product 6; their backward 10 + 8
_COMPILED_LLAMA = (84, 16)  # x h, x f: counted by Inductor's scheduler (torch 2.13, 2026-11)
_GPT = (86, 12)  # x h, x f: two fused LayerNorms 20, two adds 24, copies 32, biases' gradients 10; GELU 12
_COMPILED_GPT = (66, 12)  # x h, x f: the same
_COMPILED_KERNELS = 12
_EAGER_LLAMA_KERNELS = 48  # two norms 6 each, projections 7, RoPE 12, copies 6, attention, SwiGLU 2, adds 2
_EAGER_GPT_KERNELS = (
    30  # two norms, projections 4 with biases, copies 8, attention, GELU, adds; casts of weights 8
)
_FUSED_NORM_SAVES = 10
_EAGER_NORM_KERNELS = 6


def layer_traffic(
    spec: ModelSpec,
    *,
    compiled: bool,
    fused_norm: bool,
) -> LayerTraffic:
    """Return the work of one decoder layer; compiling fuses its norms and its MLP in any case."""
    h, f = spec.hidden_size, spec.ffn_size
    if compiled:
        of_h, of_f = _COMPILED_LLAMA if spec.gated_ffn else _COMPILED_GPT
        return LayerTraffic(of_h * h + of_f * f, _COMPILED_KERNELS)
    if not spec.gated_ffn:
        return LayerTraffic(_GPT[0] * h + _GPT[1] * f, _EAGER_GPT_KERNELS)
    norms = _TWO_FUSED_NORMS if fused_norm else _TWO_EAGER_RMS_NORMS
    more_norms = 2 * (spec.norms == "both") + 2 * (spec.qk_norm != "none")
    kernels_of_norms = (1 if fused_norm else _EAGER_NORM_KERNELS) * more_norms
    return LayerTraffic(
        norms * _norm_width(spec) + _ROPE_AND_RESIDUAL * h + _EAGER_SWIGLU * f,
        _EAGER_LLAMA_KERNELS - _FUSED_NORM_SAVES * fused_norm + kernels_of_norms,
    )


def _norm_width(spec: ModelSpec) -> float:
    """Return the width of all norms of a layer, as a mean of two: hidden, and of queries and keys."""
    of_queries = (spec.num_heads + spec.num_kv_heads) * spec.head_dim * (spec.qk_norm != "none")
    return spec.hidden_size * (2 if spec.norms == "both" else 1) + of_queries / 2


LOGIT_BYTES = {
    "hf": 60,
    "fused": 26,
    "fused_kernel": 8,
    "fused_kernel_metrics": 36,
    "compiled": 8,
    "triton": 6,
}
"""bytes per logit that the loss moves, by what computes it.
hf: forward: fp32 copy 6, shifted copy 8, log-softmax 12; backward: picked logits 4, log-softmax 12, shift 12,
cast to bf16 6.
fused: PyTorch's operations on a chunk: maximum 2, difference into fp32 6, exponential 8, sum 4, gradient into
bf16 6.
fused_kernel: flash-attn's, bf16 read and written, twice.
fused_kernel_metrics: llm-foundry's, with the two metrics that it computes in each micro-step by default
(cross-entropy and perplexity; each casts to fp32, 6, and takes the log-softmax, 8).
compiled: by Inductor: bf16 read for the maximum, for the sum, and for the gradient, which replaces it.
triton: of Triton's loss: bf16 read for maximum and sum, and for the gradient.
An H100 takes for compiled and triton the time of these bytes at its copy rate (results/h100-80gb).
"""


# LoRA, per output of a matrix: scale 4, add 6; backward: scale 4. Per input: add two gradients 6.
_LORA_BYTES_OF_OUTPUTS, _LORA_BYTES_OF_INPUTS = 14, 6
_DROPOUT_BYTES = 10  # per input: read 2, write 2, mask 1, and the same in backward
_DEFENSIVE_CLONE_BYTES = 4  # per output, if the base has 4-bit weights
_LORA_KERNELS = 4  # in forward, per matrix: two products, scale, add
# Per weight: read 4 bits; for its block's scale: read 8 bits and write 32, read and write 32 to add the
# scales' mean, read 32; write bf16. The matrix product's own read of the bf16 weight is not counted here.
_UNPACKED_BYTES = 0.5 + (1 + 4 + 8 + 4) / NF4_BLOCK + 2
_UNPACKING_KERNELS = 3  # per matrix: unpack the scales, add their mean, unpack the weights


def adapter_traffic(spec: ModelSpec, adapters: Adapters, *, compiled: bool) -> LayerTraffic:
    """Return the work of one layer's adapters besides their products."""
    matrices = matrices_of(spec)
    of_outputs = _LORA_BYTES_OF_OUTPUTS - 4 * compiled + _DEFENSIVE_CLONE_BYTES * adapters.is_quantized
    of_inputs = _LORA_BYTES_OF_INPUTS + _DROPOUT_BYTES * adapters.drops
    sizes = [matrices[name] for name in adapters.targets]
    kernels = (_LORA_KERNELS + adapters.drops - compiled) * len(sizes)
    return LayerTraffic(
        sum(of_inputs * inputs + of_outputs * outputs for inputs, outputs in sizes),
        kernels + _UNPACKING_KERNELS * len(matrices) * adapters.is_quantized,
    )


_AUTOCAST_SLOWDOWN = 1.5  # x: element-wise kernels on an fp32 residual stream; hand count
_COMPILED_AUTOCAST_SLOWDOWN = 1.37  # x: counted by Inductor: 156 h instead of 114 h for GPT-2, f = 4 h
_AUTOCAST_CAST_BYTES = 6  # per parameter: cast a weight to bf16 for forward; the same for a gradient to fp32
_FP32_SHARE = 0.85  # fraction of the fp32 peak; unverified
_SELECTIVE_RECOMPUTED = 0.5
_LAYERS_AGAIN = {"none": 0.0, "full": 1.0, "selective_layer": 0.5, "selective_op": 1.0}
"fraction of forward's kernels that checkpointing launches again"
_FLOAT8_RATE = 2.0  # x: tensor cores' rate over bf16's, on Ada, Hopper and Blackwell (NVIDIA's datasheets)
# per element: a kernel that holds the row moves 3, for another maximum it takes two that move 5: half of each
_COMPILED_CAST_BYTES = 4
# absolute value 4, maximum 2, to fp32 6, scale 8, clamp 8, to float8 5
_EAGER_CAST_BYTES, _EAGER_CAST_KERNELS = 33, 6
_SCORE_KERNELS = 6  # eager attention's, besides the fused one's: two products, scale, mask, softmax
_HEAD_KERNELS = 40  # embedding, final norm, head and loss, forward and backward


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-step on the GPU."""

    parts: dict[str, float]
    "keyed by the first of PARTS; they add up to total"
    num_kernels: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def micro_step_work(setup: Setup, rates: Rates, software: Software, loss_kernel: str) -> Work:
    """Return the work of forward and backward in one micro-step; `loss_kernel` is a key of LOGIT_BYTES."""
    spec, config, adapters, L = setup.spec, setup.config, setup.adapters, setup.spec.num_layers
    tokens, compiled, mode = setup.num_tokens, config.compiles, config.gradient_checkpointing
    if setup.compute == FP32:
        rates = _fp32_rates(rates, setup.gpu)
    forward, backward, head = _products(setup, rates, loss_kernel)
    attention = [L * seconds for seconds in _attention(setup, rates, software)]
    traffic = layer_traffic(spec, compiled=compiled, fused_norm=config.fuses_norm)
    per_token, num_kernels = traffic.bytes_per_token, traffic.num_kernels
    unpacking = 0.0
    if adapters:
        of_adapters = adapter_traffic(spec, adapters, compiled=compiled)
        per_token += of_adapters.bytes_per_token
        num_kernels += of_adapters.num_kernels
        unpacking = L * spec.matmul_params_per_layer * _UNPACKED_BYTES * adapters.is_quantized
        unpacking /= rates.memory_bytes
    slowdown = software.compiled_slowdown if compiled else software.eager_slowdown
    moved = slowdown * _slowdown_of(setup.compute, compiled) * per_token * tokens
    if config.fp8 != "none":
        cast, cast_kernels = _float8_casts(spec, tokens, compiled)
        moved, num_kernels = moved + cast, num_kernels + cast_kernels
    if config.attn_implementation == "eager" and not compiled:
        num_kernels += _SCORE_KERNELS
    elementwise = L * moved / rates.memory_bytes
    arithmetic = loss_kernel
    if loss_kernel == "fused_linear":  # ours
        arithmetic = "triton" if config.uses_triton else "compiled" if compiled else "fused"
    logits = tokens * spec.vocab_size * LOGIT_BYTES[arithmetic] / rates.loss_bytes(arithmetic)
    num_cast = (setup.weights.total + setup.weights.trained) * (setup.compute == AUTOCAST)
    casts = num_cast * _AUTOCAST_CAST_BYTES / rates.memory_bytes
    again = _LAYERS_AGAIN[mode] * (forward + attention[0] + elementwise / 3 + unpacking)
    if mode == "selective_op":  # everything except attention and every second product
        again = _SELECTIVE_RECOMPUTED * (forward + unpacking) + elementwise / 3
    return Work(
        {
            "matmul": forward + backward + head,
            "attention": sum(attention),
            "memory_traffic": elementwise + logits + casts,
            "dequantization": 2 * unpacking,  # forward and backward
            "recomputation": again,
        },
        num_kernels=(3 + _LAYERS_AGAIN[mode]) * L * num_kernels + _HEAD_KERNELS,
    )


def _slowdown_of(compute: str, compiled: bool) -> float:
    if compute == AUTOCAST:
        return _COMPILED_AUTOCAST_SLOWDOWN if compiled else _AUTOCAST_SLOWDOWN
    return 2.0 if compute == FP32 else 1.0


def _products(setup: Setup, rates: Rates, loss_kernel: str) -> tuple[float, float, float]:
    """Return the seconds of all layers' matrix products in forward and in backward, and of the head's.

    LoRA's matrices are thin, so memory traffic dominates their time.
    """
    spec, adapters, compiled = setup.spec, setup.adapters, setup.config.compiles
    in_float8 = dataclasses.replace(rates, matmul_flops=_FLOAT8_RATE * rates.matmul_flops)

    def seconds(
        rates: Rates, size: tuple[int, int], *, rows: int, padded: bool, is_frozen: bool
    ) -> tuple[float, float]:
        found = product_seconds(rates, rows=rows, inputs=size[0], outputs=size[1], padded=padded)
        return found.forward, found.input_gradient if is_frozen else found.backward

    given = {"rows": setup.num_tokens, "padded": compiled, "is_frozen": adapters is not None}
    of_layer = [
        seconds(in_float8 if setup.config.fp8 != "none" and fits_float8(*size) else rates, size, **given)
        for size in _shapes(spec)
    ]
    if adapters:
        given |= {"padded": False, "is_frozen": False}
        shapes = itertools.chain.from_iterable(adapter_shapes(spec, adapters).values())
        of_layer += [seconds(rates, (inputs, outputs), **given) for outputs, inputs in shapes]
    chunk = setup.num_tokens
    if loss_kernel == "fused_linear":
        chunk = tokens_of_chunk(chunk, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
    given = {"rows": chunk, "padded": loss_kernel == "compiled", "is_frozen": adapters is not None}
    head = sum(seconds(rates, (spec.hidden_size, spec.vocab_size), **given)) * setup.num_tokens / chunk
    forward, backward = (spec.num_layers * sum(of_pass) for of_pass in zip(*of_layer, strict=True))
    return forward, backward, head


def _float8_casts(spec: ModelSpec, tokens: int, compiled: bool) -> tuple[float, int]:
    """Return the bytes that one layer's casts to float8 move, and forward's kernels for them.

    From the code of torchao 0.18, never timed. Forward casts input and weight. Backward casts the output's
    gradient twice, the input again and the weight again: products need two layouts.
    """
    each = _COMPILED_CAST_BYTES if compiled else _EAGER_CAST_BYTES
    shapes = [shape for shape in _shapes(spec) if fits_float8(*shape)]
    elements = sum(2 * (tokens * sum(shape) + math.prod(shape)) for shape in shapes)
    return each * elements, 2 * len(shapes) * (1 if compiled else _EAGER_CAST_KERNELS)


def _shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return inputs and outputs of one layer's matrices."""
    shapes = list(hidden_matrices(spec).values())
    if not spec.gated_ffn:  # query, key and value are one matrix in a GPT
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        shapes[:3] = [(spec.hidden_size, width)]
    return shapes


def _attention(setup: Setup, rates: Rates, software: Software) -> tuple[float, float]:
    """Return forward and backward seconds of one layer's attention, without the projections."""
    spec, config, tokens = setup.spec, setup.config, setup.num_tokens
    width = spec.num_heads * spec.head_dim
    if config.attn_implementation != "eager":
        fp32_flops = rates.matmul_flops if setup.compute == FP32 else None
        return attention_seconds(spec, config, setup.gpu, software, tokens=tokens, fp32_flops=fp32_flops)
    scores = tokens * config.seq_len * spec.num_heads
    per_score = software.compiled_score_bytes if config.compiles else software.score_bytes
    moved = scores * per_score / rates.memory_bytes
    products = 4.0 * config.seq_len * tokens * width / rates.matmul_flops  # the whole square
    return moved + products, 2 * (moved + products)


def _fp32_rates(rates: Rates, gpu: Gpu) -> Rates:
    """Return the rates of fp32. Alignment is ignored: it matters little without tensor cores."""
    rate = gpu.fp32_flops_per_second * _FP32_SHARE
    return dataclasses.replace(
        rates, matmul_flops=rate, misaligned=1.0, element_bytes=4, calibration=NOT_CALIBRATED
    )


PARTS = (
    *("matmul", "attention", "memory_traffic", "dequantization", "recomputation", "optimizer", "offload"),
    *("communication", "launch_overhead", "fixed"),
)
"""parts of a step's seconds, in the order of reports: matrix products; attention; element-wise kernels, loss,
accumulation and copies around collectives; unpacking of 4-bit weights; recomputation of checkpointed layers;
the optimizer; offload; exposed communication, with the wait for the slowest rank; waiting for the host to
launch kernels; host time between two steps"""

# x: time of norm, casts, clipping and copies over that of as many bytes of AdamW's kernel, on an H100
OPTIMIZER_SLOWDOWN = 1.5
_UNFUSED_ADAM = 2.8  # x: time of foreach AdamW over fused AdamW, on an H100 (results/h100-80gb)
# per module: host time of ZeRO-3's four hooks, which gather and free its parameters, in kernel launches:
# 0.40 ms of 14 us, timed on a core of an AMD EPYC (deepspeed 0.19.8, 2026-11-25)
_ZERO_3_KERNELS = 28
_PLAIN_MODULES = (
    6  # modules of a layer besides its linear ones: itself, attention, MLP, activation, two norms
)


@dataclass(frozen=True)
class StepTime:
    """The time of one rank's optimizer step."""

    parts_seconds: dict[str, float]
    "keyed by PARTS; they add up to step_seconds"
    tokens: int
    "in one step, all ranks together"
    "communication that overlaps with compute and adds no time"
    overlappable_seconds: float
    "compute that can hide communication"

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
) -> StepTime | None:
    """Return the time of one step on the setup's GPU; None if the network between nodes is unknown.

    `transfers` is the communication of a rank in the step. `loss_kernel` is a key of LOGIT_BYTES, for a
    kernel that the trainer does not have.
    """
    strategy, config = setup.strategy, setup.config
    rates, micro_steps = rates_of(setup.gpu, software), config.gradient_accumulation_steps
    work = micro_step_work(
        setup, rates, software, loss_kernel or ("fused_linear" if config.fuses_loss else "hf")
    )
    num_kernels = work.num_kernels + (_hook_kernels(setup) if strategy.is_zero_3 else 0)
    launch = max(0.0, num_kernels * software.kernel_seconds - work.total)
    busy = work.total + launch
    forward = (busy - work.parts["recomputation"]) / 3  # backward computes twice as much, and again
    exposed = _communication(
        transfers,
        setup.cluster,
        seconds_per_byte=software.contention / rates.memory_bytes,
        pass_seconds={"forward": forward, "backward": busy - forward},
        micro_steps=micro_steps,
    )
    if exposed is None:
        return None
    exposed += software.jitter * math.sqrt(2 * math.log(setup.num_gpus)) * micro_steps * busy
    offload = 0.0
    if strategy.offloads:
        offload = offload_seconds(
            setup,
            optimizer_bytes_per_parameter=optimizer_bytes(setup, on_host=True),
            compute_seconds=micro_steps * busy,
        )
    parts = {name: micro_steps * seconds for name, seconds in work.parts.items()}
    parts["memory_traffic"] += (micro_steps - 1) * accumulation_seconds(setup, rates)
    parts["memory_traffic"] += _staged_bytes(setup, transfers) / rates.memory_bytes
    return StepTime(
        parts_seconds={
            **parts,
            "optimizer": _optimizer_seconds(setup, rates),
            "offload": offload,
            "communication": exposed,
            "launch_overhead": micro_steps * launch,
            "fixed": software.step_seconds,
        },
        tokens=setup.num_gpus * micro_steps * setup.num_tokens,
        overlappable_seconds=micro_steps * busy,
    )


def _communication(
    transfers: tuple[Transfer, ...],
    cluster: Cluster,
    *,
    seconds_per_byte: float,
    pass_seconds: dict[str, float],
    micro_steps: int,
) -> float | None:
    """Return the exposed seconds of a step's communication.

    `pass_seconds` is the compute of forward and backward in one micro-step: gather_forward hides behind
    forward, everything else behind backward. Overlapped communication slows the compute down by
    `seconds_per_byte`. The time that exceeds the compute is exposed whole, and so are the first gather and
    the last reduction. Transfers sent once hide behind the last micro-step.
    """
    exposed = 0.0
    room = {name: micro_steps * seconds for name, seconds in pass_seconds.items()}
    for transfer in sorted(transfers, key=lambda transfer: not transfer.in_last_micro_step):
        seconds = transfer_seconds(transfer, cluster)
        if seconds is None:
            return None
        if not transfer.overlaps:
            exposed += seconds
            continue
        name = "forward" if transfer.name == "gather_forward" else "backward"
        rounds = 1 if transfer.in_last_micro_step else micro_steps
        alone = 0.0 if transfer.name == "gather_backward" else seconds * min(1.0, rounds / transfer.num_calls)
        hidden = min(seconds - alone, room[name], rounds * pass_seconds[name])
        room[name] -= hidden
        slowed = min(seconds, transfer.sent_bytes * seconds_per_byte)
        exposed += seconds - hidden + slowed * hidden / seconds
    return exposed


def _optimizer_seconds(setup: Setup, rates: Rates) -> float:
    """Return the seconds of the optimizer's step on the GPU."""
    shards = setup.shard_ranks if setup.strategy.sharded_parts else 1
    by_muon = setup.num_hidden if setup.config.optim == "muon" else 0
    num_bytes = optimizer_bytes(setup, slowdown=OPTIMIZER_SLOWDOWN) * (setup.weights.trained - by_muon)
    num_bytes *= 1 - offloaded_fraction(setup)
    multiplying = 0.0
    if by_muon:
        num_bytes += optimizer_bytes(setup, slowdown=OPTIMIZER_SLOWDOWN, by_muon=True) * by_muon
        multiplying = _orthogonalizing_seconds(setup, rates)
    return num_bytes / shards / rates.optimizer_bytes + multiplying


def optimizer_bytes(
    setup: Setup,
    *,
    slowdown: float = 1.0,
    on_host: bool = False,
    by_muon: bool = False,
) -> float:
    """Return the bytes per parameter that an optimizer step moves: with `aligned` 2 + 6 + 8 + 28 + 6 = 50.

    `slowdown` is a factor on all of them but those of AdamW's kernel. `on_host`: of an optimizer that is
    offloaded; DeepSpeed still takes the norm on the GPU. `by_muon`: of a hidden matrix, without its products.
    The owner of the master weights rounds them to bf16: `run/engine/optimizer.py`, or DeepSpeed.
    """
    strategy, config, dtypes = setup.strategy, setup.config, setup.dtypes
    gradient, updated = dtypes.kept_gradient, dtypes.master or dtypes.parameter
    norm = gradient
    if strategy.is_deepspeed and not on_host:  # in fp64; ZeRO-1 and -2 look for infinities, too, and join all
        norm += 8 + 8 + (0 if strategy.is_zero_3 else 2 * gradient + 2 * gradient)
    if config.has_triton_adamw(strategy):  # run/kernels/adamw_kernel.py: 2 + 28 = 30
        return norm + gradient + 2 * (updated + dtypes.moments) + (dtypes.parameter if dtypes.master else 0)
    cast = gradient + updated if gradient != updated else 0
    clip = 2 * updated if config.max_grad_norm or config.numerics == "stock" else 0  # stock multiplies by 1
    adamw = 7 * updated  # gradient read; master and moments read and written
    adamw *= 1.0 if config.optim == "adamw_torch_fused" else _UNFUSED_ADAM
    copy_back = updated + dtypes.parameter if dtypes.master else 0
    if by_muon:  # momentum and Nesterov's update 3 each, its cast, weight decay 2, the update's addition 2
        muon = 11 * updated + 2 * dtypes.compute
        return slowdown * (norm + cast + clip + muon + copy_back)
    return slowdown * (norm + cast + clip + copy_back) + adamw


def _orthogonalizing_seconds(setup: Setup, rates: Rates) -> float:
    """Return the seconds of Newton-Schulz's products in a step; each rank computes some of the matrices.

    Five times: the product of a matrix and its transpose, a polynomial of it, and that times the matrix.
    """
    if setup.compute == FP32:
        rates = _fp32_rates(rates, setup.gpu)
    shapes = [sorted(shape) for shape in hidden_matrices(setup.spec).values()]
    of_layer = sum(
        5 * product_seconds(rates, rows=small, inputs=inputs, outputs=outputs, padded=False).forward
        for small, large in shapes
        for inputs, outputs in ((large, small), (small, small), (small, large))
    )
    num_matrices = setup.spec.num_layers * len(shapes)
    num_ranks = setup.shard_ranks if setup.strategy.sharded_parts else setup.num_gpus
    return of_layer / len(shapes) * math.ceil(num_matrices / num_ranks)


def _staged_bytes(setup: Setup, transfers: tuple[Transfer, ...]) -> float:
    """Return the bytes that a step's copies around collectives read and write in the compute stream.

    Copies in other streams are part of `contention`: all of ZeRO-3's. Left out: FSDP2's copy of the own
    shard, and ZeRO++'s conversions.
    Source: torch 2.13 (_fsdp_collectives.py), deepspeed 0.19.8 (stage_1_and_2.py, stage3.py).
    """
    strategy, trained, moved = setup.strategy, setup.weights.trained, 0.0
    micro_steps = setup.config.gradient_accumulation_steps
    for transfer in transfers:
        if transfer.name == "reduce_gradients":
            times = 1 if transfer.in_last_micro_step else micro_steps
            moved += times * _reduction_bytes(setup, transfer) * trained
        elif strategy.is_fsdp and transfer.name in ("gather_forward", "gather_backward"):
            moved += 2 * transfer.num_bytes  # FSDP2 copies each layer out of the buffer
    return moved


def _reduction_bytes(setup: Setup, transfer: Transfer) -> float:
    """Return the bytes that copies, casts and divisions around a reduction move, per trained parameter."""
    strategy, gradient, reduced = setup.strategy, setup.dtypes.gradient, setup.dtypes.reduced
    copy, divide = 2 * gradient, 2 * reduced
    cast = gradient + reduced if gradient != reduced else 0
    if strategy.is_replicated:  # into DDP's bucket and back
        return 2 * copy
    if strategy.is_fsdp:  # into the buffer, in its dtype; NCCL divides
        return gradient + reduced
    if transfer.overlaps:
        return 0 if strategy.is_zero_3 else copy
    return copy + cast + divide


def _hook_kernels(setup: Setup) -> float:
    """Return the host time of ZeRO-3's hooks in a micro-step, in kernel launches.

    It does not depend on the number of tokens: a micro-step can't be shorter. DeepSpeed has hooks on every
    module. Recomputation runs forward's hooks again: two of the four.
    """
    spec, again = setup.spec, _LAYERS_AGAIN[setup.config.gradient_checkpointing]
    modules = spec.num_layers * (_PLAIN_MODULES + 4 + spec.num_ffn_matrices)
    return modules * _ZERO_3_KERNELS * (1 + again / 2)


def accumulation_seconds(setup: Setup, rates: Rates) -> float:
    """Return the seconds of adding a micro-step's gradients: read the old and the new ones, write the sum.

    An engine that shards gradients and reduces them in each micro-step adds only its shard.
    """
    strategy = setup.strategy
    element_bytes = 2 if setup.compute not in (AUTOCAST, FP32) else 4
    sum_bytes = 4 if setup.reduces_in_fp32 else element_bytes
    is_sharded = strategy.is_deepspeed and "gradients" in strategy.sharded_parts
    num_shards = setup.shard_ranks if is_sharded else 1
    return (element_bytes + 2 * sum_bytes) * setup.weights.trained / num_shards / rates.memory_bytes


BOTTLENECKS = (
    *("matmul", "attention", "memory_traffic", "dequantization", "communication", "optimizer", "offload"),
    "launch_overhead",
)


def bottleneck_of(time: StepTime) -> str:
    """Return the largest part among BOTTLENECKS, which don't include recomputation."""
    return max(BOTTLENECKS, key=lambda name: time.parts_seconds[name])
