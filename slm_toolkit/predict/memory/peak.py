"""Peak memory of one training step on one rank, by closed forms without torch.

The peak is the largest of a few instants: the loss, the backward of the head and the final norm, some moments
in the backward of the first and the last layers, the embedding's backward, and the optimizer's step.

An estimate takes a few hundred microseconds.
"""

from dataclasses import dataclass, replace

from slm_toolkit.predict.memory.activations import (
    LayerMemory,
    gradients_made,
    layers_of,
)
from slm_toolkit.predict.memory.engine_bytes import (
    At,
    Copies,
    Step,
    fsdp1,
    fsdp2,
    optimizer_temporary,
    replicated,
    zero_1_in_fp32,
    zero_3,
)
from slm_toolkit.predict.memory.loss import loss_memory
from slm_toolkit.predict.memory.zero_gradients import zero_1_or_2
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, Setup, unknown_to_estimates
from slm_toolkit.record.memory_timeline import PARTS

_CHANGING = (
    *("activations", "logits_and_loss", "gathered_parameters", "gradients", "communication", "temporary"),
)
"parts whose bytes change during a step"
BATCH_BYTES_PER_TOKEN = 24
"token ids, shifted labels and positions, 8 bytes each"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak, on the rank that needs the most memory."""

    parts: dict[str, int]
    "bytes at the peak by part, for each of `memory_timeline.PARTS`"
    peak_instant: str
    largest: dict[str, int]
    "each part's bytes at the instant at which that part is largest, and the loss's blocks of both sizes"

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def peak(setup: Setup) -> MemoryEstimate:
    """Return the peak bytes that `slm_toolkit.train` allocates on one rank's GPU, without CUDA's own memory.

    Offloading the optimizer also offloads gradients and master weights; ZeRO-3's parameters may stay on the
    GPU. hpZ adds a shard of a second, 16-bit copy of the parameters. Raise ValueError for flags without a
    closed form.
    """
    spec, config, compute = setup.spec, setup.config, setup.compute
    unknown = unknown_to_estimates(config, spec=spec)
    if setup.strategy.is_fsdp1 and config.peft != "none":
        unknown.append(
            f"{setup.strategy.path or setup.strategy.name}: no closed form for adapters under FSDP1\n"
            "hint: write `fsdp_version: 2` under fsdp_config"
        )
    if unknown:
        raise ValueError("\n".join(unknown))
    num_tokens, weights = setup.num_tokens, setup.weights
    layers = layers_of(setup)
    step = _engine_step(setup)
    loss = loss_memory(setup)
    made_at = gradients_made(spec, setup.adapters)

    sums = _saved_below(layers)
    saved = sums[-1] * num_tokens
    alive = setup.own_loss.alive * spec.vocab_size * num_tokens if setup.own_loss else 0
    fixed = num_tokens * BATCH_BYTES_PER_TOKEN + _shared(setup)
    best_total, best_instant, best = -1.0, "", (0.0,) * len(_CHANGING)
    largest = best

    def consider(instant: str, at: At, activations: float, logits: float) -> None:
        nonlocal best_total, best_instant, best, largest
        sizes = (activations, logits + alive, at.gathered, at.gradients, at.communication, at.temporary)
        largest = tuple(map(max, largest, sizes))
        if sum(sizes) > best_total:
            best_total, best_instant, best = sum(sizes), instant, sizes

    residual = layers[-1].residual * spec.hidden_size * num_tokens
    # A checkpointed first layer requires a gradient of the embedding's output. The output and its gradient
    # stay allocated until the loss is freed, which is in the next micro-step's forward.
    of_input = 2 * residual * (weights.is_frozen and setup.has_input_gradient)
    left_over = of_input * (config.gradient_accumulation_steps > 1)
    consider("forward: the loss", step.at_forward_loss, saved + fixed + left_over, loss.forward)
    if step.at_last_layer is not None:
        consider("forward: the last layer", step.at_last_layer, saved + _not_saved(setup) + fixed, 0)
    if step.at_gather is not None:
        consider("forward: gathering the head", step.at_gather, saved + fixed + loss.final_norm, 0)
    consider("backward: the loss", step.at_loss, saved + fixed, loss.backward)
    if not config.fuses_loss:  # the fused loss computes the head's gradient in forward
        consider("backward: lm_head", step.at_head, saved + fixed, loss.head)
    elif compute == AUTOCAST:  # that gradient is bf16: the parameter's fp32 gradient comes on top
        consider("backward: lm_head", step.at_norm, saved + fixed, loss.head)
    consider("backward: norm", step.at_norm, saved + fixed + loss.norm, 0)
    last = spec.num_layers - 1
    for index in {last, max(0, last - 1), step.crowded_layer, min(1, last), 0}:
        below = sums[index] * num_tokens + residual + fixed
        for moment in layers[index].moments:
            at = step.at_layer(index, made_at[moment.stage])
            if not moment.makes_gradient:
                at = replace(at, temporary=0)
            activations = below + moment.num_bytes * num_tokens
            consider(f"backward: layers.{index}.{moment.where}", at, activations, 0)
            if weights.unpacked_bytes and moment.stage == 1:  # before the last of the three gradients
                at = replace(at, temporary=at.temporary + weights.unpacked_bytes)
                activations -= 2 * spec.ffn_size * num_tokens
                consider(f"backward: layers.{index}, unpacking", at, activations, 0)
    outside = {
        "lm_head": saved + fixed + loss.final_norm,
        "norm": saved + fixed + loss.final_norm,
        "embed_tokens": fixed,
        "end": of_input,
    }
    for found in step.at_reductions:
        if found.layer is None:
            consider(f"backward: {found.place}, reducing", found.at, outside[found.place], 0)
            continue
        moments = layers[found.layer].moments
        later = [m.num_bytes for m in moments if m.makes_gradient and made_at[m.stage] >= found.made]
        activations = (sums[found.layer] + (later[0] if later else 0)) * num_tokens + residual + fixed
        consider(f"backward: layers.{found.layer}, reducing", found.at, activations, 0)
    consider("backward: embed_tokens", step.at_embedding, max(residual, of_input) + fixed, 0)
    consider("optimizer step", step.at_optimizer, of_input, 0)

    state = step.state
    always = {
        "parameters": _parameters_here(setup, round(state.parameters + weights.scales_bytes)),
        "master_weights": state.master_weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "communication": state.communication,
    }

    def parts_with(sizes: tuple[float, ...]) -> dict[str, int]:
        changing = dict(zip(_CHANGING, sizes, strict=True))
        return {part: round(always.get(part, 0) + changing.get(part, 0)) for part in PARTS}

    of_loss = max(largest[1], loss.backward + loss.freed_logits)
    return MemoryEstimate(parts_with(best), best_instant, parts_with((largest[0], of_loss, *largest[2:])))


def _parameters_here(setup: Setup, num_bytes: int) -> int:
    """Return the bytes of parameters on the GPU; without offload and hpZ these would be `num_bytes`."""
    placement, stored = setup.placement, setup.weights.total
    if placement.parameter_device != "none":
        num_bytes = 0
    elif placement.optimizer_device != "none" and setup.strategy.zero_stage == 3:
        num_bytes = stored * setup.dtypes.parameter // setup.shard_ranks
    if placement.secondary_ranks > 1:
        num_bytes += 2 * stored // placement.secondary_ranks
    return num_bytes


def _not_saved(setup: Setup) -> float:
    """Return the bytes that forward needs in a last layer that is checkpointed, so saves nothing.

    In the FFN these are the residual stream, the FFN's input, and three tensors of the FFN's width: the
    activation of the gate, up, and their product. LoRA needs four: the activation, up, and the adapter's
    output twice.
    """
    if not setup.recomputed[-1]:
        return 0
    adapters, spec = setup.adapters, setup.spec
    is_adapted = adapters is not None and {"up_proj", "gate_up_proj"} & {*adapters.targets}
    widths = 2 * spec.hidden_size + (4 if is_adapted else 3) * spec.ffn_size
    return widths * (2 if setup.compute == BF16 else 4) * setup.num_tokens


def _saved_below(layers: list[LayerMemory]) -> list[float]:
    """Return the bytes per token saved by the layers below each layer, and by all layers (the last item)."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer.saved)
    return sums


def _shared(setup: Setup) -> float:
    """Return the bytes that all layers share: RoPE's sine and cosine, and attention's masks.

    Only recomputation needs the masks, backward does not. With adapters they always count, because this fits
    their traces better. SDPA gets a mask, of one byte per element, only for sliding windows. If some layers
    have a window and others not, eager attention has two masks.
    """
    config = setup.config
    e = 2 if setup.compute == BF16 else 4
    rope = 2 * config.seq_len * setup.spec.head_dim * e
    recomputes = config.gradient_checkpointing != "none" or config.peft != "none"
    if not recomputes:
        return rope
    window, of_mask = setup.spec.sliding_window, config.per_device_train_batch_size * config.seq_len**2
    if config.attn_implementation != "eager":
        return rope + of_mask * (window is not None and window < config.seq_len)
    num_masks = 2 if 0 < setup.spec.num_window_layers < setup.spec.num_layers else 1
    return rope + num_masks * of_mask * e


def _engine_step(setup: Setup) -> Step:
    """Return the step of the setup's engine."""
    spec, strategy, config = setup.spec, setup.strategy, setup.config
    weights, dtypes = setup.weights, setup.dtypes
    accumulates = config.gradient_accumulation_steps > 1
    temporary = optimizer_temporary(setup)
    if strategy.is_replicated:
        return replicated(
            spec,
            weights,
            dtypes,
            # accelerate starts a single rank without DDP
            has_buckets=not strategy.is_single and setup.num_gpus > 1,
            accumulates=accumulates,
            keeps_gradients=setup.keeps_gradients,
            copies=_autocast_copies(setup) if setup.compute == AUTOCAST else Copies(),
            optimizer_temporary=temporary,
        )
    if setup.has_fsdp1:
        return fsdp1(
            spec,
            weights,
            dtypes,
            num_ranks=setup.gpu_state_ranks,
            reshard_after_forward=setup.placement.reshard_after_forward,
            prefetches=not strategy.is_fsdp1 or strategy.fsdp.backward_prefetch == "BACKWARD_PRE",
            wraps_layers=strategy.fsdp.auto_wrap_policy != "NO_WRAP",
            accumulates=accumulates,
            optimizer_temporary=temporary,
            copies=_autocast_copies(setup) if setup.compute == AUTOCAST else Copies(),
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
            keeps_gradients=setup.keeps_gradients,
            root_holds_vocabulary=setup.like is not None and setup.like.root_holds_vocabulary,
            copies=_autocast_copies(setup) if setup.compute == AUTOCAST else Copies(),
        )
    zero = strategy.deepspeed.zero_optimization.of_width(spec.hidden_size)
    shares = {"num_ranks": setup.gpu_state_ranks, "optimizer_temporary": temporary}
    num_hidden = setup.num_hidden if config.optim == "muon" else 0
    if zero.stage == 1 and dtypes.kept_gradient > dtypes.gradient:
        has_buckets = setup.like is not None and setup.like.zero_1_has_buckets
        return zero_1_in_fp32(
            spec, weights, dtypes, **shares, accumulates=accumulates, has_buckets=has_buckets
        )
    if zero.stage < 3:
        num_micro_steps = config.gradient_accumulation_steps
        shares |= {"num_gpus": setup.shard_ranks, "num_micro_steps": num_micro_steps}
        shares |= {"num_hidden": num_hidden}
        return zero_1_or_2(spec, weights, dtypes, zero, **shares)
    shares |= {"needs_embedding": not weights.is_frozen or setup.has_input_gradient}
    return zero_3(spec, weights, dtypes, zero, **shares, num_hidden=num_hidden)


def _autocast_copies(setup: Setup) -> Copies:
    spec, config, weights = setup.spec, setup.config, setup.weights
    of_layer = spec.matmul_params_per_layer
    trained = weights.trained_layer if weights.is_frozen else of_layer
    return Copies(
        2 * (of_layer + trained * weights.is_frozen),
        2 * trained,
        2 * spec.embedding_params,
        setup.recomputed,
        head_waits=not (weights.is_frozen and config.fuses_loss),
    )
