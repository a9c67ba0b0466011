"""Gathered parameters under ZeRO-3, by hand and against bytes of rehearsals."""

import dataclasses

import msgspec
import pytest

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.zero3_gathers import Gathered, gathered_of
from slm_toolkit.strategy.strategy import find_strategy

# slm-10m: 8 layers, q, k, v, o of 320 x 320 = 102,400 and three FFN matrices of 320 x 864 = 276,480
LAYER = 4 * 102_400 + 3 * 276_480
VOCABULARY = 122_880  # 384 x 320
ALL = 8 * LAYER + 2 * VOCABULARY


def gathered(model: str | ModelSpec, checkpointing: bool = False, **zero: int) -> Gathered:
    spec = find_model(model) if isinstance(model, str) else model
    settings = find_strategy("ds_zero3").deepspeed.zero_optimization.of_width(spec.hidden_size)
    recomputed = (checkpointing,) * spec.num_layers
    return gathered_of(spec, None, msgspec.structs.replace(settings, **zero), recomputed=recomputed)


def test_a_model_that_fits_into_one_bucket_is_there_twice_until_the_head_is_reached() -> None:
    found = gathered("slm-10m")
    assert found.before_head == 2 * ALL
    assert found.in_loss == ALL
    assert found.at_norm == ALL - VOCABULARY  # the head is released after its backward
    assert found.in_layer(7, 0) == ALL - VOCABULARY
    assert found.in_layer(7, 276_480) == ALL - VOCABULARY - 276_480  # without down_proj
    assert found.in_layer(0, 0) == LAYER + VOCABULARY


def test_gathered_elements_are_those_of_a_rehearsal() -> None:
    # 2 bytes each. slm train --model slm-10m --strategy ds_zero3 --rehearse 8 --seq_len 128
    # --per_device_train_batch_size 1 --gradient_accumulation_steps 2, memory_timeline.csv, 2026-11-25
    found = gathered("slm-10m")
    assert 2 * found.before_head == 40_632_320
    assert 2 * found.in_loss == 20_316_160
    assert 2 * found.in_layer(3, 0) == 10_158_080
    # the same of slm-100m with --gradient_checkpointing full and one micro-step: a bucket has 13,107,200
    # elements and what the last matrix exceeds them by, so that the last one holds the head
    found = gathered("slm-100m", checkpointing=True)
    assert 2 * found.before_head == 331_535_360
    assert 2 * found.in_loss == 261_108_224
    assert 2 * found.in_layer(1, 0) == 87_606_272


def test_more_than_max_live_is_gathered_by_a_last_matrix_only() -> None:
    # slm-2b in fp32 with --gradient_checkpointing full, rehearsed on 2026-11-25: 4 bytes each
    found = gathered("slm-2b", checkpointing=True)
    assert 4 * found.before_head == 855_259_392
    assert 4 * found.in_layer(12, 0) == 837_298_176


def test_without_prefetching_a_module_gathers_its_own_parameters() -> None:
    found = gathered("slm-10m", stage3_prefetch_bucket_size=0)
    assert found.before_head == 0
    assert found.in_loss == found.at_head == VOCABULARY
    assert found.in_layer(3, 0) == 276_480
    assert found.in_layer(3, LAYER - 1) == 102_400


def test_a_tied_head_is_the_embedding_so_it_stays_gathered() -> None:
    spec = dataclasses.replace(find_model("slm-10m"), tied=True)
    found = gathered(spec, stage3_prefetch_bucket_size=0)
    assert found.in_loss == VOCABULARY
    assert gathered(spec).in_loss == ALL - VOCABULARY


@pytest.mark.parametrize("max_live", [1_000_000, 4_000_000])
def test_max_live_bounds_what_is_gathered_ahead(max_live: int) -> None:
    found = gathered("slm-10m", stage3_max_live_parameters=max_live)
    # one more matrix than max_live, and the flat copy of at most as much
    assert max(module.elements for layer in found.layers for module in layer) < 2 * (max_live + 276_480)
    assert found.in_loss < max_live + 276_480
