"""DeepSpeed's own estimator: our arithmetic of it, its installed functions, and what a record keeps."""

from itertools import product

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.deepspeed_estimator import (
    DeepSpeedNeeds,
    deepspeed_needs,
)

# 0.19.8's formula for stage 2 is 2P + 18P/N; memory.rst still prints 15.93 GiB from the older 4P + 16P/N
T5_3B = (2_851_598_336, 32_899_072)  # parameters, largest layer: DeepSpeed's documentation, memory.rst
SIZES = (
    (1_000_003, 999),
    (130_569_920, 26_624_000),  # slm-100m
    T5_3B,
    (70_000_000_001, 1_050_673_153),
)


@pytest.mark.parametrize("stage", [2, 3])
def test_our_arithmetic_is_the_installed_deepspeeds_to_the_byte(stage: int) -> None:
    for (params, largest), gpus, nodes, optimizer, offload_params, zero_init in product(
        SIZES, (1, 2, 8), (1, 2, 3, 8), *[(False, True)] * 3
    ):
        shape = {"num_gpus_per_node": gpus, "num_nodes": nodes}
        offload = {"offload_optimizer": optimizer, "offload_params": offload_params}
        ours = deepspeed_needs(params, largest, zero_stage=stage, zero_init=zero_init, **shape, **offload)
        options = {**shape, "cpu_offload": optimizer}
        if stage == 2:
            host_bytes, gpu_bytes = estimate_zero2_model_states_mem_needs(params, **options)
        else:
            options |= {"cpu_offload_params": offload_params, "zero_init": zero_init}
            host_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(params, largest, **options)
        assert ours == DeepSpeedNeeds(gpu_bytes, host_bytes), (params, largest, options)


def test_stages_that_deepspeed_has_no_function_for_have_no_figure() -> None:
    for stage in (None, 0, 1):
        assert deepspeed_needs(*T5_3B, zero_stage=stage, num_gpus_per_node=8, num_nodes=1) is None


def test_a_record_keeps_our_counts_by_hand_for_zero_3_on_two_ranks() -> None:
    # slm-100m: 4 * largest layer 32000 * 832 = 106,496,000 plus 18 * 130,569,920 / 2 = 1,175,129,280;
    # the host: 2 ranks build 4 * 130,569,920 bytes, half as much again = 1,566,839,040
    sizes = (PRESETS["slm-100m"].num_params, PRESETS["slm-100m"].largest_layer_params)
    found = deepspeed_needs(*sizes, zero_stage=3, num_gpus_per_node=2, num_nodes=1)
    assert found == DeepSpeedNeeds(106_496_000 + 1_175_129_280, 1_566_839_040)
