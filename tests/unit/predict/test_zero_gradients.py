"""DeepSpeed's ZeRO: gradients and gathered parameters of hand-worked cases."""

import dataclasses

import pytest

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.engine_bytes import At, Step, step_of
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

# h = q = v = 8, i = 16, V = 40: a vocabulary matrix has 320 elements, a layer's seven 4 x 64 + 3 x 128 = 640
# and its norms 16, the final norm 8: 2 x 320 + 2 x 656 + 8 = 1960 elements
TINY = ModelSpec("tiny", 2, 8, 2, 2, 4, 16, 40)
TWO_BUCKETS = 2 * 10_000 * 2


def step_of_tiny(
    strategy: str = "ds_zero2", *, spec: ModelSpec = TINY, bucket: int = 10_000, **flags: object
) -> Step:
    config = RunConfig(model="slm-1m", kernels="plain", **flags).with_defaults(has_gpu=True)
    found = find_strategy(strategy)
    zero = {"stage": found.zero_stage, "reduce_bucket_size": bucket, "overlap_comm": True}
    found = dataclasses.replace(found, deepspeed_config={"zero_optimization": zero})
    return step_of(Setup(spec, found, config, num_gpus=2))


def test_one_bucket_for_all_gradients_is_copied_flat_when_backward_has_ended() -> None:
    found = step_of_tiny()
    assert found.at_norm == At(0, 0, TWO_BUCKETS)
    # all 1960 elements, flat, 2 bytes each; only then room is made for rank 0's half
    assert found.at_embedding == At(0, 2 * 1960, TWO_BUCKETS)
    assert found.at_optimizer.gradients == 2 * 980


def test_rank_0s_gradients_are_kept_when_its_first_ones_are_sent() -> None:
    found = step_of_tiny(bucket=400)
    # layer 0 with 256 elements has 320 + 656 + 256 = 1232 of 1960: three buckets of 400 are sent, the third
    # beyond rank 1's half
    assert found.at_layer(0, 256).gradients == 2 * 980
    # layer 1 with 128: one bucket, of which rank 0 keeps nothing; it is sent as a flat copy
    assert found.at_layer(1, 128) == At(0, 2 * 400, 1600, 2 * 128)


def test_a_tied_gradient_is_three_times_there_when_it_is_added_up() -> None:
    found = step_of_tiny(spec=dataclasses.replace(TINY, tied=True, vocab_size=4000))
    assert found.at_norm == At(0, 2 * 32_000, 0)  # the head's part waits
    assert found.at_embedding == At(0, 3 * 2 * 32_000, TWO_BUCKETS)


def test_zero_2_holds_reduced_gradients_twice_in_later_micro_steps() -> None:
    found = step_of_tiny(gradient_accumulation_steps=2, bucket=400)
    assert found.at_loss == At(0, 2 * 980, 0)
    assert found.at_layer(0, 640).gradients == 2 * (2 * 980 + 400)  # and a bucket's flat copy


def test_zero_1_keeps_all_gradients_and_its_buckets_until_the_last_micro_step() -> None:
    found = step_of_tiny("ds_zero1", gradient_accumulation_steps=2)
    assert found.at_loss == At(0, 2 * 1960, TWO_BUCKETS)


def test_a_gradient_larger_than_a_bucket_is_reduced_where_it_lies() -> None:
    # The head's gradient stays until the norm's comes; ZeRO-2 then frees it, ZeRO-1 when backward has ended.
    zero_2, zero_1 = step_of_tiny(bucket=300), step_of_tiny("ds_zero1", bucket=300)
    assert (zero_2.at_norm, zero_1.at_norm) == (At(0, 0, 1200), At(0, 640, 1200))


def gathering(model: str, numerics: str = "aligned") -> Step:
    config = RunConfig(model=model, numerics=numerics).with_defaults(has_gpu=True)
    return step_of(Setup(find_model(model), find_strategy("ds_zero3"), config, num_gpus=8))


def test_gathered_parameters_are_those_of_rehearsals() -> None:
    # slm train --model slm-10m --strategy ds_zero3 --rehearse 8 --seq_len 128 --per_device_train_batch_size 1
    # --gradient_accumulation_steps 2, memory_timeline.csv, 2026-11-25; without its 17 norms of 320 elements
    found = gathering("slm-10m")
    # twice: all of the model is one bucket
    gathered = [at.gathered for at in (found.at_last_layer, found.at_loss, found.at_layer(3, 0))]
    assert gathered == [40_632_320, 20_316_160, 10_158_080]
    found = gathering("slm-100m")
    assert found.at_last_layer.gathered == pytest.approx(331_535_360, rel=0.03)
    gathered = [at.gathered for at in (found.at_loss, found.at_layer(1, 0))]
    assert gathered == pytest.approx([261_108_224, 87_606_272], rel=0.001)
    found = gathering("slm-2b", "fp32")  # more than stage3_max_live_parameters
    assert found.at_layer(12, 0).gathered == pytest.approx(837_298_176, rel=0.04)
