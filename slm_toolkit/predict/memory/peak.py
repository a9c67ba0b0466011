"""Peak memory of one training step on one rank: closed forms, no torch, some hundred microseconds each.

The first estimate of a model under ZeRO-1 or 2, whose gradients are followed one by one, takes 1-2 ms.

The step is a handful of instants - the loss, the head's and the final norm's backward, some of the first and
the last layer's backward, the embedding's, the optimizer's step - and the peak is the largest of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.activations import (
    AUTOCAST,
    BF16,
    FP32,
    LayerMemory,
    Moment,
    gradients_made,
    keeps_inputs,
    layers_of,
)
from slm_toolkit.predict.memory.adapters import Weights, adapters_of, weights_of
from slm_toolkit.predict.memory.coverage import unknown_to_estimates
from slm_toolkit.predict.memory.engine_bytes import (
    At,
    Copies,
    Dtypes,
    Step,
    dtypes_of,
    fsdp2,
    optimizer_temporary,
    replicated,
    zero_1_or_2,
    zero_3,
    zero_of,
)
from slm_toolkit.predict.memory.loss import loss_memory
from slm_toolkit.predict.memory.zero_gradients import Where
from slm_toolkit.strategy.strategy import Strategy

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
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    *,
    num_gpus: int,
    state_ranks: int | None = None,
    software: str = "2026",
) -> MemoryEstimate:
    """What `slm_toolkit.train` allocates at its peak on one of `num_gpus` ranks; CUDA's own is not counted.

    `config` has its defaults filled in. `state_ranks`: over which the training state counts as sharded, where
    the host holds part of it (default: all). Raises ValueError for sizes that can't be, and for flags that no
    closed form covers.
    """
    unknown = unknown_to_estimates(config)
    if config.peft != "none" and software != "2026":
        unknown.append(f"--software {software} with --peft {config.peft}: no closed form for it")
    if unknown:
        raise ValueError("\n".join(unknown))
    engine = strategy.engine
    dtypes = dtypes_asked(strategy, config)
    compute = compute_of(config.numerics, engine)
    num_tokens = config.per_device_train_batch_size * config.seq_len
    adapters = adapters_of(spec, config)
    weights = weights_of(spec, adapters)
    layers = layers_of(spec, strategy, config, adapters, compute, software)
    ranks = (num_gpus, state_ranks or num_gpus)
    step = _engine_step(spec, weights, strategy, config, engine, dtypes, compute, ranks)
    frozen = {"is_frozen": weights.is_frozen, "keeps_inputs": keeps_inputs(strategy)}
    loss = loss_memory(spec, config, compute, num_tokens, software, **frozen)
    made_at = gradients_made(spec, adapters)

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
    # What asks for the gradient of a frozen embedding's output keeps it, and that, until the loss is
    # forgotten, in the next micro-step's forward; a first layer that is checkpointed keeps it anyway.
    asks = weights.is_frozen and config.gradient_checkpointing != "none"
    if asks and config.gradient_checkpointing == "selective_layer":
        fixed += residual
    left = 2 * residual * (asks and config.gradient_accumulation_steps > 1)
    consider("forward: the loss", step.at_forward_loss, saved + fixed + left, loss.forward)
    if step.at_gather is not None:
        consider("forward: gathering the head", step.at_gather, saved + fixed + loss.final_norm, 0)
    consider("backward: the loss", step.at_loss, saved + fixed, loss.backward)
    if config.loss_kernel != "fused_linear":  # whose head has its gradient already, from forward
        consider("backward: lm_head", step.at_head, saved + fixed, loss.head)
    elif compute == AUTOCAST:  # but in bf16: the parameter's, in fp32, lies beside it
        consider("backward: lm_head", step.at_norm, saved + fixed, loss.head)
    consider("backward: norm", step.at_norm, saved + fixed + loss.norm, 0)
    last = spec.num_layers - 1
    for index in {last, max(0, last - 1), step.crowded_layer, min(1, last), 0}:
        below = sums[index] * num_tokens + residual + fixed
        for moment in layers[index].moments:
            at = step.at_layer(index, made_at(moment))
            held = below + moment.num_bytes * num_tokens
            consider(f"backward: layers.{index}.{moment.where}", at, held, 0)
            if weights.unpacked_bytes and moment.ffn_grads == 1:  # before the last of the three gradients
                at = replace(at, temporary=at.temporary + weights.unpacked_bytes)
                held -= 2 * spec.ffn_size * num_tokens
                consider(f"backward: layers.{index}, unpacking", at, held, 0)
        for arrival in layers[index].arrivals if step.at_arrival else ():
            at = step.at_arrival(index, arrival.place)
            if at is not None:
                held = below + arrival.when_made * num_tokens
                consider(f"backward: layers.{index}.{arrival.place}", at, held, 0)
    outside = {
        "lm_head": saved + fixed + loss.final_norm,
        "norm": saved + fixed + loss.final_norm,
        "embed_tokens": fixed,
        "end": 2 * residual * asks,
    }
    for where, at in step.at_reductions:
        if where.layer is None:
            consider(f"backward: {where.place}, reducing", at, outside.get(where.place, fixed), 0)
        else:
            held = _in_hook(layers[where.layer], where, made_at) + sums[where.layer]
            name = f"backward: layers.{where.layer}, reducing"
            consider(name, at, held * num_tokens + residual + fixed, 0)
    consider("backward: embed_tokens", step.at_embedding, (2 if asks else 1) * residual + fixed, 0)
    consider("optimizer step", step.at_optimizer, 2 * residual * asks, 0)

    instant, at, activations, logits = best
    state = step.state
    parts = {
        "parameters": state.parameters + weights.scales_bytes,
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


def _in_hook(layer: LayerMemory, where: Where, made_at: Callable[[Moment], float]) -> float:
    """Bytes per token that a layer holds in the hook of a gradient."""
    for arrival in layer.arrivals:
        if arrival.place == where.place:
            return arrival.in_hook
    later = [moment for moment in layer.moments if made_at(moment) >= where.num_elements]
    return later[0].num_bytes if later else 0.0


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


def _saved_below(layers: list[LayerMemory]) -> list[float]:
    """Bytes per token kept by the layers before each, and by all."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer.saved)
    return sums


def _shared(spec: ModelSpec, config: RunConfig, compute: str) -> float:
    """What all layers share: RoPE's sine and cosine, and with eager attention each sequence's mask.

    A layer's backward does not need the mask, only its recomputation does. With adapters the mask always
    counts: their traces are nearer to that.
    """
    e = 2 if compute == BF16 else 4
    rope = 2 * config.seq_len * spec.head_dim * e
    recomputes = config.gradient_checkpointing != "none" or config.peft != "none"
    if config.attn_implementation != "eager" or not recomputes:
        return rope
    return rope + config.per_device_train_batch_size * config.seq_len**2 * e


def _engine_step(
    spec: ModelSpec,
    weights: Weights,
    strategy: Strategy,
    config: RunConfig,
    engine: str,
    dtypes: Dtypes,
    compute: str,
    ranks: tuple[int, int],
) -> Step:
    """`ranks`: that take part, and that share the training state."""
    num_gpus, state_ranks = ranks
    accumulates = config.gradient_accumulation_steps > 1
    temporary = optimizer_temporary(
        spec,
        weights,
        dtypes,
        numerics=config.numerics,
        engine=engine,
        optim=config.optim,
        num_shards=1 if engine in ("single", "ddp") else state_ranks,
    )
    if engine in ("single", "ddp"):
        copies = Copies()
        if compute == AUTOCAST:
            checkpointing = config.gradient_checkpointing
            recomputed = tuple(
                number % 2 == 1 if checkpointing == "selective_layer" else checkpointing != "none"
                for number in range(spec.num_layers)
            )
            of_layer = spec.matmul_params_per_layer
            trained = weights.trained_layer if weights.is_frozen else of_layer
            copies = Copies(
                2 * (of_layer + trained * weights.is_frozen),
                2 * trained,
                2 * spec.embedding_params,
                recomputed,
                loss_is_outside=weights.is_frozen and config.loss_kernel == "fused_logits",
                head_waits=not (weights.is_frozen and config.loss_kernel == "fused_linear"),
            )
        return replicated(
            spec,
            weights,
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
            weights,
            dtypes,
            num_ranks=state_ranks,
            gathering_ranks=num_gpus,
            reshard_after_forward=strategy.reshard_after_forward is not False,
            accumulates=accumulates,
            optimizer_temporary=temporary,
        )
    zero = zero_of(strategy.deepspeed_config or {}, spec)
    shares = {"num_ranks": state_ranks, "optimizer_temporary": temporary}
    if zero.stage < 3:
        num_micro_steps = config.gradient_accumulation_steps
        shares |= {"num_gpus": num_gpus, "num_micro_steps": num_micro_steps}
        return zero_1_or_2(spec, weights, dtypes, zero, **shares)
    goes_back = not weights.is_frozen or config.gradient_checkpointing != "none"
    return zero_3(
        spec, weights, dtypes, zero, **shares, accumulates=accumulates, has_embedding_gradient=goes_back
    )
