"""Peak memory of one training step on one rank: closed forms, no torch, some hundred microseconds each.

The step is a handful of instants - the loss, the head's and the final norm's backward, some of the first and
the last layer's backward, the embedding's, the optimizer's step - and the peak is the largest of them.
"""

from dataclasses import dataclass

from slm_toolkit.config import RunConfig
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.activations import AUTOCAST, BF16, FP32, LayerMemory, layer_memory
from slm_toolkit.predict.engine_bytes import (
    At,
    Copies,
    Dtypes,
    Step,
    dtypes_of,
    fsdp2,
    replicated,
)
from slm_toolkit.predict.optimizer_bytes import optimizer_temporary
from slm_toolkit.predict.unknown import unknown_to_estimates
from slm_toolkit.predict.zero_bytes import zero_1_or_2, zero_3, zero_of
from slm_toolkit.strategy import Strategy

BATCH_BYTES_PER_TOKEN = 24
"token ids, shifted labels and positions, 8 bytes each"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that holds most, at the instant when it holds most."""

    parts: dict[str, int]
    "named as in `memory_timeline.PARTS`"
    peak_instant: str

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def estimate_memory(
    spec: ModelSpec, strategy: Strategy, config: RunConfig, *, num_gpus: int, software: str = "2026"
) -> MemoryEstimate:
    """What `slm_toolkit.train` allocates at its peak on one of `num_gpus` ranks; CUDA's own is not counted.

    `config` has its defaults filled in. Raises ValueError for sizes that can't be, and for flags that no
    closed form covers.
    """
    if unknown := unknown_to_estimates(config):
        raise ValueError("\n".join(unknown))
    engine = strategy.engine
    dtypes = dtypes_asked(strategy, config)
    compute = compute_of(config.numerics, engine)
    num_tokens = config.per_device_train_batch_size * config.seq_len
    layers = _layers(spec, config, compute, software)
    step = _engine_step(spec, strategy, config, engine, dtypes, compute, num_gpus)
    loss = _loss_memory(spec, config, compute, num_tokens, software)

    sums = _saved_below(layers)
    saved = sums[-1] * num_tokens
    fixed = num_tokens * BATCH_BYTES_PER_TOKEN + _shared(spec, config, compute)
    best_total, best = -1.0, None

    def consider(instant: str, at: At, activations: float, logits: float) -> None:
        nonlocal best_total, best
        total = at.gathered + at.gradients + at.communication + at.temporary + activations + logits
        if total > best_total:
            best_total, best = total, (instant, at, activations, logits)

    residual = layers[-1].residual * spec.hidden_size * num_tokens
    consider("forward: the loss", step.at_forward_loss, saved + fixed, loss.forward)
    if step.at_gather is not None:
        consider("forward: gathering the head", step.at_gather, saved + fixed + loss.final_norm, 0)
    consider("backward: the loss", step.at_loss, saved + fixed, loss.backward)
    if config.loss_kernel != "fused_linear":  # whose head has its gradient already, from forward
        consider("backward: lm_head", step.at_head, saved + fixed, loss.head)
    elif compute == AUTOCAST:  # but in bf16: the parameter's, in fp32, lies beside it
        consider("backward: lm_head", step.at_norm, saved + fixed, loss.head)
    consider("backward: norm", step.at_norm, saved + fixed + loss.norm, 0)
    matrices = (
        spec.hidden_size * spec.ffn_size,
        spec.hidden_size * spec.num_kv_heads * spec.head_dim,
        spec.hidden_size * spec.num_heads * spec.head_dim,
    )
    last = spec.num_layers - 1
    for index in {last, max(0, last - 1), step.crowded_layer, 0}:
        below = sums[index] * num_tokens + residual + fixed
        for moment in layers[index].moments:
            made = (
                moment.ffn_grads * matrices[0]
                + moment.kv_grads * matrices[1]
                + moment.query_grads * matrices[2]
            )
            at = step.at_layer(index, made)
            consider(f"backward: layers.{index}.{moment.where}", at, below + moment.num_bytes * num_tokens, 0)
        if step.at_layer_end is not None:
            consider(f"backward: layers.{index}, reducing", step.at_layer_end(index), below, 0)
    consider("backward: embed_tokens", step.at_embedding, residual + fixed, 0)
    consider("optimizer step", step.at_optimizer, 0, 0)

    instant, at, activations, logits = best
    state = step.state
    parts = {
        "parameters": state.parameters,
        "master_weights": state.master_weights,
        "gradients": state.gradients + at.gradients,
        "optimizer": state.optimizer,
        "activations": activations,
        "logits_and_loss": logits,
        "gathered_parameters": at.gathered,
        "communication": state.communication + at.communication,
        "temporary": at.temporary,
    }
    return MemoryEstimate({name: round(size) for name, size in parts.items()}, instant)


def dtypes_asked(strategy: Strategy, config: RunConfig) -> Dtypes:
    """What flags and the JSON together ask for. Raises ValueError for what has no closed form."""
    fp32_reduction = config.reduce_dtype == "fp32" or _accumulates_in_fp32(strategy)
    return dtypes_of(config.numerics, strategy.engine, fp32_reduction=fp32_reduction)


def _accumulates_in_fp32(strategy: Strategy) -> bool:
    """Whether a DeepSpeed JSON asks for fp32 gradients under bf16 weights. Raises ValueError for ZeRO-1."""
    data_types = (strategy.deepspeed_config or {}).get("data_types") or {}
    if data_types.get("grad_accum_dtype") not in ("fp32", "float32"):
        return False
    if strategy.zero_stage == 1:
        raise ValueError(
            f"{strategy.path}: grad_accum_dtype fp32 makes ZeRO-1 another optimizer: no closed form for it\n"
            "hint: rehearse it: --rehearse N"
        )
    return True


def compute_of(numerics: str, engine: str) -> str:
    """How matrix products and the residual stream run."""
    if numerics == "fp32":
        return FP32
    return AUTOCAST if numerics == "stock" and engine in ("single", "ddp") else BF16


def _layers(spec: ModelSpec, config: RunConfig, compute: str, software: str) -> list[LayerMemory]:
    def layer(checkpointing: str) -> LayerMemory:
        return layer_memory(
            spec,
            seq_len=config.seq_len,
            compute=compute,
            eager=config.attn_implementation == "eager",
            fused_norm=config.norm_kernel == "fused",
            fused_mlp=config.mlp_kernel == "fused",
            checkpointing=checkpointing,
            compiled=config.torch_compile,
            software=software,
        )

    if config.gradient_checkpointing == "selective_layer":
        pair = (layer("none"), layer("full"))  # the second, the fourth, ... are computed again
        return [pair[number % 2] for number in range(spec.num_layers)]
    return [layer(config.gradient_checkpointing)] * spec.num_layers


def _saved_below(layers: list[LayerMemory]) -> list[float]:
    """Bytes per token kept by the layers before each, and by all."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer.saved)
    return sums


def _shared(spec: ModelSpec, config: RunConfig, compute: str) -> float:
    """What all layers share: RoPE's sine and cosine, and with eager attention each sequence's mask."""
    e = 2 if compute == BF16 else 4
    rope = 2 * config.seq_len * spec.head_dim * e
    if config.attn_implementation != "eager":
        return rope
    return rope + config.per_device_train_batch_size * config.seq_len**2 * e


@dataclass(frozen=True)
class LossMemory:
    """Bytes from the final norm on, at the instants when they may be the peak; heads and losses differ."""

    final_norm: float
    forward: float
    backward: float
    head: float
    norm: float


def _loss_memory(
    spec: ModelSpec, config: RunConfig, compute: str, num_tokens: int, software: str
) -> LossMemory:
    """V: vocabulary. transformers' loss makes an fp32 copy of the logits, their log-softmax, its gradient.

    In 2024 the fp32 copy was what the model handed back, and so stayed alive in backward.
    """
    h, V, T = spec.hidden_size, spec.vocab_size, num_tokens
    e = 4 if compute == FP32 else 2
    fused_norm = config.norm_kernel == "fused"
    # kept by the final norm, the residual stream's gradient (as wide as the norm's input) included
    if compute == BF16:
        kept = (4 if fused_norm else 8) * h + 4
        norm_backward = 16 * h + 8 if fused_norm else 24 * h
    elif compute == AUTOCAST:
        kept = (6 if fused_norm else 10) * h + 4
        norm_backward = 20 * h + 8
    else:
        kept = (8 if fused_norm else 12) * h + 4
        norm_backward = 20 * h + 8
    apart = e == 2 and not config.torch_compile  # fp32 probabilities; compiled, they are not stored
    if config.loss_kernel == "fused_linear":
        chunk = chunk_rows(num_tokens=T, vocab_size=V, hidden_size=h)
        wide = min(chunk * V, max(1, FUSED_LOSS_CHUNK // V) * V)
        in_forward = kept * T + e * h * T + chunk * V * e + (wide * 4 if apart else 0) + V * h * e
        after = kept * T + e * h * T + V * h * e
        return LossMemory(kept * T, in_forward, after, after, norm_backward * T)
    if config.loss_kernel == "fused_logits":
        rows = min(T, max(1, FUSED_LOSS_CHUNK // V))
        in_forward = kept * T + e * V * T + (rows * V * 4 if apart else 0)
        if compute == AUTOCAST:  # accelerate hands the script an fp32 copy of the logits
            in_forward = kept * T + (e + 4) * V * T
        after = kept * T + e * V * T
        return LossMemory(kept * T, in_forward, after, after + e * h * T, norm_backward * T)
    in_forward = kept * T + (8 if compute == FP32 else 10) * V * T
    backward = kept * T + (16 if software == "2024" else 12) * V * T
    head = kept * T + e * V * T + e * h * T
    return LossMemory(kept * T, in_forward, backward, head, norm_backward * T)


FUSED_LOSS_CHUNK = 2**24
"elements of fp32 probabilities at a time in `run/loss_kernels.py`: a test compares the two"


def chunk_rows(*, num_tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Tokens whose logits the fused linear loss makes at once: see `run/loss_kernels.py`."""
    rows = -(-num_tokens // -(-vocab_size // hidden_size))
    at_least = max(1, FUSED_LOSS_CHUNK // 2 // vocab_size)
    return min(num_tokens, max(1 << (rows - 1).bit_length(), 1 << (at_least.bit_length() - 1)))


def _engine_step(
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    engine: str,
    dtypes: Dtypes,
    compute: str,
    num_gpus: int,
) -> Step:
    accumulates = config.gradient_accumulation_steps > 1
    temporary = optimizer_temporary(
        spec,
        dtypes,
        numerics=config.numerics,
        engine=engine,
        optim=config.optim,
        num_shards=1 if engine in ("single", "ddp") else num_gpus,
    )
    if engine in ("single", "ddp"):
        copies = Copies()
        if compute == AUTOCAST:
            checkpointing = config.gradient_checkpointing
            recomputed = tuple(
                number % 2 == 1 if checkpointing == "selective_layer" else checkpointing != "none"
                for number in range(spec.num_layers)
            )
            copies = Copies(2 * spec.matmul_params_per_layer, 2 * spec.embedding_params, recomputed)
        return replicated(
            spec,
            dtypes,
            has_buckets=engine == "ddp",
            reduces_copies=config.reduce_dtype == "fp32" and dtypes.gradient == 2,
            accumulates=accumulates,
            copies=copies,
            optimizer_temporary=temporary,
        )
    if engine in ("fsdp1", "fsdp2"):
        return fsdp2(
            spec,
            dtypes,
            num_ranks=num_gpus,
            reshard_after_forward=strategy.reshard_after_forward is not False,
            accumulates=accumulates,
            optimizer_temporary=temporary,
        )
    zero = zero_of(strategy.deepspeed_config or {}, spec)
    make = zero_3 if zero.stage == 3 else zero_1_or_2
    return make(
        spec, dtypes, zero, num_ranks=num_gpus, accumulates=accumulates, optimizer_temporary=temporary
    )
