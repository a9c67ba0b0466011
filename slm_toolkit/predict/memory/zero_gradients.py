"""Bytes of gradients on rank 0 at each instant of backward, under DeepSpeed's ZeRO-1 and ZeRO-2.

This follows `DeepSpeedZeroOptimizer` of deepspeed 0.19.8, runtime/zero/stage_1_and_2.py; docstrings name its
functions. Backward computes one gradient after the other. Each gradient is copied into a bucket of
`reduce_bucket_size` elements (DeepSpeed's IPG bucket: "independent partition gradient"). When the next
gradient does not fit, the bucket is reduced: a flat copy of it is sent, and the gradients of rank 0's
partition are copied out of it. A gradient larger than a bucket is reduced without being copied into it. The
last bucket is reduced after backward.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import itemgetter

from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices, layer_tensors
from slm_toolkit.predict.setup.adapters import Weights


@dataclass(frozen=True)
class Tensor:
    """A trained parameter."""

    place: str
    "its module: embed_tokens, norm, lm_head, q_proj, ...; adapter"
    layer: int | None
    num_elements: int
    is_matrix: bool = True
    "False for norms and biases: they are the optimizer's last group, without weight decay"
    is_of_muon: bool = False
    "True in the optimizer's first group with `--optim muon`"

    @property
    def group(self) -> int:
        """The optimizer's group; each group has its own partitions."""
        return 0 if self.is_of_muon else 1 if self.is_matrix else 2


@dataclass(frozen=True)
class Reduction:
    """The settings of DeepSpeed's gradient reduction."""

    stage: int
    num_ranks: int
    bucket: int
    "elements"
    overlap_comm: bool
    contiguous_gradients: bool
    parameter_bytes: int
    "per element of a parameter, and of its gradient in backward"
    reduced_bytes: int
    "per element in the collectives"
    kept_bytes: int
    "per element of the reduced gradient that the optimizer reads"

    @property
    def buckets_bytes(self) -> int:
        """Bytes of the buckets. overlap_comm has two: one is filled while the other is sent."""
        num_buckets = (2 if self.overlap_comm else 1) if self.contiguous_gradients else 0
        return num_buckets * self.bucket * self.parameter_bytes

    @property
    def is_widened(self) -> bool:
        """True if the weights are bf16 and their reduced gradients are kept in fp32."""
        return self.kept_bytes > self.parameter_bytes


@dataclass(frozen=True)
class Allocated:
    """Bytes allocated at one instant."""

    gradients: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.communication


@dataclass(frozen=True)
class GradientBytes:
    """The bytes on rank 0 around the instant when a gradient is computed."""

    tensor: Tensor
    before: Allocated
    "when backward computes the gradient, without its own bytes"
    reducing: Allocated
    "the peak in DeepSpeed's hook, with the gradient"
    after: Allocated


@dataclass(frozen=True)
class Instant:
    """An instant at which DeepSpeed reduces a bucket or allocates its buffers."""

    place: str
    "the module whose gradient's hook reduces or allocates; end: after backward"
    layer: int | None = None
    num_elements: int = 0
    "elements of the layer's matrices that have gradients at that instant"


@dataclass(frozen=True)
class Layer:
    """The backward of one decoder layer."""

    made: dict[str, GradientBytes]
    "keyed by the matrix's name"
    progress: tuple[tuple[int, Allocated], ...]
    "pairs: number of elements of its matrices that have gradients, and the bytes at that instant"

    def held_at(self, num_elements: float) -> Allocated:
        """Return the bytes once at least `num_elements` elements of its matrices have gradients."""
        return self.progress[bisect_left(self.progress, num_elements, key=itemgetter(0))][1]


@dataclass(frozen=True)
class Backward:
    """The backward of a step. With several micro-steps, each instant has the largest bytes among them."""

    at_loss: Allocated
    at_norm: Allocated
    layers: dict[int, Layer]
    at_embedding: Allocated
    "before the embedding's gradient is computed; a tied head's part of the gradient exists already"
    reductions: tuple[tuple[Instant, Allocated], ...]
    crowded_layer: int
    "the layer in whose backward the buffer for reduced gradients is allocated"
    kept: float
    "bytes of reduced gradients when the optimizer's step begins"
    largest_piece: int
    "elements of the largest gradient (or part of a gradient) in rank 0's partition"
    num_matrices: tuple[int, int]
    "number of matrices in rank 0's partitions: Muon's, and the others"


def tensors_of(spec: ModelSpec, weights: Weights, *, by_muon: bool = False) -> tuple[Tensor, ...]:
    """Return the trained parameters in the model's order, which is the order of the partitions, too."""
    if weights.is_frozen:
        shapes = weights.adapter_shapes
        return tuple(
            Tensor("adapter", layer, prod(shape)) for layer in range(spec.num_layers) for shape in shapes
        )
    of_muon = hidden_matrices(spec) if by_muon else {}
    tensors = [Tensor("embed_tokens", None, spec.embedding_params)]
    if spec.learned_positions:
        tensors.append(Tensor("embed_positions", None, spec.learned_positions * spec.hidden_size))
    for layer in range(spec.num_layers):
        tensors += [
            Tensor(
                tensor.name,
                layer,
                tensor.num_elements,
                is_matrix=tensor.is_matrix,
                is_of_muon=tensor.is_matrix and tensor.name in of_muon,
            )
            for tensor in layer_tensors(spec)
        ]
    tensors.append(Tensor("norm", None, spec.norm_params, is_matrix=False))
    if not spec.tied:
        tensors.append(Tensor("lm_head", None, spec.embedding_params))
    return tuple(tensors)


IN_BACKWARD = (
    "lm_head",
    "norm",
    "post_feedforward_layernorm",
    "shared_down_proj",
    "shared_up_proj",
    "down_proj",
    "up_proj",
    "gate_proj",
    "gate_up_proj",
    "router",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "o_proj",
    "v_proj",
    "k_norm",
    "k_proj",
    "q_norm",
    "q_proj",
    "qkv_proj",
    "kv_b_proj",
    "kv_a_proj",
    "q_b_proj",
    "q_a_proj",
    "input_layernorm",
    "embed_positions",
    "embed_tokens",
)
"modules in the order in which backward computes their gradients"


def in_backward(tensors: tuple[Tensor, ...]) -> list[int]:
    """Return the tensors' indices in the order in which backward computes their gradients."""
    rank = {place: index for index, place in enumerate(IN_BACKWARD)}
    last = max(tensor.layer or 0 for tensor in tensors)

    def order(index: int) -> tuple[int, int]:
        tensor = tensors[index]
        if tensor.layer is None:  # head and final norm before all layers, embeddings after them
            return (-1 if tensor.place in ("lm_head", "norm") else last + 1), rank[tensor.place]
        return last - tensor.layer, -index if tensor.place == "adapter" else rank[tensor.place]

    return sorted(range(len(tensors)), key=order)


@dataclass(frozen=True)
class _Share:
    """The ranks whose partitions contain a part of a tensor."""

    first_rank: int
    last_rank: int
    first_piece: int
    "the tensor's elements in the first rank's partition"
    partition: int
    "elements of each rank's partition of the tensor's group"


def _shares(tensors: tuple[Tensor, ...], num_ranks: int) -> list[_Share]:
    """Return each tensor's share. DeepSpeed splits a group into equal partitions of an even size."""
    shares = {}
    for number in range(3):
        group = [index for index, tensor in enumerate(tensors) if tensor.group == number]
        num_elements = sum(tensors[index].num_elements for index in group)
        partition = 2 * -(-num_elements // (2 * num_ranks))  # nccl_start_alignment_factor
        start = 0
        for index in group:
            end = start + tensors[index].num_elements
            first_rank = start // partition
            piece = min(end, (first_rank + 1) * partition) - start
            shares[index] = _Share(first_rank, (end - 1) // partition, piece, partition)
            start = end
    return [shares[index] for index in range(len(tensors))]


_GROUPS = {0, 1, 2}


class _Rank:
    """The bytes of rank 0 during a micro-step that reduces gradients."""

    def __init__(self, reduction: Reduction, tensors: tuple[Tensor, ...], shares: list[_Share]) -> None:
        self.reduction, self.tensors, self.shares = reduction, tensors, shares
        self.outside: dict[int, int] = {}
        "bytes of gradients outside the bucket, by the tensor's index"
        self.outside_bytes = 0
        self.kept_bytes = 0
        "reduced gradients of rank 0's partition, including those of earlier micro-steps"
        self.has_room: set[int] = set()
        "groups whose buffer for reduced gradients is allocated in this micro-step"
        self.bucket: list[int] = []
        self.bucket_elements = 0
        self.freed_next: list[int] = []
        "with overlap_comm and without contiguous_gradients, the next reduction frees these"
        self.communication_bytes = 0
        self.crowded_layer: int | None = None
        self.most = Allocated()
        "the peak since the last `forget`"

    @property
    def held(self) -> Allocated:
        return Allocated(self.outside_bytes + self.kept_bytes, self.communication_bytes)

    def look(self, temporary_bytes: int = 0) -> None:
        """Update the peak with the bytes of now."""
        gradients, others = self.outside_bytes + self.kept_bytes, self.communication_bytes + temporary_bytes
        if gradients + others > self.most.total:
            self.most = Allocated(gradients, others)

    def forget(self) -> Allocated:
        """Return the peak and reset it."""
        most, self.most = self.most, Allocated()
        return most

    def put_outside(self, index: int) -> None:
        """Allocate a gradient, unless an earlier micro-step has: then backward adds to that tensor."""
        if index not in self.outside:
            self.outside[index] = self.tensors[index].num_elements * self.reduction.parameter_bytes
            self.outside_bytes += self.outside[index]

    def free(self, index: int) -> None:
        self.outside_bytes -= self.outside.pop(index, 0)

    def arrive(self, index: int) -> None:
        """Put a gradient into the bucket: reduce_independent_p_g_buckets_and_remove_grads."""
        how, num_elements = self.reduction, self.tensors[index].num_elements
        if self.bucket_elements + num_elements > how.bucket:
            self.reduce()
            if self.has_room and self.crowded_layer is None:
                self.crowded_layer = self.tensors[index].layer
        if how.contiguous_gradients and num_elements <= how.bucket:
            self.free(index)
        self.bucket.append(index)
        self.bucket_elements += num_elements

    def reduce(self) -> None:
        """Reduce the bucket and empty it: reduce_ipg_grads."""
        how = self.reduction
        if how.is_widened and how.contiguous_gradients:
            self._make_widened_room()
        for index in self.freed_next:
            self.free(index)
        self.freed_next = []
        self.look(self._sent_bytes())
        if how.is_widened and not how.contiguous_gradients:  # while the sent copy is allocated
            self._make_widened_room()
            self.look(self.bucket_elements * how.reduced_bytes)
        for index in self.bucket:
            in_partition = self.shares[index].first_rank == 0
            if in_partition and how.contiguous_gradients and not how.is_widened:  # copy_grads_in_partition
                self._make_room()
                self.look()
                self.free(index)
            elif not in_partition and how.stage == 2:
                if how.overlap_comm and not how.contiguous_gradients:
                    self.freed_next.append(index)
                else:
                    self.free(index)
        self.bucket, self.bucket_elements = [], 0

    def _make_room(self) -> None:
        """Allocate grads_in_partition: all tensors with a part in rank 0's partition, each of them whole."""
        if not self.has_room:
            self.has_room = _GROUPS
            self.kept_bytes += _kept_bytes(self.reduction, self.tensors, self.shares)

    def _make_widened_room(self) -> None:
        """Allocate a buffer per group for rank 0's partition only: _build_compact_grad_partition_buffer."""
        for index in self.bucket:
            group = self.tensors[index].group
            if self.shares[index].first_rank == 0 and group not in self.has_room:
                self.has_room.add(group)
                self.kept_bytes += self.shares[index].partition * self.reduction.kept_bytes

    def _sent_bytes(self) -> int:
        """Return the bytes of the bucket's flat copy and its cast copy: average_tensor, allreduce_bucket.

        Adjacent gradients for the same rank are one slice. A single slice is sent without a flat copy.
        """
        how, bucket = self.reduction, self.bucket
        flat, cast = how.parameter_bytes, how.reduced_bytes * (how.reduced_bytes != how.parameter_bytes)
        if not bucket:
            return 0
        if not how.contiguous_gradients:
            return self.bucket_elements * (flat * (len(bucket) > 1) + cast)
        first = self.shares[bucket[0]]
        if self.bucket_elements > how.bucket:
            return _sent_bytes_of_large(self.bucket_elements, first, how.bucket, flat, cast)
        ranks = {
            rank for index in bucket for rank in (self.shares[index].first_rank, self.shares[index].last_rank)
        }
        is_single = len(ranks) == 1 and not (how.is_widened and 0 in ranks and len(bucket) > 1)
        return self.bucket_elements * (flat * (not is_single) + cast)


def _sent_bytes_of_large(num_elements: int, share: _Share, bucket: int, flat: int, cast: int) -> int:
    """Return the same for a gradient larger than a bucket, which allreduce_and_scatter sends in pieces."""
    first, piece = share.first_piece, share.partition
    if first <= bucket:
        first += ((bucket - first) // piece + 1) * piece
    first = min(first, num_elements)
    later = min(num_elements - first, piece if piece > bucket else (bucket // piece + 1) * piece)
    return max(
        first * (flat * (first > share.first_piece) + cast),
        later * (flat * (later > piece) + cast),
    )


def _kept_bytes(reduction: Reduction, tensors: tuple[Tensor, ...], shares: list[_Share]) -> int:
    """Return the bytes of rank 0's reduced gradients; unless widened, the last tensor counts whole."""
    in_partition = [index for index, share in enumerate(shares) if share.first_rank == 0]
    if reduction.is_widened:
        partitions = {tensors[index].group: shares[index].partition for index in in_partition}
        return sum(partitions.values()) * reduction.kept_bytes
    return sum(tensors[index].num_elements for index in in_partition) * reduction.kept_bytes


@lru_cache(maxsize=128)
def backward_of(
    spec: ModelSpec, weights: Weights, reduction: Reduction, *, num_micro_steps: int, by_muon: bool = False
) -> Backward:
    """Return the backward of a step. `by_muon`: Muon updates the hidden matrices.

    It is cached because it does not depend on the batch, and takes longer than the rest of an estimate.
    """
    tensors = tensors_of(spec, weights, by_muon=by_muon)
    shares = _shares(tensors, reduction.num_ranks)
    kept = _kept_bytes(reduction, tensors, shares)
    # autograd keeps the head's part of a tied gradient until it has the embedding's part
    waiting = weights.trained_vocabulary * reduction.parameter_bytes * spec.tied
    rank = _Rank(reduction, tensors, shares)
    if num_micro_steps > 1 and reduction.stage == 2:
        rank.kept_bytes = kept
        rank.has_room = _GROUPS if reduction.is_widened else set()
    elif num_micro_steps > 1:  # ZeRO-1 reduces in the last micro-step only
        for index in range(len(tensors)):
            rank.put_outside(index)
        rank.communication_bytes = reduction.buckets_bytes
    at_loss = rank.held
    made = _reducing(rank, waiting)
    if num_micro_steps > 1 and reduction.stage == 1:
        others = _not_reducing(reduction, tensors, waiting, is_first=num_micro_steps == 2)
        made = [_most(*pair) for pair in zip(made, others, strict=True)]
    rank.reduce()
    rank.look()
    at_end = rank.forget()
    in_partition = [index for index, share in enumerate(shares) if share.first_rank == 0]
    outside = {gradient.tensor.place: gradient for gradient in made if gradient.tensor.layer is None}
    return Backward(
        at_loss,
        at_norm=outside["norm"].after if "norm" in outside else at_loss,
        layers=_layers(made),
        at_embedding=outside["embed_tokens"].before if "embed_tokens" in outside else at_end,
        reductions=(*_reductions(made, waiting, reduction), (Instant("end"), at_end)),
        crowded_layer=rank.crowded_layer or 0,
        kept=kept,
        largest_piece=max(
            min(tensors[index].num_elements, shares[index].first_piece) for index in in_partition
        ),
        num_matrices=tuple(sum(tensors[index].group == group for index in in_partition) for group in (0, 1)),
    )


def _layers(made: list[GradientBytes]) -> dict[int, Layer]:
    layers: dict[int, Layer] = {}
    for gradient in made:
        tensor = gradient.tensor
        if tensor.layer is None:
            continue
        layer = layers.get(tensor.layer, Layer({}, ((0, gradient.before),)))
        *earlier, last = layer.progress
        if tensor.is_matrix:
            progress = (*earlier, last, (last[0] + tensor.num_elements, gradient.after))
            layer = Layer({**layer.made, tensor.place: gradient}, progress)
        else:  # a norm or a bias counts with the matrix before it
            layer = replace(layer, progress=(*earlier, (last[0], gradient.after)))
        layers[tensor.layer] = layer
    return layers


def _reductions(
    made: list[GradientBytes], waiting_bytes: int, reduction: Reduction
) -> list[tuple[Instant, Allocated]]:
    """Return the hooks in which rank 0 needs more bytes than when the gradient was computed.

    A hook counts only if it needs more than the same module's hooks in the layers above: a lower layer has
    fewer saved activations.
    """
    reductions: list[tuple[Instant, Allocated]] = []
    most: dict[tuple[str, int, int], float] = {}
    num_elements, layer = 0, None
    for gradient in made:
        tensor, held = gradient.tensor, gradient.reducing
        if tensor.layer != layer:
            num_elements, layer = 0, tensor.layer
        num_elements += tensor.num_elements * (tensor.is_matrix and layer is not None)
        own_bytes = tensor.num_elements * reduction.parameter_bytes
        if tensor.place == "embed_tokens" and waiting_bytes:  # both parts, and their sum
            adding = gradient.before.gradients + 2 * own_bytes
            reductions.append((Instant(tensor.place), replace(gradient.before, gradients=adding)))
        if held.total <= gradient.before.total + own_bytes:
            continue
        key = (tensor.place, num_elements, (layer or 0) % 2)  # selective_layer recomputes every second layer
        if held.total > most.get(key, 0.0):
            most[key] = held.total
            reductions.append((Instant(tensor.place, layer, num_elements), held))
    return reductions


def _reducing(rank: _Rank, waiting_bytes: int) -> list[GradientBytes]:
    """Return the gradients of a micro-step that reduces; the caller reduces the last bucket."""
    made, how = [], rank.reduction
    at_once = how.stage == 2 or how.overlap_comm
    rank.kept_bytes += waiting_bytes
    for index in in_backward(rank.tensors):
        before = rank.held
        if rank.tensors[index].place == "embed_tokens":
            rank.kept_bytes -= waiting_bytes
        rank.put_outside(index)
        rank.communication_bytes = how.buckets_bytes
        rank.look()
        if at_once:
            rank.arrive(index)
        made.append(GradientBytes(rank.tensors[index], before, rank.forget(), rank.held))
    if not at_once:  # reduce_gradients, group by group
        for index in sorted(rank.outside, key=lambda index: (rank.tensors[index].group, index)):
            rank.arrive(index)
    return made


def _not_reducing(
    reduction: Reduction, tensors: tuple[Tensor, ...], waiting_bytes: int, *, is_first: bool
) -> list[GradientBytes]:
    """Return the gradients of a micro-step of ZeRO-1 before the last: they are summed in `param.grad`."""
    made, buckets = [], reduction.buckets_bytes
    sizes = [tensor.num_elements * reduction.parameter_bytes for tensor in tensors]
    held = Allocated(waiting_bytes + (0 if is_first else sum(sizes)), 0 if is_first else buckets)
    for index in in_backward(tensors):
        before, size = held, sizes[index]
        of_head = waiting_bytes if tensors[index].place == "embed_tokens" else 0
        held = Allocated(before.gradients - of_head + size * is_first, buckets)
        reducing = replace(held, gradients=held.gradients + size * (not is_first))
        made.append(GradientBytes(tensors[index], before, reducing, held))
    return made


def _most(first: GradientBytes, second: GradientBytes) -> GradientBytes:
    """Return a gradient that two micro-steps compute, with the larger bytes at each instant."""

    def larger(*instants: Allocated) -> Allocated:
        return max(instants, key=lambda held: held.total)

    return GradientBytes(
        first.tensor,
        larger(first.before, second.before),
        larger(first.reducing, second.reducing),
        larger(first.after, second.after),
    )
