"""Bytes that belong to parameters under DeepSpeed's ZeRO, at each instant of a step: see `engine_bytes.py`.

Read off allocation traces of deepspeed 0.19.8, on the rank that holds the first parameters.
"""

from dataclasses import dataclass
from typing import Any

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.adapters import Weights
from slm_toolkit.predict.engine_bytes import At, Dtypes, State, Step
from slm_toolkit.predict.zero_gradients import Backward, Held, Reduction, backward_of


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
        bucket=zero.reduce_bucket,
        overlap_comm=zero.overlap_comm,
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
