"""The closed forms of torchao's kernels meet peaks that were traced with their own code.

Traced without a GPU by `slm train --rehearse` on 2026-11-26 and, with the fused norm under DDP, 2026-11-28:
torch 2.13, transformers 5.23 and torchao 0.18, sequences of 1,024 tokens.
"""

import pytest

from slm_toolkit import api

LOSS = {"kernels": "loss"}
NORM = {"kernels": "loss+norm"}
FULL = {"gradient_checkpointing": "full"}
TRACED = [  # strategy, ranks, model, batch, flags, bytes
    ("ddp", 2, "slm-500m-hw", 8, {"fp8": "rowwise", **NORM, **FULL}, 10_156_259_132),
    ("ddp", 2, "slm-500m-hw", 8, {"fp8": "tensorwise", **NORM, **FULL}, 10_156_187_468),
    ("fsdp_full_shard", 8, "slm-500m-hw", 16, {"fp8": "tensorwise"}, 19_123_012_940),
    ("ds_zero3", 8, "slm-1b-hw", 8, {"fp8": "rowwise", **NORM, **FULL}, 4_045_336_613),
    ("ds_zero1", 4, "slm-100m", 16, {"fp8": "rowwise"}, 6_876_425_632),  # its FFN's width does not fit
    ("ddp", 2, "slm-100m", 16, {"numerics": "stock"}, 9_829_440_552),  # neither: the same loss under autocast
]


@pytest.mark.parametrize(("strategy", "ranks", "model", "batch", "flags", "traced"), TRACED)
def test_estimates_meet_traced_peaks(
    strategy: str, ranks: int, model: str, batch: int, flags: dict, traced: int
) -> None:
    asked = {"seq_len": 1024, "per_device_train_batch_size": batch, **LOSS, **flags}
    (row,) = api.estimate(model=model, strategy=strategy, num_gpus=ranks, **asked)
    assert row.peak_allocated_bytes == pytest.approx(traced, rel=0.01)


def test_compiled_float8_is_faster_than_what_it_replaces() -> None:
    def seconds(**flags: object) -> float:
        asked = {"per_device_train_batch_size": 4, **LOSS, **flags}
        (row,) = api.estimate(model="slm-2b-hw", strategy="ddp", gpu="h100-80gb", num_gpus=8, **asked)
        return row.step_seconds

    compiled, in_float8 = (seconds(kernels="loss+compile", fp8=fp8) for fp8 in ("none", "rowwise"))
    # matrix products take most of a step and can become twice as fast at best
    assert compiled / 2 < in_float8 < compiled
    assert seconds(fp8="rowwise") > seconds()  # eager casts move 33 bytes per element


def test_what_was_not_traced_and_a_gpu_that_emulates_float8_are_refused() -> None:
    with pytest.raises(ValueError, match="--fp8 rowwise with --numerics stock: no closed form"):
        api.estimate(strategy="ddp", fp8="rowwise", numerics="stock")
    with pytest.raises(ValueError, match="on a100-80gb: no closed form, because this GPU emulates"):
        api.estimate(strategy="ddp", gpu="a100-80gb", fp8="rowwise")
    gpus = ["a100-80gb:1", "h100-80gb:1"]
    found = api.recommend(model="slm-100m-hw", tokens=1e9, gpu=gpus, fp8="rowwise")
    assert {plan.estimate.gpu for plan in found} == {"h100-80gb"}
    assert [line[:27] for line in found.left_out] == ["--fp8 rowwise on a100-80gb:"]
