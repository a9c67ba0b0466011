"""DeepSpeed's ZeRO: gradients and gathered parameters of hand-worked cases, and traces of small models."""

import dataclasses
import statistics

import pytest
from conftest import bench

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.engine_bytes import At, Reduction, Step, zero_3
from slm_toolkit.predict.memory.zero_gradients import zero_1_or_2
from slm_toolkit.predict.setup.adapters import weights_of
from slm_toolkit.predict.setup.setup import Dtypes
from slm_toolkit.strategy.settings import ZeroSettings
from slm_toolkit.strategy.strategy import find_strategy

# h = q = v = 8, i = 16, V = 40: a vocabulary matrix has 320 elements, a layer's seven 4 x 64 + 3 x 128 = 640,
# a norm 8. In the order of backward: head 320, norm 8, twice (128, 128, 128, 64, 64, 64, 64), embedding 320:
# 1928 elements.
TINY = ModelSpec("tiny", 2, 8, 2, 2, 4, 16, 40)
BF16 = Dtypes(parameter=2, master=4, moments=8, compute=2, gradient=2, reduced=2, kept_gradient=2)
FP32 = dataclasses.replace(BF16, reduced=4, kept_gradient=4)
TWO_BUCKETS = 2 * 10_000 * 2


def step_of(
    dtypes: Dtypes = BF16,
    *,
    spec: ModelSpec = TINY,
    num_ranks: int = 2,
    num_micro_steps: int = 1,
    stage: int = 2,
    bucket: int = 10_000,
    overlap_comm: bool = True,
) -> Step:
    zero = ZeroSettings(stage=stage, reduce_bucket_size=bucket, overlap_comm=overlap_comm)
    weights, ranks = weights_of(spec, None), {"num_gpus": num_ranks, "num_ranks": num_ranks}
    return zero_1_or_2(
        spec, weights, dtypes, zero, **ranks, num_micro_steps=num_micro_steps, optimizer_temporary=0.0
    )


def test_one_bucket_for_all_gradients_is_copied_flat_when_backward_has_ended() -> None:
    found = step_of()
    # the head's gradient (640 bytes) is there when both buckets are allocated, and then copied into one
    assert found.at_reductions[0] == Reduction("lm_head", At(0, 640, TWO_BUCKETS))
    assert found.at_norm == At(0, 0, TWO_BUCKETS)
    # all 1928 elements, flat, 2 bytes each; only then room is made for rank 0's half of the 1920 in matrices
    copied, kept = found.at_reductions[-2:]
    assert copied == Reduction("end", At(0, 0, TWO_BUCKETS, 2 * 1928))
    assert kept == Reduction("end", At(0, 2 * 960, TWO_BUCKETS))
    assert found.at_optimizer.gradients == 2 * 960


def test_rank_0s_gradients_are_kept_when_its_first_one_is_reduced() -> None:
    found = step_of(bucket=400)
    # Head and norm (328) are reduced when layer 1's down comes; its down, up and gate (384) when its o comes.
    # Then o, v, k, q and layer 0's down (384) are reduced when layer 0's up comes.
    assert found.at_layer(0, 128) == At(0, 0, 1600, 2 * 128)
    assert found.at_layer(0, 256) == At(0, 2 * 960, 1600, 2 * 128)
    assert Reduction("", At(0, 256 + 2 * 960, 1600), layer=0, made=256) in found.at_reductions


def test_a_tied_gradient_is_three_times_there_when_it_is_added_up() -> None:
    found = step_of(spec=dataclasses.replace(TINY, tied=True))
    assert found.at_norm == At(0, 640, TWO_BUCKETS)  # the head's part waits
    assert Reduction("embed_tokens", At(0, 3 * 640, TWO_BUCKETS)) in found.at_reductions


def test_fp32_reduction_has_a_flat_copy_and_one_in_fp32_beside_the_partition() -> None:
    found = step_of(FP32)
    assert found.at_reductions[-2].at == At(0, 4 * 964, TWO_BUCKETS, (2 + 4) * 1928)
    # fp32 gradients are flat already and need no cast to the fp32 masters. A fused AdamW allocates nothing.
    # So only the fp64 copy of rank 0's largest gradient is left: the embedding's 40 x 8 elements.
    assert found.at_optimizer == At(0, 4 * 964, 0, 8 * 320)


def test_zero_2_holds_reduced_gradients_twice_in_later_micro_steps_but_fp32_ones_once() -> None:
    found = step_of(num_micro_steps=2, bucket=400)
    assert found.at_loss == At(0, 2 * 960, 0)
    assert found.at_layer(0, 640).gradients == 2 * 2 * 960
    assert step_of(FP32, num_micro_steps=2, bucket=400).at_layer(0, 640).gradients == 4 * 964


def test_zero_1_keeps_all_gradients_and_its_buckets_until_the_last_micro_step() -> None:
    assert step_of(stage=1, num_micro_steps=2).at_loss == At(0, 2 * 1928, TWO_BUCKETS)


def test_a_gradient_larger_than_a_bucket_is_reduced_where_it_lies() -> None:
    # The head's gradient stays until the norm's comes; ZeRO-2 then frees it, ZeRO-1 when backward has ended.
    zero_2, zero_1 = step_of(bucket=300), step_of(bucket=300, stage=1)
    assert (zero_2.at_norm, zero_1.at_norm) == (At(0, 0, 1200), At(0, 640, 1200))
    # of two ranks it is one's alone, and sent without a copy; of 16 ranks' in pieces of about a bucket
    assert Reduction("norm", At(0, 640 + 16, 1200)) in zero_2.at_reductions
    assert (
        Reduction("norm", At(0, 640 + 16, 1200, 2 * 300)) in step_of(bucket=300, num_ranks=16).at_reductions
    )


def test_zero_1_without_overlap_reduces_when_backward_has_ended() -> None:
    found = step_of(stage=1, overlap_comm=False, bucket=400)
    assert found.at_layer(0, 640).gradients == 2 * (1928 - 320)
    assert {reduction.place for reduction in found.at_reductions} == {"lm_head", "end"}


@pytest.mark.parametrize("half", ["small_zero", "small_zero_held_out"])
def test_stored_traces_of_small_models_are_met(half: str) -> None:
    accuracy = bench("memory_accuracy")
    found = accuracy.traces(accuracy.FOLDER / f"{half}.csv")
    assert len(found) >= (160 if half == "small_zero" else 40)
    assert {row["strategy"] for _, row in found} == {"ds_zero1", "ds_zero2"}
    errors = [abs(error) for error, _ in found]
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.03


def gathering(model: str, parameter_bytes: int = 2) -> Step:
    spec = find_model(model)
    zero = find_strategy("ds_zero3").deepspeed.zero_optimization.of_width(spec.hidden_size)
    dtypes = dataclasses.replace(BF16, parameter=parameter_bytes)
    rest = {"num_ranks": 8, "needs_embedding": True, "optimizer_temporary": 0.0}
    return zero_3(spec, weights_of(spec, None), dtypes, zero, **rest)


def test_gathered_parameters_are_those_of_rehearsals() -> None:
    # slm train --model slm-10m --strategy ds_zero3 --rehearse 8 --seq_len 128 --per_device_train_batch_size 1
    # --gradient_accumulation_steps 2, memory_timeline.csv, 2026-11-25; without its 17 norms of 320 elements
    norms = 2 * 17 * 320
    found = gathering("slm-10m")
    assert found.at_last_layer.gathered == 40_632_320 + norms  # twice: all of the model is one bucket
    assert found.at_loss.gathered == 20_316_160 + norms
    assert found.at_layer(3, 0).gathered == 10_158_080 + norms
    found = gathering("slm-100m")
    assert found.at_last_layer.gathered == pytest.approx(331_535_360, rel=0.03)
    assert found.at_loss.gathered == pytest.approx(261_108_224, rel=0.001)
    assert found.at_layer(1, 0).gathered == pytest.approx(87_606_272, rel=0.001)
    found = gathering("slm-2b", 4)  # more than stage3_max_live_parameters
    assert found.at_layer(12, 0).gathered == pytest.approx(837_298_176, rel=0.04)
