"""What a step was computed with is read off what ran, and rows that were computed otherwise are marked."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import Comparison, compare, launch, record_under, slm

from slm_toolkit.record.numerics import Numerics, differences
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

# design of `aligned`: bf16 in compute and reduction, fp32 where it is updated and where the loss is computed
ALIGNED = {
    "parameter_dtype": "bfloat16",
    "autocast": False,
    "compute_dtype": "bfloat16",
    "residual_dtype": "bfloat16",
    "logits_dtype": None,  # the head returns the loss
    "cross_entropy_dtype": "float32",
    "loss_kernel": "fused_linear",
    "loss_dtype": "float32",
    "gradient_dtype": "bfloat16",
    "reduction_dtype": "bfloat16",
    "master_weight_dtype": "float32",
    "optimizer_state_dtype": "float32",
    "clipping": 1.0,
    "accumulation": 1,
    "tokens_per_step": 2 * 4 * 128,
    "attention": "sdpa flash",
    "optimizer_kernel": "fused",
    "compiled": False,
    "recomputed": False,
    "float8": None,
    "tf32": False,
    # heads of 64: 1 / sqrt(64); documents apart
    "attention_call": [{"mask": "given", "dropout": 0, "scale": 0.125}],
    "dropout": "none",
    # theta 10,000: the last is 10,000^-(62/64); the sum is (1 - 1e-4) / (1 - 10,000^(-1/32))
    "rope": [{"dtype": "float32", "first": 1, "last": 0.000133352, "sum": 3.99791}],
    "norm_eps": "1e-06",
    "tied": "untied",
    "frozen": "none",
    "without_gradient": "none",
    # 9 norms of 128; at step 20 of 20 the cosine is at 0.1 + 0.45 (1 + cos(pi 19/20)) = 0.10554
    **{
        name: [
            {
                "elements": elements,
                "lr": rate,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-8,
                "weight_decay": decay,
            }
            for elements, decay in ((950272, 0.1), (1152, 0))
        ]
        for name, rate in (("optimizer_settings", 3e-4), ("optimizer_settings_at_end", 3.16621e-5))
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("name", STUDIED_STRATEGIES)
def test_aligned_is_the_same_in_every_field_under_every_strategy(aligned: Comparison, name: str) -> None:
    row = aligned.rows[name]
    probed = dict(row["numerics_probed"])
    assert row["numerics_differences"] == []
    assert len(probed.pop("optimizer_class")) > 0
    hashes = probed.pop("batch_hashes")
    assert hashes == aligned.rows["ddp"]["numerics_probed"]["batch_hashes"]
    assert len(set(hashes)) == 2  # the ranks' batches differ
    assert probed == ALIGNED


@pytest.mark.parametrize("name", STUDIED_STRATEGIES)
def test_fp32_is_fp32_under_every_strategy(fp32: Comparison, name: str) -> None:
    probed = fp32.rows[name]["numerics_probed"]
    dtypes = {field: value for field, value in probed.items() if field.endswith("_dtype")}
    assert dtypes.pop("logits_dtype") is None  # the head returns the loss
    assert set(dtypes.values()) == {"float32"}
    assert fp32.rows[name]["numerics_differences"] == []


def test_stock_marks_what_accelerate_does_otherwise_by_itself(stock: Comparison) -> None:
    """The table of differences in the README, found by the probe: each engine against DDP."""
    ddp = stock.rows["ddp"]["numerics_probed"]
    assert (ddp["parameter_dtype"], ddp["autocast"], ddp["clipping"]) == ("float32", True, 0.0)
    assert stock.rows["ddp"]["numerics_differences"] == []
    assert stock.rows["fsdp_full_shard"]["numerics_differences"] == [
        "autocast off (not on)",
        "residual bfloat16 (not float32)",
        "logits bfloat16 (not float32)",
        "loss bfloat16 (not float32)",
        "reduction bfloat16 (not float32)",
    ]
    assert stock.rows["ds_zero2"]["numerics_differences"] == [
        "parameter bfloat16 (not float32)",
        "autocast off (not on)",
        "residual bfloat16 (not float32)",
        "logits bfloat16 (not float32)",
        "gradient bfloat16 (not float32)",
        "reduction bfloat16 (not float32)",
        "clipping 1 (not 0)",
    ]


def test_pure_bf16_keeps_no_fp32_state_and_the_strategies_still_agree(tmp_path: Path) -> None:
    strategies = ("--strategy", "ddp", "fsdp_full_shard", "ds_zero3")
    done = compare(*strategies, "--numerics", "pure_bf16", "--parity", "4", folder=tmp_path)
    assert done.finished.code == 0, done.finished.err
    for row in done.rows.values():
        assert row["numerics_differences"] == []
        probed = row["numerics_probed"]
        assert probed["master_weight_dtype"] == probed["optimizer_state_dtype"] == "bfloat16"
        assert probed["cross_entropy_dtype"] == "float32"
    # bf16 weights 2, gradients 2, moments 4 bytes, no masters: slm-1m has 951,424 parameters
    state = done.rows["ddp"]["state_bytes_per_rank"]
    assert sum(state.values()) == pytest.approx(8 * 951_424, rel=1e-3)


def test_the_probe_sees_eager_attention_recomputation_accumulation_and_the_foreach_kernel(
    tmp_path: Path,
) -> None:
    arguments = (
        *("--model", "slm-1m", "--max_steps", "2", "--seq_len", "32", "--gradient_accumulation_steps", "3"),
        *("--attn_implementation", "eager", "--gradient_checkpointing", "--optim", "adamw_torch"),
        *("--max_grad_norm", "0", "--output_dir", str(tmp_path)),
    )
    done = launch(*arguments, config="accel_configs/single.yaml")
    assert done.code == 0, done.err
    probed = record_under(tmp_path)["numerics"]
    seen = {
        name: probed[name]
        for name in ("attention", "recomputed", "accumulation", "optimizer_kernel", "clipping")
    }
    assert seen == {
        "attention": "eager",
        "recomputed": True,
        "accumulation": 3,
        "optimizer_kernel": "foreach",
        "clipping": 0.0,
    }
    assert probed["tokens_per_step"] == 3 * 4 * 32
    assert probed["reduction_dtype"] is None  # one rank reduces nothing


def test_a_compiled_step_is_seen_and_its_compilation_is_no_timed_step(tmp_path: Path) -> None:
    arguments = ("--model", "slm-1m", "--max_steps", "6", "--seq_len", "32", "--kernels", "compile")
    done = launch(*arguments, "--output_dir", str(tmp_path), config="accel_configs/single.yaml")
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    assert record["numerics"]["compiled"] is True
    assert record["numerics"]["recomputed"] is False  # as run; while it is traced, a forward is seen twice
    assert record["num_graphs_compiled"][0] > 0
    assert record["num_graphs_compiled"][record["num_probed_steps"] - 1] == 0
    assert sum(record["num_graphs_compiled"][3:]) == 0
    (row,) = json.loads(slm("report", str(tmp_path), "--json").out)
    assert record["num_probed_steps"] <= row["num_warmup_steps"] <= 3


NUMERICS = Numerics(parameter_dtype="bfloat16", autocast=False, accumulation=1, batch_hashes=["a", "b"])


@pytest.mark.quick
def test_a_difference_that_a_flag_explains_is_none() -> None:
    other = dataclasses.replace(NUMERICS, accumulation=2, batch_hashes=["c", "d"], autocast=True)
    assert [str(found) for found in differences(other, NUMERICS)] == [
        "autocast on (not off)",
        "accumulation 2 (not 1)",
        "batch hashes c d (not a b)",
    ]
    asked = frozenset({"gradient_accumulation_steps"})
    explained = differences(other, NUMERICS, other_settings=asked)
    assert [found.field for found in explained] == ["autocast"]
