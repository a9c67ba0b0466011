"""`slm estimate` of what does not fit: the smallest changes that fit, and their cost in speed."""

import re

import pytest

from slm_toolkit import api
from slm_toolkit.predict.estimate import Estimate


def row_of(**arguments: object) -> Estimate:
    (row,) = api.estimate(**{"kernels": "plain", "per_device_train_batch_size": 4, **arguments})
    return row


def changed(asked: dict[str, object], change: str) -> Estimate:
    """The estimate of the command with the words of a change."""
    words = re.sub(r"batch (\d+) instead of \d+", r"--per_device_train_batch_size \1", change)
    pairs = re.findall(r"--(\w+) (\S+)", words)
    flags = {name: int(value) if value.isdigit() else value for name, value in pairs}
    return row_of(**{**asked, **flags})


ASKED = [
    {
        "model": "slm-500m",
        "gpu": "rtx-4090",
        "num_gpus": 1,
        "strategy": "single",
        "per_device_train_batch_size": 32,
    },
    {
        "model": "slm-2b",
        "gpu": "a100-40gb",
        "num_gpus": 8,
        "strategy": "ddp",
        "per_device_train_batch_size": 8,
        "seq_len": 2048,
    },
    {"model": "slm-13b", "gpu": "a100-40gb", "num_gpus": 8, "strategy": "ds_zero2"},
]


@pytest.mark.parametrize("asked", ASKED)
def test_each_change_fits_and_costs_what_it_says(asked: dict[str, object]) -> None:
    before = row_of(**asked)
    assert before.verdict == "does not fit"
    assert before.changes_that_fit
    sequences = before.num_gpus * before.per_device_train_batch_size * before.gradient_accumulation_steps
    for change in before.changes_that_fit:
        after = changed(asked, change.change)
        assert after.verdict == "fits", change
        steps = after.gradient_accumulation_steps
        assert after.num_gpus * after.per_device_train_batch_size * steps == sequences
        if change.speedup is not None:
            ratio = after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu
            assert change.speedup == pytest.approx(ratio)
        else:
            assert after.tokens_per_second is None


def test_the_mildest_value_of_each_kind_is_named() -> None:
    before = row_of(**ASKED[0])
    assert before.changes_that_fit[0].change == "batch 8 instead of 32 with --gradient_accumulation_steps 4"
    twice = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    assert row_of(**{**ASKED[0], **twice}).verdict == "does not fit"


def test_what_fits_and_what_can_not_be_helped() -> None:
    assert row_of(model="slm-100m", gpu="h200", num_gpus=8, strategy="ddp").changes_that_fit is None
    # bf16 weights of one layer and its gradient: 4 bytes x 100e9 / 80 layers = 5 GB; 10M tokens: 160 GB
    asked = {"model": "slm-100b", "gpu": "l4", "num_gpus": 1, "strategy": "single"}
    huge = api.estimate(**asked, seq_len=10_000_000, per_device_train_batch_size=1)
    assert huge[0].changes_that_fit == []
    assert "single does not fit, and no 3 changes are enough" in str(huge)
