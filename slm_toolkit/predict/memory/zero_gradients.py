"""The step of DeepSpeed's ZeRO-1 and ZeRO-2: whole parameters, gradients that are reduced in buckets.

Backward copies each gradient into a bucket of `reduce_bucket_size` elements. If the next gradient does not
fit, the bucket is reduced: a flat copy of it is sent, and the gradients of rank 0's partition are kept. A
gradient larger than a bucket stays where it is until the next one is made, under ZeRO-1 until the step ends
(deepspeed 0.19.8, runtime/zero/stage_1_and_2.py). Gradients of the layers' norms and biases are left out.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices, layer_tensors
from slm_toolkit.predict.memory.engine_bytes import At, Reduction, State, Step
from slm_toolkit.predict.setup.adapters import Weights
from slm_toolkit.predict.setup.setup import Dtypes
from slm_toolkit.strategy.settings import ZeroSettings


@lru_cache(maxsize=128)  # the batch does not matter
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
    num_hidden: int = 0,
) -> Step:
    """Return the step of ZeRO-1 or ZeRO-2.

    `num_ranks` is the number of shards of the GPU's state: more than `num_gpus` if the state is offloaded.
    Widened gradients stay on the GPU even then. `num_hidden`: parameters that Muon updates.
    """
    w, L, D = dtypes.parameter, spec.num_layers, weights.trained_vocabulary
    layer = [prod(shape) for shape in weights.adapter_shapes]
    layer = layer or [tensor.num_elements for tensor in layer_tensors(spec) if tensor.is_matrix]
    of_head, of_layer, norm = 0 if spec.tied else D, sum(layer), weights.trained_norm
    # the tensors of the optimizer's groups; the first of each are rank 0's
    groups = [[D, *layer * L, of_head]]
    if num_hidden:
        hidden = [inputs * outputs for inputs, outputs in hidden_matrices(spec).values()]
        groups = [hidden * L, [D, of_head]]
    sizes = (of_head, norm, *layer[::-1] * L, D)
    is_widened = dtypes.kept_gradient > w
    reducing_ranks = num_gpus if is_widened else num_ranks
    partition = kept = sum(sizes) / reducing_ranks
    keeps_from = sum(sizes) - partition
    if not is_widened:  # the last tensor is kept whole, and all are kept from rank 0's last norm on
        kept = sum(next(e for e in accumulate(g) if e >= sum(g) / reducing_ranks) for g in groups)
        num_norms = -(-(2 * L + 1) // reducing_ranks)
        keeps_from = min(keeps_from, sum(sizes) - D - of_layer * (num_norms - 1) / 2)
    gradients = _Gradients(
        sizes, partition, kept * dtypes.kept_gradient, keeps_from, zero, dtypes, num_micro_steps
    )
    head = D * w
    waiting = head * spec.tied  # for the embedding's part of the gradient

    def at_layer(number: int, made: float) -> At:
        above = of_head + norm + (L - 1 - number) * of_layer
        return gradients.at(above + made, waiting, weights.widest_trained * w)

    def reductions() -> Iterator[Reduction]:
        if of_head:
            yield Reduction("lm_head", At(0, gradients.at_loss.gradients + head, gradients.buckets))
        if waiting:  # the embedding's part, and the sum of both
            yield Reduction("embed_tokens", gradients.at(sum(sizes) - D, 3 * head))
        most = 0.0
        for index, at in gradients.reductions():
            number, matrix = divmod(index - 2, len(layer))
            if number < 0:
                yield Reduction("norm", at)
            elif number >= L:
                yield Reduction("end" if index == len(sizes) else "embed_tokens", at)
            elif at.total > most:  # a lower layer has fewer activations
                most = at.total
                at = replace(at, gradients=at.gradients + waiting)
                yield Reduction("", at, L - 1 - number, sum(layer[::-1][: matrix + 1]))

    share = weights.trained / num_ranks
    shares = [(sum(group) / num_ranks, next(filter(None, group))) for group in groups]
    return Step(
        State(weights.total * w, share * dtypes.master, share * dtypes.moments),
        at_forward_loss=gradients.at_loss,
        at_loss=gradients.at_loss,
        at_head=replace(gradients.at_loss, temporary=head),
        at_norm=gradients.at(of_head + norm, waiting),
        at_layer=at_layer,
        at_reductions=tuple(reductions()),
        at_embedding=gradients.at(sum(sizes) - D, waiting, head),
        at_optimizer=At(0, gradients.kept, 0, _of_step(gradients, shares, optimizer_temporary)),
    )


@dataclass(frozen=True)
class _Gradients:
    """The gradients on rank 0 while backward makes them."""

    sizes: tuple[int, ...]
    "elements of the gradients, in the order of backward: the head, the final norm, matrices, the embedding"
    partition: float
    kept: float
    "bytes of rank 0's reduced gradients"
    keeps_from: float
    "reduced elements beyond which rank 0 keeps gradients"
    zero: ZeroSettings
    dtypes: Dtypes
    num_micro_steps: int

    @cached_property
    def ends(self) -> list[int]:
        """Elements that have gradients after each of `sizes`."""
        return list(accumulate(self.sizes))

    @cached_property
    def fills(self) -> list[int]:
        """Elements in the bucket, likewise."""
        bucket = self.zero.reduce_bucket_size
        return list(accumulate(self.sizes, lambda fill, size: size + fill * (fill + size <= bucket)))

    @property
    def buckets(self) -> float:
        """Bytes of the buckets: overlap_comm fills one while the other is sent."""
        size = self.zero.reduce_bucket_size * self.dtypes.parameter
        return (1 + self.zero.overlaps) * size * self.zero.contiguous_gradients

    @property
    def is_widened(self) -> bool:
        return self.dtypes.kept_gradient > self.dtypes.parameter

    @property
    def is_summed(self) -> bool:
        """True if all gradients of earlier micro-steps are there: ZeRO-1 reduces in the last one only."""
        return self.zero.stage == 1 and self.num_micro_steps > 1

    @property
    def reduces_at_end(self) -> bool:
        return self.zero.stage == 1 and not self.zero.overlaps

    @property
    def at_loss(self) -> At:
        return self.at(0, 0)

    def at(self, made: float, waiting: float, temporary: float = 0.0) -> At:
        """Return the bytes when `made` elements have gradients."""
        if self.is_summed:
            return At(0, self.ends[-1] * self.dtypes.parameter + waiting, self.buckets, temporary)
        index = bisect_left(self.ends, made) if made else 0
        reduced = 0 if self.reduces_at_end else self.ends[index] - self.fills[index]
        gradients = waiting + self.kept_at(reduced)
        if not made:
            return At(0, gradients, 0, temporary)
        return At(0, gradients + self.outside(index), self.buckets, temporary)

    def kept_at(self, reduced: float) -> float:
        """Return the bytes of kept gradients, those of earlier micro-steps included."""
        earlier = self.kept * (self.zero.stage == 2 and self.num_micro_steps > 1)
        now = self.kept * (reduced > self.keeps_from)
        return max(earlier, now) if self.is_widened else earlier + now

    def outside(self, index: int) -> float:
        """Return the bytes of gradients outside the buckets after the gradient `index`, without kept ones."""
        zero, made, bucket = self.zero, self.ends[index], self.zero.reduce_bucket_size
        if self.reduces_at_end or (zero.stage == 1 and not zero.contiguous_gradients):
            elements = made
        elif not zero.contiguous_gradients:
            elements = min(made, (1 + zero.overlaps) * bucket)
        else:
            large = self.sizes[: index + 1] if zero.stage == 1 else self.fills[index : index + 1]
            elements = sum(size for size in large if size > bucket)
        return (elements + (self.ends[-1] - made) * self.is_summed) * self.dtypes.parameter

    def reductions(self) -> Iterator[tuple[int, At]]:
        """Yield the index of each gradient that has no room in the bucket, and the bytes at that time."""
        w, reduced, bucket = self.dtypes.parameter, self.dtypes.reduced, self.zero.reduce_bucket_size
        for index, arriving in enumerate((*self.sizes, 0)):
            is_end = index == len(self.sizes)
            is_full = index and self.fills[index - 1] and (is_end or self.fills[index] == arriving)
            if not is_full or (self.reduces_at_end and not is_end):
                continue
            sent, made = self.fills[index - 1], self.ends[index - 1]
            # a large gradient is sent in pieces; one rank's piece is sent without a flat copy
            piece = min(sent, max(bucket, self.partition))
            copies = piece * (w * (piece <= bucket) + reduced * (reduced != w))
            gradients = self.outside(index - 1) + arriving * w * (not self.is_summed)
            before = self.kept_at(made if self.is_widened else made - sent)
            yield index, At(0, gradients + before, self.buckets, copies)
            yield index, At(0, gradients + self.kept_at(made), self.buckets)


def _of_step(gradients: _Gradients, shares: list[tuple[float, int]], temporary: float) -> float:
    """Return the bytes of the optimizer's step besides the reduced gradients.

    Norms are computed in fp64, one gradient at a time. Then the gradients of a group (of `shares`: its share,
    and its first tensor) are copied into a flat tensor, and cast to the master weights' dtype. A widened
    partition or a part of a single gradient is flat already. `temporary`: for the update of the first group.
    """
    dtypes = gradients.dtypes
    most = 8.0 * min(gradients.partition, max(gradients.sizes))
    for share, first in shares:
        flat = share * dtypes.kept_gradient * (not gradients.is_widened and share > first)
        cast = share * dtypes.master * (dtypes.master != dtypes.kept_gradient)
        # contiguous_gradients: one buffer contains all groups, and stays; else copied gradients are freed
        freed = gradients.kept * (not gradients.zero.contiguous_gradients and (flat or cast) > 0)
        most = max(most, flat + cast, (cast or flat) + temporary - freed)
        temporary = 0.0
    return most
