"""Bytes of parameters, gradients, optimizer states and their buffers on one rank, at each instant of a step.

Each engine has one function. Its formulas come from allocation traces of that engine (`slm_toolkit.train
--rehearse`; torch 2.13, accelerate 1.15, deepspeed 0.19.8), on the rank that stores the first parameters.

P: all parameters, p: parameters of a decoder layer, E: parameters of a vocabulary matrix, L: layers; G, g and
D: the trained ones of P, p and E.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from slm_toolkit.model.model_spec import hidden_matrices, layer_tensors
from slm_toolkit.predict.setup.setup import AUTOCAST, FP32, Dtypes, Setup
from slm_toolkit.strategy.settings import ZeroSettings


@dataclass(frozen=True)
class State:
    """Bytes that are allocated during the whole step."""

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
    """One rank's step. Layers are counted from 0.

    `at_layer` takes the layer and the number of its parameters that have a gradient already.
    """

    state: State
    at_forward_loss: At
    at_loss: At
    at_norm: At
    at_layer: Callable[[int, float], At]
    at_embedding: At
    at_optimizer: At
    at_last_layer: At | None = None
    "in the last layer's forward, if more is gathered then than later"
    crowded_layers: tuple[int, ...] = ()
    "layers in whose backward the engine's buffers are largest"


def step_of(setup: Setup) -> Step:
    """Return the step of the setup's engine."""
    strategy = setup.strategy
    if strategy.is_replicated:
        # accelerate starts a single rank without DDP
        has_buckets = not strategy.is_single and setup.num_gpus > 1
        return _replicated(setup, setup.dtypes, has_buckets, keeps_gradients=setup.keeps_gradients)
    if strategy.is_fsdp:
        return _fsdp(setup)
    if strategy.is_zero_3:
        return _zero_3(setup)
    if strategy.zero_stage == 1 and setup.dtypes.kept_gradient > setup.dtypes.gradient:
        return _zero_1_in_fp32(setup)
    return _zero_1_or_2(setup)


@dataclass(frozen=True)
class _Copies:
    """Bytes of the bf16 copies that autocast makes of fp32 weights."""

    of_layer: float
    trained_of_layer: float
    "copies of trained weights: autocast caches them until forward ends"
    of_head: float
    recomputed: tuple[bool, ...]
    "whether each layer is checkpointed: its copies are then not saved for backward"

    def waiting(self, num_layers: int) -> float:
        """Return the bytes of copies that the first `num_layers` layers save for backward."""
        return self.of_layer * (num_layers - sum(self.recomputed[:num_layers]))

    def in_backward(self, layer: int) -> float:
        """Return the bytes of copies in a layer's backward; a checkpointed layer makes its own again."""
        return self.waiting(layer + 1) + self.of_layer * self.recomputed[layer]

    @property
    def at_norm(self) -> float:
        return self.waiting(len(self.recomputed))

    @property
    def at_loss(self) -> float:
        return self.at_norm + self.of_head

    @property
    def in_forward(self) -> float:
        """Bytes of all copies at the end of forward."""
        return self.at_norm + self.of_head + self.trained_of_layer * sum(self.recomputed)


def _copies(setup: Setup) -> _Copies:
    spec, weights = setup.spec, setup.weights
    e = 2 * (setup.compute == AUTOCAST)  # 0: no autocast, no copies
    of_layer = spec.matmul_params_per_layer
    trained = weights.trained_layer if weights.is_frozen else of_layer
    return _Copies(e * of_layer, e * trained, e * spec.embedding_params, setup.recomputed)


def _replicated(setup: Setup, dtypes: Dtypes, has_buckets: bool, *, keeps_gradients: bool = False) -> Step:
    """Return the step of a single process or of DDP: every rank has the whole training state.

    DDP adds buckets as large as all gradients. `keeps_gradients`: a step sets gradients to zero instead of
    freeing them; nanotron keeps sums in a wider dtype, to which each gradient is added.
    """
    weights, copies, tied = setup.weights, _copies(setup), setup.spec.tied
    L, e, kept = setup.spec.num_layers, dtypes.gradient, dtypes.kept_gradient
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    exist_before = setup.config.gradient_accumulation_steps > 1 or keeps_gradients
    before = G * kept if exist_before else 0
    held = D * e if tied else 0  # the head's part of the gradient waits for the embedding's

    def at_layer(layer: int, made: float) -> At:
        gathered = copies.in_backward(layer)
        if exist_before:
            return At(gathered, before + held, temporary=weights.widest_trained * e)
        return At(gathered, kept * (D + weights.trained_norm + (L - 1 - layer) * g + made))

    return Step(
        State(weights.total * dtypes.parameter, G * dtypes.master, G * dtypes.moments, G * e * has_buckets),
        at_forward_loss=At(copies.in_forward, before),
        at_loss=At(copies.at_loss, before),
        at_norm=At(copies.at_norm, before + D * e),
        at_layer=at_layer,
        # both parts of a tied gradient, and what they add up to
        at_embedding=At(0, (before or G * e) + (2 * tied + exist_before) * D * e),
        at_optimizer=At(0, G * kept, temporary=optimizer_temporary(setup)),
    )


def _fsdp(setup: Setup) -> Step:
    """Return the step of FSDP. accelerate's units: each layer, the embedding, the final norm with the head.

    The all-gather of a unit fills a flat buffer, which is copied into the unit's parameters; the buffer lives
    until the next unit's buffer is filled. The last unit stays gathered for backward, which gathers one unit
    ahead. A single rank gathers nothing: it copies a unit when it needs it, and none ahead. The state may be
    offloaded, and a preset of `--like` may keep embedding, final norm and head in the root's unit, which is
    gathered during the whole step, or set the sharded gradients to zero instead of freeing them.

    FSDP1 keeps its root gathered, too, and joins a unit's gradients before it sends them. Without an
    auto_wrap_policy it gathers the whole model once, and sends all gradients at the end.
    """
    spec, weights, dtypes, copies = setup.spec, setup.weights, setup.dtypes, _copies(setup)
    fsdp = setup.strategy.fsdp
    is_whole = setup.strategy.is_fsdp1 and fsdp.auto_wrap_policy == "NO_WRAP"
    accumulates = setup.config.gradient_accumulation_steps > 1 or is_whole
    reshards = setup.placement.reshard_after_forward and not is_whole
    gathers_ahead = not setup.strategy.is_fsdp1 or fsdp.backward_prefetch == "BACKWARD_PRE"
    is_alone = setup.shard_ranks == 1 or not gathers_ahead
    P, p, E, share = weights.total, weights.layer, weights.vocabulary, 1 / setup.gpu_state_ranks
    L, w, r = spec.num_layers, dtypes.compute, dtypes.reduced
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    # one unit, which is gathered during the whole step: the head's gradient waits for the embedding's
    like_root = setup.like is not None and setup.like.root_holds_vocabulary
    is_one_unit = spec.tied or setup.has_fsdp1 or like_root
    num_vocabularies = 2 if is_one_unit and not spec.tied else 1
    tail, trained_tail = num_vocabularies * E + spec.hidden_size, D + weights.trained_norm
    gradients = G * share * dtypes.kept_gradient
    state = State(
        *(P * share * dtypes.parameter, G * share * dtypes.master, G * share * dtypes.moments),
        gradients=gradients * setup.keeps_gradients,
    )
    gradients *= not setup.keeps_gradients  # they are in the state already
    before = G * max(dtypes.gradient, r) if accumulates else 0  # unsharded, in the reduction's dtype
    held, held_gradient = (tail, trained_tail) if is_one_unit else (0, 0)
    next_unit = 0 if is_alone else p

    def at_layer(layer: int, made: float) -> At:
        ahead = 0 if is_alone else p if layer else E * (not is_one_unit)
        units = held + p + ahead if reshards else num_vocabularies * E + (layer + 1) * p
        gathered = units * w + copies.in_backward(layer)
        if accumulates:
            return At(gathered, before + held_gradient * w, temporary=weights.widest_trained * w)
        last = 0 if is_one_unit else trained_tail
        kept = (held_gradient + made) * w + (last + (L - 1 - layer) * g) / G * gradients
        return At(gathered, kept, communication=(last if layer == L - 1 else g) * r)

    whole, flat = (0 if reshards else P * w), (next_unit if is_one_unit else tail * (not is_alone))
    in_backward = whole or (tail + next_unit) * w
    of_vocabulary = max(3 * spec.tied, num_vocabularies * (1 + setup.has_fsdp1)) * D * w
    last = of_vocabulary + (before or (G - D) / G * gradients)
    return Step(
        state,
        at_forward_loss=At((whole or tail * w) + flat * w + copies.in_forward, before),
        at_loss=At((whole or tail * w) + copies.at_loss, before),
        at_norm=At(in_backward + copies.at_norm, before + trained_tail * w),
        at_layer=at_layer,
        at_embedding=At(tail * w, last, communication=g * r * (not setup.has_fsdp1)),
        at_optimizer=At(0, gradients, temporary=optimizer_temporary(setup)),
    )


def zero_settings(setup: Setup) -> ZeroSettings:
    return setup.strategy.deepspeed.zero_optimization.of_width(setup.spec.hidden_size)


ZERO_1_SUMS_COPIED = 500_000_000
"most elements of two sums that DeepSpeed copies together: MEMORY_OPT_ALLREDUCE_SIZE of runtime/engine.py"


def _zero_1_in_fp32(setup: Setup) -> Step:
    """Return the step of ZeRO-1 with fp32 gradients: DeepSpeed's BF16_Optimizer.

    It keeps an fp32 sum of all gradients on every rank, between steps, too. The bf16 gradients of a step
    exist besides, because they are added to the sums only after backward. The sums of matrices and those of
    norms are reduced in place, or copied together if they are small (deepspeed 0.19.8,
    runtime/bf16_optimizer.py, and `buffered_allreduce_fallback` of runtime/engine.py). nanotron wraps the
    model in DDP, too, which reduces from its buckets.
    """
    dtypes, G = setup.dtypes, setup.weights.trained
    has_buckets = setup.like is not None and setup.like.zero_1_has_buckets
    found = _replicated(setup, replace(dtypes, kept_gradient=dtypes.gradient), has_buckets)
    share, sums = 1 / setup.gpu_state_ranks, G * dtypes.kept_gradient
    copied = sums if G <= ZERO_1_SUMS_COPIED and not has_buckets else 0
    state = replace(
        found.state,
        master_weights=share * found.state.master_weights,
        optimizer=share * found.state.optimizer,
        gradients=sums,
    )
    ended = found.at_optimizer
    return replace(found, state=state, at_optimizer=replace(ended, temporary=max(copied, ended.temporary)))


def _zero_1_or_2(setup: Setup) -> Step:
    """Return the step of ZeRO-1 or ZeRO-2: whole parameters, gradients that are reduced in buckets.

    A full bucket is sent as a flat copy, and rank 0 keeps its part: the gradients that backward makes last.
    The optimizer copies the gradients of a group into a flat tensor, and casts them to the master weights'
    dtype; widened gradients are flat already.
    """
    spec, weights, dtypes, zero = setup.spec, setup.weights, setup.dtypes, zero_settings(setup)
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    w, L, bucket = dtypes.parameter, spec.num_layers, zero.reduce_bucket_size
    of_head, widest = 0 if spec.tied else D, weights.widest_trained
    share, is_widened, largest = G / setup.gpu_state_ranks, dtypes.kept_gradient > w, D or widest
    partition = G / setup.shard_ranks if is_widened else share
    # the last tensor of a partition is kept whole; widened gradients are cut
    kept = partition if is_widened else max(share, largest)
    kept *= dtypes.kept_gradient
    # rank 0 has the first layers' norms; all of its gradients are kept from the first of them on
    kept_from = max(0, G - partition if is_widened else min(G - partition, G - D - L * g * share / G))
    at = _gradients_in_buckets(setup, kept, kept_from)

    def copied(sent: float) -> float:
        """Return the bytes of copies while a bucket is sent; a large gradient is sent in pieces."""
        piece = min(sent, max(bucket, partition))
        return piece * (w * (piece <= bucket) + dtypes.reduced * (dtypes.reduced != w))

    waiting = D * w * spec.tied  # the head's part of the gradient, for the embedding's

    def at_layer(layer: int, made: float) -> At:
        above = of_head + (L - 1 - layer) * g
        is_sent = (above + made) // bucket > above // bucket
        return at(above + made, waiting, widest * w, copied(bucket) * is_sent)

    # the embedding's gradient may have no room in the bucket; then the last bucket is sent
    filled = (G - D) % bucket
    is_full = filled + D > bucket
    last = D if is_full else filled + D
    ended = at(G, 0, 0, copied(last), last)
    arriving = at(G - D, max(3 * waiting, D * w))
    flat = share * dtypes.kept_gradient * (not is_widened and share > largest)
    cast = share * dtypes.master * (dtypes.master != dtypes.kept_gradient)
    updating = max(flat + cast, (cast or flat) + optimizer_temporary(setup))
    return Step(
        State(weights.total * w, share * dtypes.master, share * dtypes.moments),
        at_forward_loss=at(0),
        at_loss=at(0),
        at_norm=at(of_head, waiting),
        crowded_layers=(min(L - 1, max(0, L - 1 - int((bucket - of_head) / g))),),  # the first one sent
        at_layer=at_layer,
        at_embedding=max(arriving, ended, key=lambda at: at.gradients),
        at_optimizer=At(0, kept, 0, updating),
    )


def _gradients_in_buckets(setup: Setup, kept: float, kept_from: float) -> Callable[..., At]:
    """Return a function: the bytes when backward has made some gradients of ZeRO-1 or ZeRO-2.

    Gradients are copied into a bucket of `reduce_bucket_size` elements; `overlap_comm` fills one while the
    other is sent. One larger than a bucket stays where it is under ZeRO-1 until the step ends. ZeRO-1 reduces
    in the last micro-step only, without overlap_comm when backward has ended.
    `kept`: bytes of rank 0's partition, reduced; it exists once `kept_from` elements have been sent.
    """
    weights, dtypes, zero = setup.weights, setup.dtypes, zero_settings(setup)
    G, D, w, bucket = weights.trained, weights.trained_vocabulary, dtypes.parameter, zero.reduce_bucket_size
    of_head = 0 if setup.spec.tied else D
    accumulates, is_zero_1 = setup.config.gradient_accumulation_steps > 1, zero.stage == 1
    sums_all = accumulates and is_zero_1
    earlier = kept * (accumulates and not is_zero_1)
    # the part of a layer's gradients that is in tensors larger than a bucket
    shapes = weights.adapter_shapes or hidden_matrices(setup.spec).values()
    large = sum(size for size in map(prod, shapes) if size > bucket) / weights.trained_layer
    buckets = (1 + zero.overlaps) * bucket * w

    def kept_at(sent: float) -> float:
        now = kept * (sent > kept_from)
        return max(earlier, now) if dtypes.kept_gradient > w else earlier + now

    def outside(made: float) -> float:
        """Return the elements of gradients outside the buckets."""
        if not is_zero_1:
            return 0
        if not zero.overlaps:
            return made
        of_vocabulary = min(of_head, made) + max(0, made - (G - D))
        return of_vocabulary * (bucket < D) + large * (made - of_vocabulary)

    def at(
        made: float,
        waiting: float = 0.0,
        temporary: float = 0.0,
        copies: float = 0.0,
        last: float | None = None,
    ) -> At:
        """Return the bytes when `made` elements have gradients.

        `copies` live while a bucket is sent, until rank 0 keeps its part. `last`: elements of backward's last
        bucket, which ends it.
        """
        if not made and not sums_all:
            return At(0, earlier + waiting, 0, temporary)
        sent = made - made % bucket if last is None else made
        before = sent - (bucket if last is None else last)
        if is_zero_1 and not zero.overlaps:
            sent, before = made * (last is not None), 0
        gradients = max(kept_at(sent), copies and kept_at(before) + copies) + outside(made) * w
        if sums_all:
            gradients = max(G * w, (G - made) * w + gradients)
        return At(0, waiting + gradients, buckets, temporary)

    return at


def _zero_3(setup: Setup) -> Step:
    """Return the step of ZeRO-3: everything is sharded, and parameters are gathered ahead of use.

    Each module gathers at least one parameter ahead. So forward soon has all that backward needs, as far as
    max_live allows, and backward only frees.
    """
    spec, weights, dtypes, zero = setup.spec, setup.weights, setup.dtypes, zero_settings(setup)
    num_ranks, L, tied = setup.gpu_state_ranks, spec.num_layers, spec.tied
    E, D, w = weights.vocabulary, weights.trained_vocabulary, dtypes.parameter
    needs_embedding = not weights.is_frozen or setup.has_input_gradient
    share = weights.trained / num_ranks
    sizes = [tensor.num_elements for tensor in layer_tensors(spec)]
    sizes += [rows * columns for rows, columns in weights.adapter_shapes]
    of_layer = [size for size in sizes if size > zero.stage3_param_persistence_threshold]
    p, matrix = sum(of_layer), max(of_layer, default=0)
    everything = L * p + E * (not tied) + E * (tied or needs_embedding)  # that backward needs
    ahead = zero.stage3_prefetch_bucket_size
    max_live = zero.stage3_max_live_parameters * (ahead > 0)
    in_loss = min(everything, max(max_live, E))
    in_flat = min(everything, ahead + E * (not tied))  # flat buffers: of the bucket that the head ends

    def gathered(elements: float) -> float:
        return elements * w if num_ranks > 1 else 0

    def at_layer(layer: int, made: float) -> At:
        below = p * (layer + 1 - made / weights.trained_layer)
        elements = below + E * needs_embedding if below <= max_live else max_live + matrix
        # the tied head's part of the gradient waits for the embedding's
        return At(gathered(elements), D * w * tied, 0, weights.widest_trained * w)

    # as under ZeRO-1 and 2, but only for one sub-group of the share at a time
    cast = min(share, zero.sub_group_size) * max(dtypes.kept_gradient, dtypes.master)
    return Step(
        State(
            *(weights.total / num_ranks * w, share * dtypes.master, share * dtypes.moments),
            zero.reduce_bucket_size * dtypes.reduced,
            share * dtypes.kept_gradient,
        ),
        at_last_layer=At(gathered(in_loss + in_flat)),
        at_forward_loss=At(gathered(in_loss)),
        at_loss=At(gathered(in_loss)),
        at_norm=At(gathered(in_loss), D * w),
        crowded_layers=(min(L - 1, max(0, int(max_live // p) - 1)),) if p else (),
        at_layer=at_layer,
        at_embedding=At(E * w * (num_ranks > 1), (3 if tied else 1) * D * w),
        at_optimizer=At(temporary=cast + optimizer_temporary(setup)),
    )


CHUNK_ELEMENTS = 2**25
"gradient elements that `run/engine/optimizer.py` casts at a time; a test compares the two constants"


def optimizer_temporary(setup: Setup) -> float:
    """Return the temporary bytes of the optimizer's step on one rank.

    foreach AdamW makes a temporary tensor for each parameter that it updates, fused AdamW and the Triton
    kernel make none. The toolkit's own optimizer (not PyTorch's AdamW, as with `stock` and under DeepSpeed)
    updates the parameters in chunks. Muon updates as many matrices together as there are ranks.
    """
    dtypes, weights, strategy, config = setup.dtypes, setup.weights, setup.strategy, setup.config
    num_shards = 1 if strategy.is_replicated else setup.gpu_state_ranks
    updated = dtypes.master or dtypes.parameter
    is_muon = config.optim == "muon"
    if config.has_triton_adamw(strategy):
        return 0
    foreach = config.optim == "adamw_torch"
    elements = weights.trained / num_shards  # of one flat tensor
    if strategy.is_zero_3:
        elements = min(elements, zero_settings(setup).sub_group_size)
    if config.numerics == "stock" or setup.like is not None or strategy.is_deepspeed:
        return elements * updated * foreach
    largest = max(weights.trained_vocabulary, weights.widest_trained * (not is_muon)) / num_shards
    elements = min(elements, max(CHUNK_ELEMENTS, largest))
    temporary = elements * (updated * (updated != dtypes.kept_gradient) + updated * foreach)
    return max(temporary, muon_temporary(setup) if is_muon else 0)


def muon_temporary(setup: Setup) -> float:
    """Return the temporary bytes of Muon's update of the largest matrix (`run/engine/muon.py`).

    Newton-Schulz has two versions of the matrix and two products of its smaller side. Alive are also the
    update, and its copy to and from other ranks.
    """
    small, large = max((sorted(shape) for shape in hidden_matrices(setup.spec).values()), key=prod)
    return (4 if setup.compute == FP32 else 2) * (4 * small * large + 2 * small**2)
