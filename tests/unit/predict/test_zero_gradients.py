"""Gradients under ZeRO-1 and ZeRO-2: hand-worked cases, and traces of DeepSpeed on small models."""

import dataclasses

import pytest
from conftest import bench

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.engine_bytes import zero_1_or_2
from slm_toolkit.predict.memory.zero_gradients import (
    Allocated,
    Backward,
    Instant,
    Reduction,
    backward_of,
    in_backward,
    tensors_of,
)
from slm_toolkit.predict.setup.adapters import weights_of
from slm_toolkit.predict.setup.setup import Dtypes
from slm_toolkit.strategy.settings import ZeroSettings

# h = q = v = 8, i = 16, V = 40: a vocabulary matrix has 320 elements, a layer's seven 4 x 64 + 3 x 128 = 640,
# a norm 8. Matrices: 2 x 320 + 2 x 640 = 1920 elements, norms 5 x 8 = 40.
TINY = ModelSpec("tiny", 2, 8, 2, 2, 4, 16, 40)
TIED = dataclasses.replace(TINY, tied=True)  # matrices: 1600 elements
BF16 = Reduction(
    stage=2,
    num_ranks=2,
    bucket=10_000,
    overlap_comm=True,
    contiguous_gradients=True,
    parameter_bytes=2,
    reduced_bytes=2,
    kept_bytes=2,
)
FP32 = dataclasses.replace(BF16, reduced_bytes=4, kept_bytes=4)
TWO_BUCKETS = 2 * 10_000 * 2


def backward(
    reduction: Reduction, spec: ModelSpec = TINY, *, num_micro_steps: int = 1, **changes: object
) -> Backward:
    changed = dataclasses.replace(reduction, **changes)
    return backward_of(spec, weights_of(spec, None), changed, num_micro_steps=num_micro_steps)


def test_gradients_are_made_from_the_head_to_the_embedding() -> None:
    tensors = tensors_of(TINY, weights_of(TINY, None))
    order = [(tensors[index].place, tensors[index].layer) for index in in_backward(tensors)]
    assert order[:3] == [("lm_head", None), ("norm", None), ("down_proj", 1)]
    assert order[10:13] == [("input_layernorm", 1), ("down_proj", 0), ("up_proj", 0)]
    assert order[-1] == ("embed_tokens", None)


def test_one_bucket_for_all_gradients_is_copied_flat_when_backward_has_ended() -> None:
    found = backward(BF16)
    # the head's gradient (640 bytes) is there when both buckets are allocated, and then copied into one
    assert found.reductions[0] == (Instant("lm_head"), Allocated(640, TWO_BUCKETS))
    assert found.at_norm == found.at_embedding == Allocated(0, TWO_BUCKETS)
    # all 1960 elements, flat, 2 bytes each; only then room is made for those of rank 0
    assert found.reductions[-1] == (Instant("end"), Allocated(0, TWO_BUCKETS + 3920))
    # rank 0's partition is 960 elements, the embedding and layer 0, and 20 of norms: three whole norms
    assert found.kept == 2 * (960 + 24)
    assert (found.largest_piece, found.num_matrices) == (320, (0, 8))


def test_room_for_rank_0s_gradients_is_made_when_its_first_one_is_reduced() -> None:
    found = backward(BF16, bucket=400)
    # Head and norm (328 elements) are reduced when layer 1's down (128) comes; layer 1's down, up, gate and
    # norm (392) when its o comes. All of that is rank 1's, and sent without a copy. Then o, v, k, q, a norm
    # that both ranks have a half of, and layer 0's down (392) are reduced when layer 0's up comes: 1968 bytes
    # for rank 0 are allocated beside the 256 of up's gradient.
    (where, held) = found.reductions[1]
    assert where == Instant("up_proj", layer=0, num_elements=256)
    assert held == Allocated(256 + 1968, 2 * 400 * 2)
    assert found.crowded_layer == 0
    assert found.layers[0].held_at(128) == Allocated(0, 1600)
    assert found.layers[0].held_at(256) == Allocated(1968, 1600)


def test_a_tied_gradient_is_counted_once_and_is_three_times_there_when_it_is_added_up() -> None:
    found = backward(BF16, TIED)
    assert found.at_norm == Allocated(640, TWO_BUCKETS)  # the head's part waits in autograd
    assert found.layers[1].held_at(640) == Allocated(640, TWO_BUCKETS)
    assert (Instant("embed_tokens"), Allocated(3 * 640, TWO_BUCKETS)) in found.reductions
    assert found.reductions[-1] == (Instant("end"), Allocated(0, TWO_BUCKETS + 2 * 1640))


def test_fp32_reduction_has_bf16_buckets_a_flat_copy_and_one_in_fp32() -> None:
    found = backward(FP32, TIED)
    # rank 0's partition alone: 800 elements of matrices and 20 of norms, 4 bytes each
    assert found.kept == 4 * 820
    # beside it 1640 elements flat in bf16 and in fp32
    assert found.reductions[-1] == (Instant("end"), Allocated(3280, TWO_BUCKETS + 6 * 1640))


def test_zero_2_holds_reduced_gradients_twice_in_later_micro_steps_but_fp32_ones_once() -> None:
    # 1968 bytes of the micro-step before from the first instant, the new ones beside them in the end
    found = backward(BF16, num_micro_steps=2, bucket=400)
    assert found.at_loss == Allocated(1968, 0)
    assert found.layers[0].held_at(640) == Allocated(2 * 1968, 1600)
    widened = backward(FP32, num_micro_steps=2, bucket=400)  # (960 + 20) x 4 bytes
    assert widened.at_loss.gradients == widened.at_embedding.gradients == widened.kept == 3920


def test_zero_1_keeps_all_gradients_and_its_buckets_until_the_last_micro_step() -> None:
    found = backward(BF16, stage=1, num_micro_steps=2)
    assert found.at_loss == Allocated(2 * 1960, TWO_BUCKETS)
    # two micro-steps: each gradient goes from param.grad into the bucket in the second, is made in the first
    after_layer_1 = found.layers[1].held_at(640).gradients
    assert after_layer_1 == 2 * max(320 + 8 + 640 + 16, 1960 - (320 + 8 + 640 + 16))
    # three: the second has whole gradients all the time
    assert backward(BF16, stage=1, num_micro_steps=3).at_embedding == Allocated(2 * 1960, TWO_BUCKETS)


def test_a_gradient_larger_than_a_bucket_is_reduced_where_it_lies() -> None:
    # The head's 320 elements do not fit into a bucket of 300: its gradient stays until the norm's comes. It
    # is rank 1's alone, sent without a copy. ZeRO-2 then frees it, ZeRO-1 when backward has ended.
    zero_2, zero_1 = backward(BF16, bucket=300), backward(BF16, bucket=300, stage=1)
    assert zero_2.at_norm == Allocated(0, 1200)
    assert zero_1.at_norm == Allocated(640, 1200)
    # On 16 ranks a partition has 120 elements. The head begins at element 1600, 40 after rank 13's first: its
    # pieces of 80, 120 and 120 are sent together, since the first two are not more than 300.
    pieces = backward(BF16, bucket=300, num_ranks=16)
    assert (Instant("norm"), Allocated(640 + 16, 1200 + 640)) in pieces.reductions


def test_the_norm_of_the_largest_gradient_is_computed_in_fp64() -> None:
    # fp32 gradients are flat already and need no cast to the fp32 masters. A fused AdamW allocates nothing.
    # So only the fp64 copy of rank 0's largest gradient is left: the embedding's 40 x 8 elements.
    dtypes = Dtypes(parameter=2, master=4, moments=8, compute=2, gradient=2, reduced=4, kept_gradient=4)
    step = zero_1_or_2(
        TINY,
        weights_of(TINY, None),
        dtypes,
        ZeroSettings(stage=2, reduce_bucket_size=10_000, overlap_comm=True),
        num_gpus=2,
        num_ranks=2,
        num_micro_steps=1,
        optimizer_temporary=0.0,
    )
    assert step.at_optimizer.temporary == 8 * 320


def test_without_contiguous_gradients_there_are_no_buckets_and_gradients_stay_until_they_are_sent() -> None:
    found = backward(BF16, contiguous_gradients=False, overlap_comm=False)
    assert found.at_norm == Allocated(2 * (320 + 8), 0)
    assert found.at_embedding == Allocated(2 * (1960 - 320), 0)
    assert found.reductions[-1] == (Instant("end"), Allocated(3920, 3920))


@pytest.mark.parametrize("half", ["small_zero", "small_zero_held_out"])
def test_stored_traces_of_small_models_are_met(half: str) -> None:
    accuracy = bench("memory_accuracy")
    found = accuracy.traces(accuracy.FOLDER / f"{half}.csv")
    assert len(found) >= (200 if half == "small_zero" else 50)
    assert {row["strategy"] for _, row in found} == {"ds_zero1", "ds_zero2"}
    assert max(abs(error) for error, _ in found) <= 0.005
    for error, row in found:  # the columns are today's
        assert float(row["error"]) == pytest.approx(error, abs=1e-6)
        assert int(row["estimated_bytes"]) == accuracy.estimate_of(row).peak_bytes
