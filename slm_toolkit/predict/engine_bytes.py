"""Bytes that belong to parameters, on one rank, at each instant of a step: what the engine makes of them.

One function per engine, each read off the allocation traces of the real one (`slm_toolkit.train --rehearse`;
torch 2.13, accelerate 1.15, deepspeed 0.19.8), with the engine's own words. P: parameters, p: those of a
decoder layer, E: those of a vocabulary matrix, N: ranks."""

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
    at_layer_end: Callable[[int], At] | None = None
    "when a layer's gradients are put together to be sent, its activations gone"
    at_gather: At | None = None
    "when forward gathers the head, if that is an instant of its own"
    crowded_layer: int = 0
    "in whose backward most parameters are gathered"


def dtypes_of(numerics: str, engine: str, *, fp32_reduction: bool) -> Dtypes:
    """What `run/engine.py` makes of `--numerics` under each engine (the README's table, "probed")."""
    if numerics == "fp32":
        own_master = 4 if engine == "deepspeed" else 0
        return Dtypes(4, own_master, 8, 4, 4, 4, 4)
    if engine == "deepspeed" and fp32_reduction:  # grad_accum_dtype: what is kept is fp32, too
        own_master = 2 if numerics == "pure_bf16" else 4
        return Dtypes(2, own_master, 2 * own_master, 2, 2, 4, 4)
    if numerics == "pure_bf16":
        own_master = 2 if engine == "deepspeed" else 0
        return Dtypes(2, own_master, 4, 2, 2, 4 if fp32_reduction else 2, 2)
    if numerics == "aligned" or engine == "deepspeed":
        return Dtypes(2, 4, 8, 2, 2, 4 if fp32_reduction else 2, 2)
    if engine in ("fsdp1", "fsdp2"):  # fp32 shards, gathered in bf16
        return Dtypes(4, 0, 8, 2, 2, 2, 4)
    return Dtypes(4, 0, 8, 2, 4, 4, 4)  # autocast over fp32


@dataclass(frozen=True)
class Copies:
    """bf16 copies of fp32 weights, which autocast makes; in all the rest of the cases there are none."""

    of_layer: float = 0.0
    of_head: float = 0.0
    recomputed: tuple[bool, ...] = ()
    "of each layer, whether it is checkpointed: then its copies don't wait for backward"

    def waiting(self, num_layers: int) -> float:
        """Those of the first so many layers, at the end of forward."""
        return self.of_layer * (num_layers - sum(self.recomputed[:num_layers]))


DDP_BUCKET_BYTES = 25 * 2**20
"of gradients that DDP reduces at once, where a single one is not larger: bucket_cap_mb's default"


def replicated(
    spec: ModelSpec,
    dtypes: Dtypes,
    *,
    has_buckets: bool,
    reduces_copies: bool,
    accumulates: bool,
    copies: Copies,
    optimizer_temporary: float,
) -> Step:
    """One process, and DDP, of one rank too: all on every rank, and buckets as large as all gradients."""
    P, p, E, L = spec.num_params, spec.params_per_layer, spec.embedding_params, spec.num_layers
    g = dtypes.gradient
    buckets = P * g if has_buckets else 0
    state = State(P * dtypes.parameter, P * dtypes.master, P * dtypes.moments, buckets)
    before = P * g if accumulates else 0
    widest = spec.hidden_size * spec.ffn_size * g
    copied = max(E, DDP_BUCKET_BYTES // g) * 4 if has_buckets and reduces_copies else 0
    held = E * g if spec.tied else 0  # the head's part of the gradient waits for the embedding's

    def at_layer(layer: int, made: float) -> At:
        own = copies.of_layer if copies.recomputed and copies.recomputed[layer] else 0
        gathered = copies.waiting(layer + 1) + own
        if accumulates:
            return At(gathered, before + held, temporary=widest)
        return At(gathered, g * (E + spec.hidden_size + (L - 1 - layer) * p + made))

    return Step(
        state,
        at_forward_loss=At(L * copies.of_layer + copies.of_head, before),
        at_loss=At(copies.waiting(L) + copies.of_head, before),
        at_head=At(copies.waiting(L) + copies.of_head, before + E * g, temporary=copies.of_head),
        at_norm=At(copies.waiting(L), before + E * g),
        at_layer=at_layer,
        at_embedding=At(0, P * g + (2 + accumulates if spec.tied else accumulates) * E * g, temporary=copied),
        at_optimizer=At(0, P * g, temporary=optimizer_temporary),
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
    state = State(
        P / num_ranks * dtypes.parameter, P / num_ranks * dtypes.master, P / num_ranks * dtypes.moments
    )
    before = P * max(dtypes.gradient, r) if accumulates else 0  # whole ones, in the reduction's dtype
    widest = spec.hidden_size * spec.ffn_size * w
    # tied: one unit of embedding, norm and head, gathered from the first to the last moment, and its gradient
    # waits for the embedding's
    held = tail if spec.tied else 0
    ahead_of_first = 0 if spec.tied else E

    def gathered_at(layer: int) -> float:
        if not reshard_after_forward:
            return (E + (layer + 1) * p) * w
        return (held + p + (p if layer else ahead_of_first)) * w

    def at_layer(layer: int, made: float) -> At:
        if accumulates:
            return At(gathered_at(layer), before + held * w, temporary=widest)
        reduced_so_far = (0 if spec.tied else tail) + (L - 1 - layer) * p
        last = 0 if spec.tied else tail
        return At(
            gathered_at(layer),
            (held + made) * w + reduced_so_far / num_ranks * kept,
            communication=(last if layer == L - 1 else p) * r,
        )

    whole = P * w if not reshard_after_forward else 0
    flat = p if spec.tied else tail
    return Step(
        state,
        at_gather=None if spec.tied else At((whole or (p + tail) * w) + tail * w, before),
        at_forward_loss=At((whole or tail * w) + flat * w, before),
        at_loss=At(whole or tail * w, before),
        at_head=At(whole or (tail + p) * w, before + E * w),
        at_norm=At(whole or (tail + p) * w, before + tail * w),
        at_layer=at_layer,
        at_embedding=At(
            tail * w,
            (3 if spec.tied else 1) * E * w + (before or (P - E) / num_ranks * kept),
            communication=p * r,
        ),
        at_optimizer=At(0, P / num_ranks * kept, temporary=optimizer_temporary),
    )
