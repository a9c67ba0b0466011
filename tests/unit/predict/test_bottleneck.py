"""What binds a step, and the changes that move it."""

import dataclasses

import pytest
from test_estimate import estimated

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.model_spec import PRESETS, ModelSpec
from slm_toolkit.predict.bottleneck import WORTH_SAYING, levers
from slm_toolkit.predict.estimate import largest_batch
from slm_toolkit.predict.setup.setup import Setup, with_flags
from slm_toolkit.predict.speed.step import BOTTLENECKS
from slm_toolkit.strategy.strategy import find_strategy

LARGER_BATCH = "--per_device_train_batch_size"


def setup_of(spec: ModelSpec, *, gpu: str = "h100-80gb", **flags: object) -> Setup:
    config = RunConfig(**{"seq_len": 1024, "per_device_train_batch_size": 4, **flags})
    return Setup(spec, find_strategy("ddp"), config, num_gpus=8, gpu=gpu_of_name(gpu))


@pytest.mark.parametrize(
    ("bottleneck", "words"),
    [
        ("attention", "--model slm-500m-hw --attn_implementation eager --seq_len 8192 --strategy ddp"),
        ("launch_overhead", "--model slm-1m --per_device_train_batch_size 1 --strategy single"),
        ("communication", "--model slm-2b --num_gpus 16 --network 10 --strategy ds_zero3"),
        ("matmul", "--model slm-2b --strategy ddp --per_device_train_batch_size 16"),
    ],
)
def test_the_largest_part_is_named(bottleneck: str, words: str) -> None:
    (row,) = estimated("--gpu", "h100-80gb", *words.split())
    assert row["bottleneck"] == bottleneck
    assert row["parts_seconds"][bottleneck] == max(row["parts_seconds"][name] for name in BOTTLENECKS)


def test_eager_attention_is_the_first_thing_to_change() -> None:
    found = levers(setup_of(PRESETS["slm-500m-hw"], attn_implementation="eager", seq_len=4096))
    assert found[0].change == "--attn_implementation sdpa"
    speedups = [lever.speedup for lever in found]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[-1] >= WORTH_SAYING


def test_a_lever_that_no_longer_fits_is_left_out() -> None:
    on_l4 = setup_of(PRESETS["slm-500m-hw"], gpu="l4", gradient_checkpointing="full")
    largest = largest_batch(on_l4).per_device_train_batch_size
    setups = [with_flags(on_l4, per_device_train_batch_size=size) for size in (1, largest)]
    small, full = ([lever.change.split()[0] for lever in levers(setup)] for setup in setups)
    assert {LARGER_BATCH, "--gradient_checkpointing"} <= set(small)
    assert not {LARGER_BATCH, "--gradient_checkpointing"} & set(full)


def test_no_lever_is_a_kernel_of_another_model() -> None:
    flags = {"attn_implementation": "eager", "kernels": "plain"}
    gemma = dataclasses.replace(
        PRESETS["llama-3.2-1b"], attention_softcap=True, after_head="softcap", norm_scales_in_fp32=True
    )
    llamas = {lever.change for lever in levers(setup_of(PRESETS["llama-3.2-1b"], **flags))}
    gemmas = {lever.change for lever in levers(setup_of(gemma, **flags))}
    kernels = {"--attn_implementation sdpa", "--kernels fused", "--kernels compiled"}
    assert kernels <= llamas
    assert not kernels & gemmas
