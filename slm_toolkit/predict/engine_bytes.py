"""Bytes that belong to parameters, on one rank, at each instant of a step: what the engine makes of them.

One function per engine, each read off the allocation traces of the real one (`slm_toolkit.train --rehearse`;
torch 2.13, accelerate 1.15, deepspeed 0.19.8), with the engine's own words. P: parameters, p: those of a decoder
layer, E: those of a vocabulary matrix, N: ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.models import ModelSpec


@dataclass(frozen=True)
class Dtypes:
    """Bytes per element; 0 where there is no such tensor."""

    parameter: int
    master: int
    moments: int
    "both of Adam's together"
    compute: int
    "gathered or cast parameters, as matrix products take them"
    gradient: int
    "as backward gives them"
    reduced: int
    "in the collectives"
    kept_gradient: int
    "as the optimizer takes them"


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
    """One rank's step. Layers are counted from 0; `made` are parameters of a layer with a gradient already."""

    state: State
    at_forward_loss: At
    at_loss: At
    at_head: At
    at_norm: At
    at_layer: Callable[[int, float], At]
    at_embedding: At
    at_optimizer: At
    at_gather: At | None = None
    "when forward gathers the head, if that is an instant of its own"


def dtypes_of(numerics: str, engine: str, *, fp32_reduction: bool) -> Dtypes:
    """What `run/engine.py` makes of `--numerics` under each engine (the README's table, "probed")."""
    if numerics == "fp32":
        own_master = 4 if engine == "deepspeed" else 0
        return Dtypes(4, own_master, 8, 4, 4, 4, 4)
    if numerics == "pure_bf16":
        own_master = 2 if engine == "deepspeed" else 0
        return Dtypes(2, own_master, 4, 2, 2, 4 if fp32_reduction else 2, 2)
    if numerics == "aligned" or engine == "deepspeed":
        return Dtypes(2, 4, 8, 2, 2, 4 if fp32_reduction else 2, 2)
    if engine in ("fsdp1", "fsdp2"):  # fp32 shards, gathered in bf16
        return Dtypes(4, 0, 8, 2, 2, 2, 4)
    return Dtypes(4, 0, 8, 2, 4, 4, 4)  # autocast over fp32


def replicated(
    spec: ModelSpec,
    dtypes: Dtypes,
    *,
    num_ranks: int,
    accumulates: bool,
    autocast_copies: tuple[float, float],
    optimizer_temporary: float,
    bucket_view: bool,
) -> Step:
    """One process, and DDP: everything on every rank, with DDP's buckets as large as all gradients.

    `autocast_copies`: bf16 copies of one layer's and of the head's weights that wait for backward; 0 without
    autocast. With `gradient_as_bucket_view` the gradients lie in the buckets.
    """
    P, p, E, L = spec.num_params, spec.params_per_layer, spec.embedding_params, spec.num_layers
    g = dtypes.gradient
    of_layer, of_head = autocast_copies
    copies = L * of_layer + of_head
    buckets = P * g if num_ranks > 1 else 0
    all_gradients = 0 if bucket_view and buckets else P * g
    state = State(P * dtypes.parameter, P * dtypes.master, P * dtypes.moments, buckets)
    before = all_gradients if accumulates else 0
    widest = spec.hidden_size * spec.ffn_size * g

    def at_layer(layer: int, made: float) -> At:
        gathered = (layer + 1) * of_layer
        if accumulates:
            return At(gathered, before, temporary=widest)
        return At(gathered, g * (E + spec.hidden_size + (L - 1 - layer) * p + made))

    return Step(
        state,
        at_forward_loss=At(copies, before),
        at_loss=At(copies, before),
        at_head=At(copies, before or E * g, temporary=E * g * bool(before) + of_head),
        at_norm=At(L * of_layer, before or E * g),
        at_layer=at_layer,
        at_embedding=At(0, all_gradients, temporary=E * g if accumulates or spec.tied else 0),
        at_optimizer=At(0, all_gradients, temporary=optimizer_temporary),
    )


def fsdp2(
    spec: ModelSpec,
    dtypes: Dtypes,
    *,
    num_ranks: int,
    reshard_after_forward: bool,
    accumulates: bool,
    optimizer_temporary: float,
) -> Step:
    """FSDP2 as accelerate wraps it: a unit per layer, one for the embedding, one for final norm and head.

    A unit is gathered into a flat buffer that is copied out into its parameters; the buffer of one unit lives
    until the next one's arrived. The last unit stays gathered for backward, which gathers one unit ahead.
    """
    P, p, E, L = spec.num_params, spec.params_per_layer, spec.embedding_params, spec.num_layers
    w, r, kept = dtypes.compute, dtypes.reduced, dtypes.kept_gradient
    tail = E + spec.hidden_size
    embedding = 0 if spec.tied else E
    state = State(
        P / num_ranks * dtypes.parameter, P / num_ranks * dtypes.master, P / num_ranks * dtypes.moments
    )
    whole = P * w if not reshard_after_forward else 0
    before = P * dtypes.gradient if accumulates else 0
    widest = spec.hidden_size * spec.ffn_size * w

    def gathered_at(layer: int) -> float:
        if not reshard_after_forward:
            return (embedding + (layer + 1) * p) * w
        return (p + (p if layer else embedding)) * w

    def at_layer(layer: int, made: float) -> At:
        reduced_so_far = tail + (L - 1 - layer) * p
        if accumulates:
            return At(gathered_at(layer), before, temporary=widest)
        return At(
            gathered_at(layer),
            made * w + reduced_so_far / num_ranks * kept,
            communication=(tail if layer == L - 1 else p) * r,
        )

    return Step(
        state,
        at_gather=At((whole or p * w + tail * w) + tail * w, before),
        at_forward_loss=At((whole or tail * w) + tail * w, before),
        at_loss=At(whole or tail * w, before),
        at_head=At(whole or (tail + p) * w, before + E * w),
        at_norm=At(whole or (tail + p) * w, before + tail * w),
        at_layer=at_layer,
        at_embedding=At(
            embedding * w, embedding * w + P / num_ranks * kept, communication=max(p, embedding) * r
        ),
        at_optimizer=At(0, P / num_ranks * kept, temporary=optimizer_temporary),
    )


@dataclass(frozen=True)
class Zero:
    """What a DeepSpeed JSON says of memory, in elements, after accelerate has filled in "auto"."""

    stage: int
    reduce_bucket: int
    overlap_comm: bool
    contiguous_gradients: bool
    max_live_parameters: int
    max_reuse_distance: int
    persistence_threshold: int
    prefetch_bucket: int


def zero_1_or_2(
    spec: ModelSpec,
    dtypes: Dtypes,
    zero: Zero,
    *,
    num_ranks: int,
    accumulates: bool,
    optimizer_temporary: float,
) -> Step:
    """ZeRO-1 and ZeRO-2: whole parameters; gradients go through buckets to the rank that keeps them."""
    P, E, L = spec.num_params, spec.embedding_params, spec.num_layers
    w, kept = dtypes.parameter, dtypes.kept_gradient
    state = State(P * w, P / num_ranks * dtypes.master, P / num_ranks * dtypes.moments)
    buckets = zero.reduce_bucket * w * ((2 if zero.overlap_comm else 1) if zero.contiguous_gradients else 0)
    flattened = min(zero.reduce_bucket, P) * w  # a bucket's gradients, put together to be sent
    share = P / num_ranks * kept
    head_waits = E * w if E > zero.reduce_bucket and zero.stage == 1 else 0
    widest = spec.hidden_size * spec.ffn_size * w
    before = 0.0
    if accumulates:  # ZeRO-1 reduces at the last micro-step only, ZeRO-2 at each
        before = share if zero.stage == 2 else P * kept

    def at_layer(layer: int, made: float) -> At:
        own = before or min(share, (E + (L - 1 - layer) * spec.params_per_layer + made) * w) * (
            num_ranks == 1
        )
        return At(0, head_waits + own, buckets, max(widest, flattened))

    large = E > zero.reduce_bucket
    return Step(
        state,
        at_forward_loss=At(0, before),
        at_loss=At(0, before),
        at_head=At(0, before + E * w),
        at_norm=At(0, before + E * w, buckets),
        at_layer=at_layer,
        at_embedding=At(0, head_waits + E * w + share, buckets + E * w * large, flattened),
        at_optimizer=At(0, share, 0, share / kept * (dtypes.master or 0) + optimizer_temporary),
    )


def zero_3(
    spec: ModelSpec,
    dtypes: Dtypes,
    zero: Zero,
    *,
    num_ranks: int,
    accumulates: bool,
    optimizer_temporary: float,
) -> Step:
    """ZeRO-3: a share of everything; parameters are gathered ahead of use, up to a number that may be live."""
    P, E = spec.num_params, spec.embedding_params
    w = dtypes.parameter
    share = P / num_ranks
    state = State(
        share * w,
        share * dtypes.master,
        share * dtypes.moments,
        zero.reduce_bucket * w,
        share * dtypes.kept_gradient,
    )
    live = min(P, zero.max_live_parameters) * w
    widest = spec.hidden_size * spec.ffn_size * w

    def at_layer(layer: int, made: float) -> At:
        return At(live, 0, 0, widest)

    return Step(
        state,
        at_forward_loss=At(live),
        at_loss=At(live),
        at_head=At(live, E * w),
        at_norm=At(live, E * w),
        at_layer=at_layer,
        at_embedding=At(live, E * w),
        at_optimizer=At(0, 0, 0, share * (dtypes.master or 0) + optimizer_temporary),
    )
