"""Bytes that belong to parameters under DeepSpeed's ZeRO, at each instant of a step: see `engine_bytes.py`.

Read off allocation traces of deepspeed 0.19.8, on the rank that holds the first parameters.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.adapters import Weights, matrices_of
from slm_toolkit.predict.engine_bytes import At, Dtypes, State, Step


@dataclass(frozen=True)
class Zero:
    """What a DeepSpeed JSON says of memory, in elements, after accelerate has filled in "auto"."""

    stage: int
    reduce_bucket: int
    overlap_comm: bool
    contiguous_gradients: bool
    max_live_parameters: int
    persistence_threshold: int
    "ZeRO-3: smaller parameters are whole on every rank"
    prefetches: bool
    sub_group_size: int
    "ZeRO-3: elements that the optimizer steps at once"


def zero_of(deepspeed: dict[str, Any], spec: ModelSpec) -> Zero:
    """DeepSpeed's own defaults where the JSON is silent; "auto" as accelerate 1.15 fills it in."""
    section = {
        "reduce_bucket_size": int(5e8),
        "stage3_max_live_parameters": int(1e9),
        "stage3_param_persistence_threshold": int(1e5),
        "stage3_prefetch_bucket_size": int(5e7),
        "sub_group_size": int(1e9),
        "contiguous_gradients": True,
        "overlap_comm": deepspeed.get("zero_optimization", {}).get("stage") == 3,
        **{
            name: value for name, value in deepspeed.get("zero_optimization", {}).items() if value is not None
        },
    }
    bucket, threshold = section["reduce_bucket_size"], section["stage3_param_persistence_threshold"]
    return Zero(
        stage=section.get("stage", 0),
        reduce_bucket=spec.hidden_size**2 if bucket == "auto" else int(bucket),
        overlap_comm=section["overlap_comm"],
        contiguous_gradients=section["contiguous_gradients"],
        max_live_parameters=int(section["stage3_max_live_parameters"]),
        persistence_threshold=10 * spec.hidden_size if threshold == "auto" else int(threshold),
        prefetches=section["stage3_prefetch_bucket_size"] != 0,
        sub_group_size=int(section["sub_group_size"]),
    )


def zero_1_or_2(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    zero: Zero,
    *,
    num_ranks: int,
    accumulates: bool,
    optimizer_temporary: float,
) -> Step:
    """ZeRO-1 and ZeRO-2: whole parameters; gradients go through buckets to the rank that keeps them."""
    L, N = spec.num_layers, num_ranks
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    w, kept = dtypes.parameter, dtypes.kept_gradient
    share = G / N * kept
    state = State(weights.total * w, G / N * dtypes.master, G / N * dtypes.moments)
    buckets = zero.reduce_bucket * w * ((2 if zero.overlap_comm else 1) if zero.contiguous_gradients else 0)
    is_widened = kept > w  # fp32 gradients of bf16 weights: one by one, each copied, without buckets
    buckets *= not is_widened
    flattened = min(zero.reduce_bucket, G) * w  # a bucket's gradients, put together to be sent
    widest = weights.widest_trained
    # A gradient larger than a bucket goes around it, and under ZeRO-1 waits until backward has ended; a tied
    # one waits for the embedding's part anyway.
    head_is_large = zero.reduce_bucket < D or not zero.contiguous_gradients
    waits_to_the_end = head_is_large and zero.stage == 1 and not accumulates
    head_waits = D * w if spec.tied or waits_to_the_end else 0
    # one that several ranks keep pieces of is sent in pieces, put together until they fill a bucket
    pieces = min(D, zero.reduce_bucket + G / N) * w if head_is_large and not spec.tied and G / N < D else 0
    if is_widened:
        pieces = D * kept
    large_of_layer = 0
    if zero.stage == 1 and N > 1:
        smallest = zero.reduce_bucket if zero.contiguous_gradients else 0  # without buckets all wait
        large_of_layer = w * sum(size for size in _trained_sizes(spec, weights) if size > smallest)
    # Rank 0 keeps the gradients of the first parameters, whole ones, the embedding at least. The room for
    # them is made when the first is reduced, a norm's of one of the first layers.
    own = (G if N == 1 else max(weights.largest_trained, G / N)) * kept
    first_own_layer = L if N == 1 else max((G / N - D) / g, 0 if weights.is_frozen else (2 * L + 1) / (2 * N))
    before = 0.0
    if accumulates:  # ZeRO-1 reduces at the last micro-step only, ZeRO-2 at each
        before = own if zero.stage == 2 else G * kept
    if is_widened and accumulates:
        own = 0.0  # added to what is there, in place
    at_once = own if N == 1 else 0

    # a norm is reduced with the bucket that it lies in: the first own one before the embedding's backward
    # only if enough follows to fill that, or is too large for it
    is_early = first_own_layer >= 1 and max(first_own_layer * g, widest) > zero.reduce_bucket
    # the first bucket of adapters' gradients is full, if ever, so many layers before the last
    full_at = L - 1 - int(zero.reduce_bucket / g) if weights.is_frozen and not is_widened else -1

    # made for the first gradient of all, they stay to the end of backward, under ZeRO-1 of the last one
    left_buckets = buckets * (accumulates and zero.stage == 1)

    def buckets_at(layer: int, made: float) -> float:
        return buckets if not weights.is_frozen or layer < L - 1 or made > 0 else left_buckets

    def at_layer(layer: int, made: float) -> At:
        there = buckets_at(layer, made)
        if accumulates and zero.stage == 1:
            freed = 0 if large_of_layer else (L - 1 - layer) * g * kept
            return At(0, head_waits + before - freed, there, min(made, widest) * w)
        waiting = before or large_of_layer * (L - 1 - layer + made / g)
        if is_early and layer < int(first_own_layer):
            waiting += own  # of this micro-step, to be added to those of earlier ones
        sent = flattened if layer == full_at else 0
        return At(0, head_waits + waiting, there + sent, min(made, widest) * w)

    def at_layer_end(layer: int) -> At:
        return dataclasses.replace(at_layer(layer, g), temporary=widest * w + flattened)

    # the step flattens the gradients, then casts them to the master weights' dtype
    cast = G / N * dtypes.master if dtypes.master != kept else 0
    is_one_by_one = zero.reduce_bucket < G / N or spec.tied or (accumulates and zero.stage == 1)
    norm = 8 * min(weights.largest_trained, G / N)  # of a gradient, computed in fp64
    of_step = max(share + cast, (cast or share) + optimizer_temporary)
    if is_widened:
        of_step = optimizer_temporary
    at_embedding = head_waits + D * w * (2 if spec.tied else 1) + before
    if zero.stage == 2 or not accumulates:
        at_embedding += own * (is_early or not spec.tied) + large_of_layer * L
    at_end = 0 if is_one_by_one and not is_widened else pieces
    if weights.is_frozen:  # what is left in the last bucket
        at_end = (G % zero.reduce_bucket) * w * (not is_widened)
    return Step(
        state,
        at_forward_loss=At(0, before, left_buckets),
        at_loss=At(0, before, left_buckets),
        at_head=At(0, before + D * w, left_buckets),
        at_norm=At(
            0, before + at_once + D * w * (zero.stage == 2 or not accumulates), buckets_at(L - 1, 0), pieces
        ),
        at_layer=at_layer,
        at_layer_end=None if weights.is_frozen else at_layer_end,
        crowded_layer=max(0, full_at),
        at_embedding=At(0, at_embedding, buckets, at_end),
        at_optimizer=At(0, share, 0, max(norm, of_step)),
    )


def _trained_sizes(spec: ModelSpec, weights: Weights) -> list[int]:
    """Elements of a layer's trained tensors, without norms."""
    if weights.is_frozen:
        return [rows * columns for rows, columns in weights.adapter_shapes]
    return [inputs * outputs for inputs, outputs in matrices_of(spec).values()]


def zero_3(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    zero: Zero,
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
        zero.reduce_bucket * w,
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
    persistent = sum(size * count for size, count in sizes if size < zero.persistence_threshold) * L
    in_use = 3 * h * spec.ffn_size + h * q
    wanted = zero.max_live_parameters if zero.prefetches else in_use
    used = P if has_embedding_gradient else P - E - h * (q + 2 * v)  # the first layer's matrices on its input
    live = max(E, min(used, wanted), persistent) * w if num_ranks > 1 else 0
    most_live = max(min(P, wanted + E * zero.prefetches), persistent) * w if num_ranks > 1 else 0
    turn_of_embedding = min(L - 1, int(zero.max_live_parameters / p))

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
