"""Peak memory of one training step on one rank: closed forms, no torch, some hundred microseconds each.

The first estimate of a model under ZeRO-1 or 2, whose gradients are followed one by one, takes 1-2 ms.

The step is a handful of instants - the loss, the head's and the final norm's backward, some of the first and
the last layer's backward, the embedding's, the optimizer's step - and the peak is the largest of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from slm_toolkit.predict.memory.activations import (
    LayerMemory,
    Moment,
    gradients_made,
    layers_of,
)
from slm_toolkit.predict.memory.engine_bytes import (
    At,
    Copies,
    Step,
    fsdp2,
    optimizer_temporary,
    replicated,
    zero_1_or_2,
    zero_3,
)
from slm_toolkit.predict.memory.loss import loss_memory
from slm_toolkit.predict.memory.zero_gradients import Where
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, Setup, unknown_to_estimates

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


def peak(setup: Setup) -> MemoryEstimate:
    """What `slm_toolkit.train` allocates at its peak on one rank's GPU; CUDA's own memory is not counted.

    An offloaded optimizer takes gradients and master weights along; the parameters of ZeRO-3 may stay. hpZ
    adds the share of a second copy of the parameters in 16 bits. Raises ValueError for sizes that can't be,
    and for flags that no closed form covers.
    """
    spec, config, compute = setup.spec, setup.config, setup.compute
    unknown = unknown_to_estimates(config)
    if config.peft != "none" and setup.software != "2026":
        unknown.append(f"--software {setup.software} with --peft {config.peft}: no closed form for it")
    if unknown:
        raise ValueError("\n".join(unknown))
    num_tokens, weights = setup.num_tokens, setup.weights
    layers = layers_of(setup)
    step = _engine_step(setup)
    loss = loss_memory(setup)
    made_at = gradients_made(spec, setup.adapters)

    sums = _saved_below(layers)
    saved = sums[-1] * num_tokens
    fixed = num_tokens * BATCH_BYTES_PER_TOKEN + _shared(setup)
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
        "parameters": _parameters_here(setup, round(state.parameters + weights.scales_bytes)),
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


def _parameters_here(setup: Setup, num_bytes: int) -> int:
    """Bytes of parameters on the GPU, of `num_bytes` that would lie there without offload and hpZ."""
    placement, stored = setup.placement, setup.weights.total
    if placement.parameter_device != "none":
        num_bytes = 0
    elif placement.optimizer_device != "none" and setup.strategy.zero_stage == 3:
        num_bytes = stored * setup.dtypes.parameter // setup.shard_ranks
    if placement.secondary_ranks > 1:
        num_bytes += 2 * stored // placement.secondary_ranks
    return num_bytes


def _saved_below(layers: list[LayerMemory]) -> list[float]:
    """Bytes per token kept by the layers before each, and by all."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer.saved)
    return sums


def _shared(setup: Setup) -> float:
    """What all layers share: RoPE's sine and cosine, and with eager attention each sequence's mask.

    A layer's backward does not need the mask, only its recomputation does. With adapters the mask always
    counts: their traces are nearer to that.
    """
    config = setup.config
    e = 2 if setup.compute == BF16 else 4
    rope = 2 * config.seq_len * setup.spec.head_dim * e
    recomputes = config.gradient_checkpointing != "none" or config.peft != "none"
    if config.attn_implementation != "eager" or not recomputes:
        return rope
    return rope + config.per_device_train_batch_size * config.seq_len**2 * e


def _engine_step(setup: Setup) -> Step:
    """The bytes of parameters at each instant of a step, by the function of the setup's engine."""
    spec, strategy, config = setup.spec, setup.strategy, setup.config
    weights, dtypes = setup.weights, setup.dtypes
    accumulates = config.gradient_accumulation_steps > 1
    temporary = optimizer_temporary(setup)
    if strategy.is_replicated:
        return replicated(
            spec,
            weights,
            dtypes,
            has_buckets=not strategy.is_single,
            reduces_copies=config.reduce_dtype == "fp32" and dtypes.gradient == 2,
            accumulates=accumulates,
            copies=_autocast_copies(setup) if setup.compute == AUTOCAST else Copies(),
            optimizer_temporary=temporary,
        )
    if strategy.is_fsdp:
        return fsdp2(
            spec,
            weights,
            dtypes,
            num_ranks=setup.gpu_state_ranks,
            gathering_ranks=setup.shard_ranks,
            reshard_after_forward=setup.placement.reshard_after_forward,
            accumulates=accumulates,
            optimizer_temporary=temporary,
        )
    zero = strategy.deepspeed.zero_optimization.of_width(spec.hidden_size)
    shares = {"num_ranks": setup.gpu_state_ranks, "optimizer_temporary": temporary}
    if zero.stage < 3:
        num_micro_steps = config.gradient_accumulation_steps
        shares |= {"num_gpus": setup.shard_ranks, "num_micro_steps": num_micro_steps}
        return zero_1_or_2(spec, weights, dtypes, zero, **shares)
    goes_back = not weights.is_frozen or config.gradient_checkpointing != "none"
    return zero_3(
        spec, weights, dtypes, zero, **shares, accumulates=accumulates, has_embedding_gradient=goes_back
    )


def _autocast_copies(setup: Setup) -> Copies:
    spec, config, weights = setup.spec, setup.config, setup.weights
    checkpointing = config.gradient_checkpointing
    recomputed = tuple(
        number % 2 == 1 if checkpointing == "selective_layer" else checkpointing != "none"
        for number in range(spec.num_layers)
    )
    of_layer = spec.matmul_params_per_layer
    trained = weights.trained_layer if weights.is_frozen else of_layer
    return Copies(
        2 * (of_layer + trained * weights.is_frozen),
        2 * trained,
        2 * spec.embedding_params,
        recomputed,
        loss_is_outside=weights.is_frozen and config.loss_kernel == "fused_logits",
        head_waits=not (weights.is_frozen and config.loss_kernel == "fused_linear"),
    )
