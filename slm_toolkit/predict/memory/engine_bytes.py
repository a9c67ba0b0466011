"""Bytes of parameters, gradients, optimizer states and their buffers on one rank, at each instant of a step.

Each engine has one function. Its formulas come from allocation traces of that engine (`slm_toolkit.train
--rehearse`; torch 2.13, accelerate 1.15, deepspeed 0.19.8), on the rank that stores the first parameters.

P: all parameters, p: parameters of a decoder layer, E: parameters of a vocabulary matrix, L: layers; G, g and
D: the trained ones of P, p and E.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices, layer_tensors
from slm_toolkit.predict.setup.adapters import Weights, sharded_adapters
from slm_toolkit.predict.setup.setup import FP32, Dtypes, Setup
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

    @property
    def total(self) -> float:
        return self.gathered + self.gradients + self.communication + self.temporary


@dataclass(frozen=True)
class Reduction:
    """An instant at which gradients are copied together to be sent."""

    place: str
    "lm_head, norm, embed_tokens, or end: after backward"
    at: At
    layer: int | None = None
    made: float = 0.0
    "elements of the layer's matrices that have gradients"


@dataclass(frozen=True)
class Step:
    """One rank's step. Layers are counted from 0.

    `at_layer` takes the layer and the number of its parameters that have a gradient already.
    """

    state: State
    at_forward_loss: At
    at_loss: At
    at_head: At
    at_norm: At
    at_layer: Callable[[int, float], At]
    at_embedding: At
    at_optimizer: At
    at_reductions: tuple[Reduction, ...] = ()
    at_last_layer: At | None = None
    "in the last layer's forward, if more is gathered then than later"
    at_gather: At | None = None
    "when forward gathers the head, if that is an instant of its own"
    crowded_layer: int = 0
    "the layer in whose backward the engine's buffers are largest"


@dataclass(frozen=True)
class Copies:
    """Bytes of the bf16 copies that autocast makes of fp32 weights; 0 without autocast."""

    of_layer: float = 0.0
    trained_of_layer: float = 0.0
    "copies of trained weights: autocast caches them until forward ends"
    of_head: float = 0.0
    recomputed: tuple[bool, ...] = ()
    "whether each layer is checkpointed: its copies are then not saved for backward"
    head_waits: bool = True
    "True if the head's copy is saved for backward"

    def waiting(self, num_layers: int) -> float:
        """Return the bytes of copies that the first `num_layers` layers save for backward."""
        return self.of_layer * (num_layers - sum(self.recomputed[:num_layers]))

    def in_backward(self, layer: int) -> float:
        """Return the bytes of copies in a layer's backward; a checkpointed layer makes its own again."""
        again = self.of_layer if self.recomputed and self.recomputed[layer] else 0
        return self.waiting(layer + 1) + again

    @property
    def in_forward(self) -> float:
        """Bytes of the copies of all layers at the end of forward."""
        return self.waiting(len(self.recomputed)) + self.trained_of_layer * sum(self.recomputed)


NO_COPIES = Copies()


def replicated(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    has_buckets: bool,
    accumulates: bool,
    copies: Copies,
    optimizer_temporary: float,
    keeps_gradients: bool = False,
) -> Step:
    """Return the step of a single process or of DDP: every rank has the whole training state.

    DDP adds buckets as large as all gradients. If gradients are kept in a wider dtype, each is added to its
    sum and freed at once, as in nanotron; DDP makes empty gradients at the end of backward.
    `keeps_gradients`: a step sets gradients to zero instead of freeing them.
    """
    P, L, e = weights.total, spec.num_layers, dtypes.gradient
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    kept, is_summed = dtypes.kept_gradient, dtypes.kept_gradient > e
    buckets = G * e if has_buckets else 0
    state = State(P * dtypes.parameter, G * dtypes.master, G * dtypes.moments, buckets)
    exist_before = accumulates or keeps_gradients
    before = G * kept if exist_before else 0
    widest = weights.widest_trained * e
    held = D * e if spec.tied else 0  # the head's part of the gradient waits for the embedding's

    def at_layer(layer: int, made: float) -> At:
        recomputed = copies.of_layer if copies.recomputed and copies.recomputed[layer] else 0
        gathered = copies.waiting(layer + 1) + recomputed
        if exist_before:
            return At(gathered, before + held, temporary=widest)
        head = D * e if is_summed and spec.tied else D * kept
        sums = head + kept * (weights.trained_norm + (L - 1 - layer) * g + made)
        return At(gathered, sums)

    def at_embedding() -> At:
        if not is_summed:
            return At(0, G * e + (2 + exist_before if spec.tied else exist_before) * D * e)
        sums = before or (G - D) * kept
        parts = (3 if spec.tied else 1) * D * e  # both parts of a tied gradient, and what they add up to
        return At(0, max(sums + parts, G * kept + D * e))

    waiting = copies.waiting(L) + copies.of_head * copies.head_waits
    of_head = D * e  # at the final norm
    if is_summed and not spec.tied:  # it is in the sum already
        of_head = 0 if exist_before else D * kept
    hooks: list[Reduction] = []
    if is_summed and not spec.tied:
        hooks.append(Reduction("lm_head", At(0, (before or D * kept) + D * e)))
    if is_summed and has_buckets:
        hooks.append(Reduction("end", At(0, G * (kept + e))))
    return Step(
        state,
        at_forward_loss=At(copies.in_forward + copies.of_head, before),
        at_loss=At(waiting, before),
        at_head=At(waiting, before + D * e, temporary=copies.of_head * bool(D)),
        at_norm=At(copies.waiting(L), before + of_head),
        at_layer=at_layer,
        at_embedding=at_embedding(),
        at_optimizer=At(0, G * kept, temporary=optimizer_temporary),
        at_reductions=tuple(hooks),
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
    keeps_gradients: bool = False,
    root_holds_vocabulary: bool = False,
    copies: Copies = NO_COPIES,
) -> Step:
    """Return the step of FSDP2. accelerate's units: each layer, the embedding, the final norm with the head.

    The all-gather of a unit fills a flat buffer, which is copied into the unit's parameters; the buffer lives
    until the next unit's buffer is filled. The last unit stays gathered for backward, which gathers one unit
    ahead. A single rank gathers nothing: it copies a unit when it needs it, and none ahead.
    `num_ranks` is the number of shards of the GPU's state, `gathering_ranks` the number of ranks in an
    all-gather; they differ if the state is offloaded. `keeps_gradients`: a step sets the sharded gradients to
    zero instead of freeing them. `root_holds_vocabulary`: embedding, final norm and head are the root's unit,
    which is gathered during the whole step. `copies`: of gathered fp32 weights, if autocast makes them.
    """
    P, p, E, L = weights.total, weights.layer, weights.vocabulary, spec.num_layers
    G, g, D = weights.trained, weights.trained_layer, weights.trained_vocabulary
    w, r, kept = dtypes.compute, dtypes.reduced, dtypes.kept_gradient
    # one unit, which is gathered during the whole step: the head's gradient waits for the embedding's
    is_one_unit = spec.tied or root_holds_vocabulary
    num_vocabularies = 2 if is_one_unit and not spec.tied else 1
    tail = num_vocabularies * E + spec.hidden_size
    trained_tail = D + weights.trained_norm
    share, trained_share, sent = P / num_ranks, G / num_ranks, g
    if weights.is_frozen:  # adapters have few rows, so some ranks have one row and others none
        if num_ranks == gathering_ranks:
            trained_share = L * sharded_adapters(weights, num_ranks)
        share = (P - G) / num_ranks + trained_share
        sent = gathering_ranks * sharded_adapters(weights, gathering_ranks)
        p += sent - g
        P += L * (sent - g)
    sharded = (share * dtypes.parameter, trained_share * dtypes.master, trained_share * dtypes.moments)
    state = State(*sharded, gradients=trained_share * kept * keeps_gradients)
    kept *= not keeps_gradients  # they are in the state already
    before = G * max(dtypes.gradient, r) if accumulates else 0  # unsharded, in the reduction's dtype
    widest = weights.widest_trained * w
    held, held_gradient = (tail, trained_tail) if is_one_unit else (0, 0)
    is_alone = gathering_ranks == 1

    def gathered_at(layer: int) -> float:
        if not reshard_after_forward:
            return (num_vocabularies * E + (layer + 1) * p) * w + copies.in_backward(layer)
        ahead = p if layer else 0 if is_one_unit else E
        return (held + p + ahead * (not is_alone)) * w + copies.in_backward(layer)

    def at_layer(layer: int, made: float) -> At:
        if accumulates:
            return At(gathered_at(layer), before + held_gradient * w, temporary=widest)
        last = 0 if is_one_unit else trained_tail
        reduced_so_far = last + (L - 1 - layer) * g
        return At(
            gathered_at(layer),
            (held_gradient + made) * w + reduced_so_far * trained_share / G * kept,
            communication=(last if layer == L - 1 else sent) * r,
        )

    whole = P * w if not reshard_after_forward else 0
    flat = 0 if is_alone else p if is_one_unit else tail
    next_unit = 0 if is_alone else p
    # a frozen embedding sends no gradient, and the buffer of its all-gather is still allocated
    end = E if weights.is_frozen and not is_one_unit and not is_alone else 0
    waiting = copies.waiting(L) + copies.of_head * copies.head_waits
    return Step(
        state,
        at_gather=None if is_one_unit or is_alone else At((whole or (p + tail) * w) + tail * w, before),
        at_forward_loss=At((whole or tail * w) + flat * w + copies.in_forward + copies.of_head, before),
        at_loss=At((whole or tail * w) + waiting, before),
        at_head=At((whole or (tail + next_unit) * w) + waiting, before + D * w),
        at_norm=At((whole or (tail + next_unit) * w) + copies.waiting(L), before + trained_tail * w),
        at_layer=at_layer,
        at_embedding=At(
            (tail + end) * w,
            (3 if spec.tied else num_vocabularies) * D * w + (before or (G - D) * trained_share / G * kept),
            communication=sent * r,
        ),
        at_optimizer=At(0, trained_share * kept, temporary=optimizer_temporary),
    )


ZERO_1_SUMS_COPIED = 500_000_000
"most elements of two sums that DeepSpeed copies together: MEMORY_OPT_ALLREDUCE_SIZE of runtime/engine.py"


def zero_1_in_fp32(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    num_ranks: int,
    accumulates: bool,
    optimizer_temporary: float,
    has_buckets: bool = False,
) -> Step:
    """Return the step of ZeRO-1 with fp32 gradients: DeepSpeed's BF16_Optimizer.

    It keeps an fp32 sum of all gradients on every rank, between steps, too. The bf16 gradients of a step
    exist besides, because they are added to the sums only after backward. The sums of matrices and those of
    norms are reduced in place, or copied together if they are small (deepspeed 0.19.8,
    runtime/bf16_optimizer.py, and `buffered_allreduce_fallback` of runtime/engine.py). `has_buckets`: the
    model is wrapped in DDP, too, which reduces from its buckets (nanotron).
    """
    G, w = weights.trained, dtypes.parameter
    in_backward = replicated(
        spec,
        weights,
        replace(dtypes, master=0, moments=0, kept_gradient=dtypes.gradient),
        has_buckets=has_buckets,
        accumulates=accumulates,
        copies=Copies(),
        optimizer_temporary=optimizer_temporary,
    )
    share = G / num_ranks
    sums = G * dtypes.kept_gradient
    copied = sums if G <= ZERO_1_SUMS_COPIED and not has_buckets else 0
    buckets = in_backward.state.communication
    return replace(
        in_backward,
        state=State(weights.total * w, share * dtypes.master, share * dtypes.moments, buckets, sums),
        at_reductions=(Reduction("end", At(0, G * dtypes.gradient, temporary=copied)),),
    )


def fsdp1(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    *,
    num_ranks: int,
    reshard_after_forward: bool,
    prefetches: bool,
    wraps_layers: bool,
    accumulates: bool,
    optimizer_temporary: float,
    copies: Copies = NO_COPIES,
) -> Step:
    """Return the step of FSDP1, whose units are each layer and the root; all weights are trained.

    The root holds embedding, final norm and head as one flat parameter, which stays gathered during the whole
    step. Without `wraps_layers` the root is the whole model. `prefetches` is BACKWARD_PRE: backward gathers
    one layer ahead. When a unit's gradients are complete, they are joined in one flat gradient, which is
    reduced and freed; the gradient of the head waits for that of the embedding. `copies`: of gathered fp32
    weights, if autocast makes them; it caches none of them, because they are views. torch 2.13,
    distributed/fsdp/_runtime_utils.py.
    """
    P, p, D, L = weights.total, weights.layer, weights.trained_vocabulary, spec.num_layers
    w, kept, root = dtypes.compute, dtypes.kept_gradient, P - L * p
    if not wraps_layers:
        root, p = P, 0
    share = 1 / num_ranks
    state = State(P * share * dtypes.parameter, P * share * dtypes.master, P * share * dtypes.moments)
    before = P * w if accumulates else 0  # unsharded flat gradients of earlier micro-steps

    def gathered_at(layer: int) -> float:
        if not reshard_after_forward:
            return (root + (layer + 1) * p) * w
        return (root + p * (1 + (prefetches and layer > 0))) * w

    def gradients_at(layer: int) -> float:
        reduced = 0 if accumulates else (L - 1 - layer) * p * share * kept
        waiting = D if wraps_layers else D + (L - 1 - layer) * weights.layer
        return before + waiting * w + reduced

    def at_layer(layer: int, made: float) -> At:
        return At(gathered_at(layer) + copies.in_backward(layer), gradients_at(layer) + made * w)

    def joining(layer: int) -> At:
        gathered = gathered_at(layer) + copies.waiting(layer)
        return At(gathered, gradients_at(layer) + p * w, communication=p * w)

    after_forward = root * w if reshard_after_forward else P * w
    # the loss's backward begins with the gathering of the last layer
    in_loss = after_forward + p * w * (prefetches and reshard_after_forward) + copies.waiting(L)
    of_head = copies.of_head * copies.head_waits
    # the tied head's part of the gradient, the embedding's, and their sum; then all of the root's, joined
    at_end = 2 * root if wraps_layers else 2 * P
    reduced = 0 if accumulates or not wraps_layers else L * p * share * kept
    return Step(
        state,
        at_forward_loss=At(after_forward + copies.waiting(L) + copies.of_head, before),
        at_loss=At(in_loss + of_head, before),
        at_head=At(in_loss + of_head, before + D * w),
        at_norm=At(in_loss, before + D * w),
        at_layer=at_layer,
        at_reductions=tuple(Reduction("", joining(layer), layer, p) for layer in {L - 1, min(1, L - 1), 0}),
        at_embedding=At(root * w, before + max(at_end, 3 * D * spec.tied) * w + reduced),
        at_optimizer=At(0, P * share * kept, temporary=optimizer_temporary),
    )


def zero_3(
    spec: ModelSpec,
    weights: Weights,
    dtypes: Dtypes,
    zero: ZeroSettings,
    *,
    num_ranks: int,
    needs_embedding: bool,
    optimizer_temporary: float,
    num_hidden: int = 0,
) -> Step:
    """Return the step of ZeRO-3: everything is sharded, and parameters are gathered ahead of use.

    Each module gathers at least one parameter ahead. So forward soon has all that backward needs, as far as
    max_live allows, and backward only frees. `num_hidden`: parameters that Muon updates.
    """
    P, E, G, D = weights.total, weights.vocabulary, weights.trained, weights.trained_vocabulary
    w = dtypes.parameter
    share = G / num_ranks
    state = State(
        P / num_ranks * w,
        share * dtypes.master,
        share * dtypes.moments,
        zero.reduce_bucket_size * dtypes.reduced,
        share * dtypes.kept_gradient,
    )
    widest = weights.widest_trained * w
    held = D * w if spec.tied else 0  # the head's part of the gradient waits for the embedding's
    sizes = [tensor.num_elements for tensor in layer_tensors(spec)]
    sizes += [rows * columns for rows, columns in weights.adapter_shapes]
    of_layer = [size for size in sizes if size > zero.stage3_param_persistence_threshold]
    persistent = (sum(sizes) - sum(of_layer)) * spec.num_layers + spec.norm_params
    p, matrix = sum(of_layer), max(of_layer, default=0)
    everything = spec.num_layers * p + E * (not spec.tied)  # that backward needs
    everything += E * (spec.tied or needs_embedding)
    ahead = zero.stage3_prefetch_bucket_size
    max_live = zero.stage3_max_live_parameters * (ahead > 0)
    fits = everything <= max_live

    # as under ZeRO-1 and 2, but only for one sub-group of the share at a time
    stepped = min(max(num_hidden / num_ranks, share - num_hidden / num_ranks), zero.sub_group_size)
    flat = stepped * dtypes.kept_gradient
    cast = stepped * dtypes.master if dtypes.master != dtypes.kept_gradient else 0
    updating = (cast or flat) + optimizer_temporary

    def gathered(elements: float) -> float:
        return (elements + persistent) * w if num_ranks > 1 else 0

    def at_layer(layer: int, made: float) -> At:
        below = p * (layer + 1 - made / weights.trained_layer)
        is_all = below <= max_live
        elements = below + E * needs_embedding if is_all else max_live + matrix
        return At(gathered(elements), held, 0, widest)

    in_loss = everything if fits else max(max_live, E)
    # flat buffers: of the bucket that the head ends, or of two matrices
    in_flat = min(everything, ahead + E * (not spec.tied)) if fits else 2 * matrix
    return Step(
        state,
        at_last_layer=At(gathered(in_loss + in_flat)),
        at_forward_loss=At(gathered(in_loss)),
        at_loss=At(gathered(in_loss)),
        at_head=At(gathered(in_loss), D * w),
        at_norm=At(gathered(in_loss), D * w),
        crowded_layer=min(spec.num_layers - 1, max(0, int(max_live // p) - 1)) if p else 0,
        at_layer=at_layer,
        at_embedding=At(E * w * (num_ranks > 1), (3 if spec.tied else 1) * D * w),
        at_optimizer=At(temporary=max(flat + cast, updating)),
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
    if strategy.is_deepspeed and is_muon:
        return muon_temporary(setup)
    if config.has_triton_adamw(strategy):
        return 0
    foreach = config.optim == "adamw_torch"
    elements = weights.trained / num_shards  # of one flat tensor
    if strategy.is_zero_3:
        zero = strategy.deepspeed.zero_optimization.of_width(setup.spec.hidden_size)
        elements = min(elements, zero.sub_group_size)
    if config.numerics == "stock" or setup.like is not None or strategy.is_deepspeed:
        return elements * updated * foreach
    elements = largest_chunk(
        tensor_shares(setup.spec, num_shards, weights.adapter_shapes, without_layers=is_muon)
    )
    temporary = elements * (updated * (updated != dtypes.kept_gradient) + updated * foreach)
    return max(temporary, muon_temporary(setup) if is_muon else 0)


def muon_temporary(setup: Setup) -> float:
    """Return the temporary bytes of Muon's update of the largest matrix (`run/engine/muon.py`).

    Newton-Schulz has two versions of the matrix and two products of its smaller side. Alive are also the
    update, and its copy to and from other ranks if matrices are sharded. Under DDP, rank 0 keeps its result
    while it computes the updates that other ranks orthogonalize.
    """
    dtypes, num_ranks = setup.dtypes, setup.shard_ranks if setup.strategy.sharded_parts else setup.num_gpus
    computed = 4 if setup.compute == FP32 else 2
    updated = dtypes.master or dtypes.parameter
    cast = updated if dtypes.kept_gradient != updated else 0
    shapes = [sorted(shape) for shape in hidden_matrices(setup.spec).values()]
    size = max(small * large for small, large in shapes)
    squares = max(small * small for small, large in shapes if small * large == size)
    num_versions = 4 if num_ranks > 1 and setup.strategy.sharded_parts else 3
    orthogonalizing = computed * (num_versions * size + 2 * squares)
    if num_ranks == 1 or setup.strategy.sharded_parts:
        return orthogonalizing
    return max(orthogonalizing, size * (3 * computed + cast))


@lru_cache(maxsize=4096)
def tensor_shares(
    spec: ModelSpec,
    num_shards: int,
    adapter_shapes: tuple[tuple[int, int], ...] = (),
    *,
    without_layers: bool = False,
) -> tuple[int, ...]:
    """Return a rank's elements of the matrices that AdamW updates, in the model's order.

    `without_layers`: Muon updates those of the layers.
    """
    if adapter_shapes:
        return (*(-(-rows // num_shards) * columns for rows, columns in adapter_shapes),) * spec.num_layers
    layer = [tensor.num_elements for tensor in layer_tensors(spec) if tensor.is_matrix]
    matrices = [spec.embedding_params, *layer * (0 if without_layers else spec.num_layers)]
    if not spec.tied:
        matrices.append(spec.embedding_params)
    return tuple(-(-size // num_shards) for size in matrices)


@lru_cache(maxsize=4096)
def largest_chunk(shares: tuple[int, ...]) -> int:
    """Return the elements of the optimizer's largest chunk.

    A chunk is a run of parameters, in the model's order, with at most CHUNK_ELEMENTS, or one larger
    parameter.
    """
    largest = run = 0
    for share in shares:
        if run and run + share > CHUNK_ELEMENTS:
            largest, run = max(largest, run), 0
        run += share
    return max(largest, run)
