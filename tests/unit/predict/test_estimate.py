"""`slm estimate`: its rows, what fits, DeepSpeed's figure beside it, and what it refuses."""

import contextlib
import io
import json

import pytest
from conftest import slm_here

from slm_toolkit.cli.main import main
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.deepspeed_estimator import deepspeed_needs
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.memory.machine import (
    allocator_slack,
    probability_that_fits,
    verdict_of,
)
from slm_toolkit.predict.memory.peak import MemoryEstimate
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.record.memory_parts import PARTS
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy

P = 130_569_920  # parameters of slm-100m
TINY_STEPS = ("--strategy", "ddp", "--gpu", "a100-40gb", "--seq_len", "64")
"one more sequence of 64 tokens takes a small part of the allocator's slack"


KEYS = (
    "adapted_modules attn_implementation batch_with_margin bottleneck calibration changes_that_fit "
    "deepspeed_bytes deepspeed_host_bytes deepspeed_stage deepspeed_stands_in depends_on_pcie evidence "
    "fit_probability fits fp8 gpu gpus_per_node gradient_accumulation_steps gradient_checkpointing "
    "headroom_bytes host_bytes_per_node inter_node_gbps inter_node_gbps_needed is_nearly_full kernels "
    "like lora_r mfu model needed_bytes num_gpus num_trainable_params numerics optim pad_widths parts "
    "parts_seconds peak_allocated_bytes peak_instant peak_reserved_bytes peak_reserved_high_bytes "
    "peak_reserved_low_bytes peft per_device_train_batch_size price_source seq_len step_high_seconds "
    "step_low_seconds step_seconds strategy tokens_per_second tokens_per_second_per_gpu traffic_bytes "
    "usd_per_gpu_hour usd_per_million_tokens verdict"
)


def estimated(*arguments: str) -> list[dict]:
    """The rows of `slm estimate --json`, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["estimate", "--json", *arguments])
    assert ended.value.code == 0
    return json.loads(out.getvalue())


def rows_of(*strategies: str, num_gpus: tuple[int, ...] = (8,), **given: object) -> list[Estimate]:
    found = [find_strategy(name) for name in strategies]
    return estimates(given, found, gpus=[None], num_gpus=list(num_gpus))


def test_the_json_has_a_row_per_configuration_with_these_keys() -> None:
    rows = estimated("--seq_len", "512", "1024", "--gpu", "l4", "h200", "--num_gpus", "8", "16")
    assert len(rows) == 2 * 2 * 2 * len(STUDIED_STRATEGIES)
    assert {" ".join(sorted(row)) for row in rows} == {KEYS}
    assert {row["evidence"] for row in rows} == {"estimated"}
    assert {(row["num_gpus"], row["gpus_per_node"]) for row in rows} == {(8, 8), (16, 8)}
    assert [row["strategy"] for row in rows[:6]] == list(STUDIED_STRATEGIES)


def test_parts_add_up_to_what_is_allocated_and_slack_to_what_is_reserved() -> None:
    for row in estimated(
        "--strategy", "single", *STUDIED_STRATEGIES, "--gpu", "h200", "--optim", "adamw_torch"
    ):
        outside = ("allocator_slack", "cuda_context")
        assert row["parts"].keys() == {*PARTS, "workspace", *outside}
        allocated = sum(size for name, size in row["parts"].items() if name not in outside)
        assert allocated == row["peak_allocated_bytes"]
        assert row["peak_reserved_bytes"] == allocated + row["parts"]["allocator_slack"]
        assert row["parts"]["workspace"] == 2 * 32 * 2**20


def test_a_verdict_is_a_probability() -> None:
    # 90 % of a normal error lie within 0.2, so its deviation is 0.2 / 1.645 = 0.1216
    assert probability_that_fits(100, 100) == 0.5
    assert probability_that_fits(100, 120) == pytest.approx(0.95)  # half of the other 10 % are above 1.2
    assert probability_that_fits(100, 80) == pytest.approx(0.05)
    # 1.282 deviations are exceeded by 10 %: 100 x (1 + 1.282 x 0.1216) = 115.6
    words = [verdict_of(probability_that_fits(100, usable)) for usable in (116, 115, 100, 99, 85, 84)]
    assert words == ["fits", "may fit", "may fit", "unlikely to fit", "unlikely to fit", "does not fit"]


def test_a_gpu_is_nearly_full_if_needed_bytes_fit_and_reserved_bytes_do_not() -> None:
    most = estimated(*TINY_STEPS, "--largest_batch")[0]["per_device_train_batch_size"]
    batches = [str(size) for size in (most // 2, most, most + 1)]
    half, full, too_large = estimated(*TINY_STEPS, "--per_device_train_batch_size", *batches)
    usable = full["headroom_bytes"] + full["needed_bytes"]
    assert full["needed_bytes"] <= usable < full["peak_reserved_bytes"]
    assert [row["is_nearly_full"] for row in (half, full, too_large)] == [False, True, False]


def slack_of(strategy: str, *, accumulation: int = 1) -> int:
    """The slack of 1000 allocated bytes, where other instants need more of four parts than the peak."""
    config = RunConfig(model="slm-100m", gradient_accumulation_steps=accumulation).with_defaults(has_gpu=True)
    setup = Setup(PRESETS["slm-100m"], find_strategy(strategy), config, num_gpus=8)
    at_peak = dict.fromkeys(PARTS, 0)
    largest = at_peak | {"activations": 60, "temporary": 40, "gathered_parameters": 5, "gradients": 7}
    return allocator_slack(setup, MemoryEstimate(at_peak, "the loss", largest), allocated=1000)


def test_slack_is_rounding_and_blocks_that_the_peak_does_not_reuse() -> None:
    assert slack_of("ddp") == 110  # 3 % of 1000, and 0.8 x (60 + 40); freed gradients are reused
    assert slack_of("ds_zero2", accumulation=4) == 110


def test_fsdp_has_blocks_in_streams_of_their_own() -> None:
    assert slack_of("fsdp_full_shard") == 110 + 5 + 7
    # with accumulation the other gradients are whole ones: all shards, 2 bytes x P / 8, are in that stream
    assert slack_of("fsdp_full_shard", accumulation=4) == 110 + 5 + 2 * P // 8


def test_deepspeeds_column_is_deepspeeds_estimate() -> None:
    stages = {
        "ds_zero2": (2, False),
        "ds_zero3": (3, False),
        "fsdp_full_shard": (3, True),
        "ddp": (None, False),
    }
    names = ("deepspeed_bytes", "deepspeed_host_bytes", "deepspeed_stage", "deepspeed_stands_in")
    for row in estimated("--num_gpus", "16", "--gpus_per_node", "4", "--strategy", *stages):
        stage, stands_in = stages[row["strategy"]]
        # the largest layer is a vocabulary matrix
        needs = deepspeed_needs(P, 32_000 * 832, zero_stage=stage, num_gpus_per_node=4, num_nodes=4)
        sizes = (needs.gpu_bytes, needs.host_bytes_per_node) if needs else (None, None)
        assert tuple(row[name] for name in names) == (*sizes, stage, stands_in)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    same = ("--model", "slm-1b", "--gpu", "a100-40gb")
    grid = ("--num_gpus", "1", "8", "--strategy", "single", *STUDIED_STRATEGIES)
    rows = estimated("--largest_batch", "--gradient_checkpointing", "full", "none", *same, *grid)
    assert len(rows) == 2 * (1 + 2 * 6)
    for row in rows:
        batch = row["per_device_train_batch_size"]
        assert batch >= 1
        words = ("--gradient_checkpointing", row["gradient_checkpointing"], "--strategy", row["strategy"])
        words += ("--num_gpus", str(row["num_gpus"]), "--per_device_train_batch_size", str(batch))
        fitting, next_one = estimated(*same, *words, str(batch + 1))
        assert fitting == {**row, "batch_with_margin": None}
        assert 0 <= row["batch_with_margin"] <= batch
        assert (fitting["fits"], next_one["fits"]) == (True, False)


def test_the_largest_batch_is_0_where_not_even_1_fits() -> None:
    (row,) = estimated("--largest_batch", "--model", "slm-2b", "--strategy", "ddp", "--gpu", "l4")
    assert (row["per_device_train_batch_size"], row["verdict"]) == (0, "does not fit")


def test_single_counts_one_gpu_and_equal_rows_come_once() -> None:
    rows = rows_of("single", "ddp", num_gpus=(8, 16, 8), seed=[0, 1])
    assert [(row.strategy, row.num_gpus) for row in rows] == [("single", 1), ("ddp", 8), ("ddp", 16)]


def test_the_table_says_what_a_row_is() -> None:
    single = slm_here("estimate", "--strategy", "fsdp_full_shard", "--gpu", "h200", "--kernels", "plain").out
    for words in ("estimated: slm-100m, h200, GPUs: 8", "closed forms, nothing ran", "fits"):
        assert words in single
    grid = slm_here("estimate", "--seq_len", "512", "1024").out
    assert "sequence" not in grid.splitlines()[0]  # a column: rows differ
