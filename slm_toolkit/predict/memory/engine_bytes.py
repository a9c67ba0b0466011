"""Bytes that belong to parameters, on one rank, at each instant of a step: what the engine makes of them.

One function per engine, each read off the allocation traces of the real one (`slm_toolkit.train --rehearse`;
torch 2.13, accelerate 1.15, deepspeed 0.19.8), on the rank that holds the first parameters.

P: parameters, p: those of a decoder layer, E: those of a vocabulary matrix, G, g and D: those of them that
have gradients, N: ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.zero_gradients import Backward, Held, Reduction, Where, backward_of
from slm_toolkit.predict.setup.adapters import Weights, sharded_adapters
from slm_toolkit.predict.setup.setup import Dtypes, Setup
from slm_toolkit.strategy.settings import ZeroSettings


@dataclass(frozen=True)
class State:
    """What a rank holds all the time."""

    parameters: float
    master_weights: float
    optimizer: float
    communication: float = 0.0
    gradients: float = 0.0


@dataclass(frozen=True)
class At:
    """Bytes that an instant adds to the state."""

    gathered: float = 0.0
    gradients: float = 0.0
    communication: float = 0.0
    temporary: float = 0.0


@dataclass(frozen=True)
class Step:
    """One rank's step. Layers are counted from 0; `made` are parameters of a layer with a gradient
    already."""

    state: State
    at_forward_loss: At
    at_loss: At
    at_head: At
    at_norm: At
    at_layer: Callable[[int, float], At]
    at_embedding: At
    at_optimizer: At
    at_arrival: Callable[[int, str], At | None] | None = None
    "when the gradient of one of a layer's matrices is there; None: `at_layer` has room for it"
    at_reductions: tuple[tuple[Where, At], ...] = ()
    "when gradients are put together to be sent"
    at_gather: At | None = None
    "when forward gathers the head, if that is an instant of its own"
    crowded_layer: int = 0
    "in whose backward most parameters are gathered"


@dataclass(frozen=True)
class Copies:
    """bf16 copies of fp32 weights, which autocast makes; in all the rest of the cases there are none."""

    of_layer: float = 0.0
    trained_of_layer: float = 0.0
    "of them, those of trained weights: autocast keeps them until forward ends, whoever needs them"
    of_head: float = 0.0
    recomputed: tuple[bool, ...] = ()
    "of each layer, whether it is checkpointed: then its copies don't wait for backward"
    head_waits: bool = True
    "for backward"
    loss_is_outside: bool = False
    "of autocast, which has let go of what it kept"

    def waiting(self, num_layers: int) -> float:
        """Those of the first so many layers, for their backward."""
        return self.of_layer * (num_layers - sum(self.recomputed[:num_layers]))

    @property
    def in_forward(self) -> float:
        """Those of all layers, at the end of forward."""
        if self.loss_is_outside:
            return self.waiting(len(self.recomputed))
        return self.waiting(len(self.recomputed)) + self.trained_of_layer * sum(self.recomputed)


DDP_BUCKET_BYTES = 25 * 2**20
"of gradients that DDP reduces at once, where a single one is not larger: bucket_cap_mb's default"


def replicated(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    has_buckets: bool,
    reduces_copies: bool,
    accumulates: bool,
    copies: Copies,
    optimizer_temporary: float,
) -> Step:
    """One process, and DDP, of one rank too: all on every rank, and buckets as large as all gradients."""
    P, L, e = weights.total, spec.num_layers, dtypes.gradient
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    buckets = G * e if has_buckets else 0
    state = State(P * dtypes.parameter, G * dtypes.master, G * dtypes.moments, buckets)
    before = G * e if accumulates else 0
    widest = weights.widest_trained * e
    in_a_bucket = min(G, max(weights.largest_trained, DDP_BUCKET_BYTES // e))
    copied = in_a_bucket * 4 if has_buckets and reduces_copies else 0
    held = D * e if spec.tied else 0  # the head's part of the gradient waits for the embedding's

    def at_layer(layer: int, made: float) -> At:
        own = copies.of_layer if copies.recomputed and copies.recomputed[layer] else 0
        gathered = copies.waiting(layer + 1) + own
        if accumulates:
            return At(gathered, before + held, temporary=widest)
        return At(gathered, e * (D + weights.trained_norm + (L - 1 - layer) * g + made))

    waiting = copies.waiting(L) + copies.of_head * copies.head_waits
    return Step(
        state,
        at_forward_loss=At(copies.in_forward + copies.of_head, before),
        at_loss=At(waiting, before),
        at_head=At(waiting, before + D * e, temporary=copies.of_head * bool(D)),
        at_norm=At(copies.waiting(L), before + D * e),
        at_layer=at_layer,
        at_embedding=At(0, G * e + (2 + accumulates if spec.tied else accumulates) * D * e, temporary=copied),
        at_optimizer=At(0, G * e, temporary=optimizer_temporary),
    )


def fsdp2(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    num_ranks: int,
    gathering_ranks: int,
    reshard_after_forward: bool,
    accumulates: bool,
    optimizer_temporary: float,
) -> Step:
    """FSDP2 as accelerate wraps it: a unit per layer, one for the embedding, one for final norm and head.

    A unit is gathered into a flat buffer that is copied out into its parameters; the buffer of one unit lives
    until the next one's arrived. The last unit stays gathered for backward, which gathers one unit ahead.
    A single rank has nobody to gather from: it copies a unit when it needs it, and none ahead.
    `num_ranks` share the state, `gathering_ranks` are gathered from: others, where the host holds the state.
    """
    P, p, E, L = weights.total, weights.layer, weights.vocabulary, spec.num_layers
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    w, r, kept = dtypes.compute, dtypes.reduced, dtypes.kept_gradient
    tail, trained_tail = E + spec.hidden_size, D + weights.trained_norm
    share, own, sent = P / num_ranks, G / num_ranks, g
    if weights.is_frozen:  # adapters have few rows, some ranks' shares have one and others none
        if num_ranks == gathering_ranks:
            own = L * sharded_adapters(weights, num_ranks)
        share = (P - G) / num_ranks + own
        sent = gathering_ranks * sharded_adapters(weights, gathering_ranks)
        p += sent - g
        P += L * (sent - g)
    state = State(share * dtypes.parameter, own * dtypes.master, own * dtypes.moments)
    before = G * max(dtypes.gradient, r) if accumulates else 0  # whole ones, in the reduction's dtype
    widest = weights.widest_trained * w
    # tied: one unit of embedding, norm and head, gathered from the first to the last moment, and its gradient
    # waits for the embedding's
    held, held_gradient = (tail, trained_tail) if spec.tied else (0, 0)
    is_alone = gathering_ranks == 1

    def gathered_at(layer: int) -> float:
        if not reshard_after_forward:
            return (E + (layer + 1) * p) * w
        ahead = p if layer else 0 if spec.tied else E
        return (held + p + ahead * (not is_alone)) * w

    def at_layer(layer: int, made: float) -> At:
        if accumulates:
            return At(gathered_at(layer), before + held_gradient * w, temporary=widest)
        last = 0 if spec.tied else trained_tail
        reduced_so_far = last + (L - 1 - layer) * g
        return At(
            gathered_at(layer),
            (held_gradient + made) * w + reduced_so_far * own / G * kept,
            communication=(last if layer == L - 1 else sent) * r,
        )

    whole = P * w if not reshard_after_forward else 0
    flat = 0 if is_alone else p if spec.tied else tail
    next_unit = 0 if is_alone else p
    # a frozen embedding has nothing to send, and the buffer that it was gathered into is still there
    end = E if weights.is_frozen and not spec.tied and not is_alone else 0
    return Step(
        state,
        at_gather=None if spec.tied or is_alone else At((whole or (p + tail) * w) + tail * w, before),
        at_forward_loss=At((whole or tail * w) + flat * w, before),
        at_loss=At(whole or tail * w, before),
        at_head=At(whole or (tail + next_unit) * w, before + D * w),
        at_norm=At(whole or (tail + next_unit) * w, before + trained_tail * w),
        at_layer=at_layer,
        at_embedding=At(
            (tail + end) * w,
            (3 if spec.tied else 1) * D * w + (before or (G - D) * own / G * kept),
            communication=sent * r,
        ),
        at_optimizer=At(0, own * kept, temporary=optimizer_temporary),
    )


def zero_1_or_2(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    zero: ZeroSettings,
    *,
    num_gpus: int,
    num_ranks: int,
    num_micro_steps: int,
    optimizer_temporary: float,
) -> Step:
    """ZeRO-1 and ZeRO-2: whole parameters; gradients go through buckets to the rank that keeps them.

    `num_ranks` share the state: more than `num_gpus` where the host holds it. The GPU holds widened
    gradients even then.
    """
    G, w = weights.trained, dtypes.parameter
    is_widened = dtypes.kept_gradient > w
    reduction = Reduction(
        stage=zero.stage,
        num_ranks=num_gpus if is_widened else num_ranks,
        bucket=zero.reduce_bucket_size,
        overlap_comm=zero.overlaps,
        contiguous_gradients=zero.contiguous_gradients,
        parameter_bytes=w,
        reduced_bytes=dtypes.reduced,
        kept_bytes=dtypes.kept_gradient,
    )
    backward = backward_of(spec, weights, reduction, num_micro_steps=num_micro_steps)
    head = weights.trained_vocabulary * w

    def at_layer(layer: int, num_elements: float) -> At:
        temporary = min(num_elements, weights.widest_trained) * w if weights.is_frozen else 0
        return _at(backward.layers[layer].held_at(num_elements), temporary)

    def at_arrival(layer: int, place: str) -> At | None:
        made = backward.layers[layer].made.get(place)
        return _at(made.before, made.tensor.num_elements * w) if made else None

    share = G / num_ranks
    step_bytes = _of_step(backward, reduction, dtypes, share, optimizer_temporary)
    return Step(
        State(weights.total * w, share * dtypes.master, share * dtypes.moments),
        at_forward_loss=_at(backward.at_loss),
        at_loss=_at(backward.at_loss),
        at_head=_at(backward.at_loss, head),
        at_norm=_at(backward.at_norm),
        at_layer=at_layer,
        at_arrival=at_arrival,
        at_reductions=tuple((where, _at(held)) for where, held in backward.reductions),
        crowded_layer=backward.crowded_layer,
        at_embedding=_at(backward.at_embedding, head),
        at_optimizer=At(0, backward.kept, 0, step_bytes),
    )


def _of_step(backward: Backward, reduction: Reduction, dtypes: Dtypes, share: float, foreach: float) -> float:
    """Bytes of the optimizer's step beside the reduced gradients.

    Norms are computed in fp64, one gradient at a time. Then the gradients are copied flat, and in the master
    weights' dtype. A widened partition is flat already; so is a single gradient.
    """
    norm = 8 * backward.largest_piece
    is_flat = reduction.is_widened or backward.num_matrices == 1
    flat = share * dtypes.kept_gradient * (not is_flat)
    cast = share * dtypes.master * (dtypes.master != dtypes.kept_gradient)
    # one buffer holds matrices and norms, whose turn comes later; without it the copied ones are freed
    freed = backward.kept * (not reduction.contiguous_gradients and (flat or cast) > 0)
    return max(norm, flat + cast, (cast or flat) + foreach - freed)


def _at(held: Held, temporary: float = 0.0) -> At:
    return At(0, held.gradients, held.communication, temporary)


def zero_3(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    zero: ZeroSettings,
    *,
    num_ranks: int,
    accumulates: bool,
    optimizer_temporary: float,
    has_embedding_gradient: bool = True,
) -> Step:
    """ZeRO-3: a share of everything; parameters are gathered ahead of use, up to so many as may be live.

    `has_embedding_gradient`: backward goes back to the embedding; with adapters only where layers are
    checkpointed.
    """
    P, p, E, L = weights.total, weights.layer, weights.vocabulary, spec.num_layers
    G, D = weights.trained, weights.trained_vocabulary
    w = dtypes.parameter
    share = G / num_ranks
    state = State(
        P / num_ranks * w,
        share * dtypes.master,
        share * dtypes.moments,
        zero.reduce_bucket_size * w,
        share * dtypes.kept_gradient,
    )
    widest = weights.widest_trained * w
    held = D * w if spec.tied else 0  # the head's part of the gradient waits for the embedding's
    # A parameter is gathered ahead as long as fewer than max_live are: the embedding, when its turn comes,
    # goes beyond that by its own size. In backward that is so many layers before the first.
    # Without prefetching, those of an FFN and what is left of attention are.
    h, q, v = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = ((h * spec.ffn_size, 3), (h * q, 2), (h * v, 2), (h, 2))
    sizes += tuple((rows * columns, 1) for rows, columns in weights.adapter_shapes)
    persistent = (
        sum(size * count for size, count in sizes if size < zero.stage3_param_persistence_threshold) * L
    )
    in_use = 3 * h * spec.ffn_size + h * q
    prefetches = zero.stage3_prefetch_bucket_size != 0
    wanted = zero.stage3_max_live_parameters if prefetches else in_use
    used = P if has_embedding_gradient else P - E - h * (q + 2 * v)  # the first layer's matrices on its input
    live = max(E, min(used, wanted), persistent) * w if num_ranks > 1 else 0
    most_live = max(min(P, wanted + E * prefetches), persistent) * w if num_ranks > 1 else 0
    turn_of_embedding = min(L - 1, int(zero.stage3_max_live_parameters / p))

    # as under ZeRO-1 and 2, but for a sub-group of the share at a time
    stepped = min(share, zero.sub_group_size)
    flat = stepped * dtypes.kept_gradient
    cast = stepped * dtypes.master if dtypes.master != dtypes.kept_gradient else 0

    def at_layer(layer: int, made: float) -> At:
        return At(most_live if layer == turn_of_embedding else live, held, 0, widest)

    return Step(
        state,
        at_forward_loss=At(live),
        at_loss=At(live),
        at_head=At(live, D * w),
        at_norm=At(live, D * w),
        at_layer=at_layer,
        at_embedding=At(E * w * (num_ranks > 1), (3 if spec.tied else 1) * D * w),
        at_optimizer=At(temporary=max(flat + cast, (cast or flat) + min(optimizer_temporary, cast or flat))),
        crowded_layer=turn_of_embedding,
    )


CHUNK_ELEMENTS = 2**25
"of gradients that `run/engine/optimizer.py` casts at a time: a test compares the two"


def optimizer_temporary(setup: Setup) -> float:
    """Bytes on one rank. foreach AdamW makes one tensor per parameter that it updates, the fused one none.

    The toolkit's own AdamW (not in `stock`, not under DeepSpeed) goes through the parameters in chunks.
    """
    dtypes, weights, strategy = setup.dtypes, setup.weights, setup.strategy
    num_shards = 1 if strategy.is_replicated else setup.gpu_state_ranks
    foreach = setup.config.optim == "adamw_torch"
    if strategy.is_deepspeed or setup.config.numerics == "stock":
        updated = dtypes.master or dtypes.parameter
        return weights.trained / num_shards * updated * foreach
    elements = largest_chunk(setup.spec, num_shards, weights.adapter_shapes)
    cast = dtypes.master if dtypes.master else 0
    temporary = (dtypes.master or dtypes.parameter) * foreach
    return elements * (cast + temporary)


@lru_cache(maxsize=4096)
def largest_chunk(spec: ModelSpec, num_shards: int, adapter_shapes: tuple[tuple[int, int], ...] = ()) -> int:
    """Elements of the largest run of parameters below CHUNK_ELEMENTS, in the model's order."""
    if adapter_shapes:
        shares = [-(-rows // num_shards) * columns for rows, columns in adapter_shapes] * spec.num_layers
    else:
        h, kv, q = spec.hidden_size, spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
        layer = [h * q, h * kv, h * kv, h * q, *[h * spec.ffn_size] * 3]
        matrices = [spec.embedding_params, *layer * spec.num_layers]
        if not spec.tied:
            matrices.append(spec.embedding_params)
        shares = [-(-size // num_shards) for size in matrices]
    largest = run = 0
    for share in shares:
        if run and run + share > CHUNK_ELEMENTS:
            largest, run = max(largest, run), 0
        run += share
    return max(largest, run)
