"""DeepSpeed's own estimator with our counts."""

import pytest

from slm_toolkit.models import PRESETS
from slm_toolkit.run.deepspeed_estimate import deepspeed_estimate, deepspeed_estimate_of

T5_3B = (2_851_598_336, 32_899_072)  # parameters, largest layer: DeepSpeed's documentation, memory.rst


@pytest.mark.parametrize(("stage", "gpu_gib", "cpu_gib"), [(2, 11.29, 127.48), (3, 6.10, 127.48)])
def test_the_t5_3b_example_on_one_node_of_8(stage: int, gpu_gib: float, cpu_gib: float) -> None:
    # 0.19.8's formula for stage 2 is 2P + 18P/N; memory.rst still prints 15.93 from the older 4P + 16P/N.
    found = deepspeed_estimate(*T5_3B, zero_stage=stage, num_gpus_per_node=8, num_nodes=1)
    assert round(found["gpu_bytes"] / 2**30, 2) == gpu_gib
    assert round(found["cpu_bytes"] / 2**30, 2) == cpu_gib


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_stages_that_deepspeed_has_no_function_for_have_no_figure(stage: int | None) -> None:
    assert deepspeed_estimate(*T5_3B, zero_stage=stage, num_gpus_per_node=8, num_nodes=1) is None


def test_our_counts_by_hand_for_zero_3_on_two_ranks() -> None:
    # slm-100m: 4 * largest layer 32000 * 832 = 106,496,000 plus 18 * 130,569,920 / 2 = 1,175,129,280
    found = deepspeed_estimate_of(PRESETS["slm-100m"], zero_stage=3, world_size=2, local=2)
    assert found["gpu_bytes"] == 106_496_000 + 1_175_129_280
