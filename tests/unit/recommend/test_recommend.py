"""`slm recommend`: what it ranks, why, what it writes, and what records change."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import pytest
from conftest import FSDP2, made_record, own_strategy, plans_of, slm_here

from slm_toolkit.cli.main import main
from slm_toolkit.cli.recommend import _LAWS
from slm_toolkit.hardware.gpus import gpus
from slm_toolkit.recommend.plans import best_plans, reason_of
from slm_toolkit.recommend.scaling_laws import LAWS
from slm_toolkit.record.files import write_record


def recommended(*arguments: str, code: int | None = 0) -> list[dict]:
    """The rows of `slm recommend --json`, in this process; `code` None: found or not."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["recommend", "--json", *arguments])
    assert ended.value.code in ((0, 1) if code is None else (code,))
    return json.loads(out.getvalue())


def test_rows_are_ranked_by_dollars_and_are_what_their_own_figures_say() -> None:
    rows = recommended(
        "--model", "slm-500m", "--gpu", "a100-40gb:1,8@1.29", "h100-80gb:8@2.99", "--tokens", "20B"
    )
    assert {(row["gpu"], row["num_gpus"]) for row in rows} == {
        ("a100-40gb", 1),
        ("a100-40gb", 8),
        ("h100-80gb", 8),
    }
    assert [row["usd"] for row in rows] == sorted(row["usd"] for row in rows)
    for row in rows:
        assert row["hours"] == pytest.approx(20e9 / row["tokens_per_second"] / 3600)
        price = {"a100-40gb": 1.29, "h100-80gb": 2.99}[row["gpu"]]
        assert row["usd"] == pytest.approx(row["hours"] * row["num_gpus"] * price)
        assert row["verdict"] in ("fits", "may fit")
        assert row["evidence"] == "estimated"
        micro_steps, batch = row["gradient_accumulation_steps"], row["per_device_train_batch_size"]
        assert row["tokens_per_step"] == row["num_gpus"] * micro_steps * batch * 1024
        assert row["tokens_per_step"] == 524_288  # 0.5M tokens, all counts are powers of two
        assert row["num_steps"] == 38_147  # 20e9 / 524,288 = 38,146.97


def test_each_strategy_of_each_hardware_stands_with_its_best_batch() -> None:
    rows = recommended(
        "--model", "slm-100m", "--gpu", "l4:4", "--strategy", "ddp", "ds_zero3", "--tokens", "1B"
    )
    assert {row["strategy"] for row in rows} == {"ddp", "ds_zero3"}
    smaller = recommended(
        *("--model", "slm-100m", "--gpu", "l4:4", "--strategy", "ddp", "--tokens", "1B"),
        *("--per_device_train_batch_size", "1"),
    )
    assert smaller[0]["usd"] >= min(row["usd"] for row in rows if row["strategy"] == "ddp")


def test_a_deadline_and_a_budget_leave_out_what_breaks_them() -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:1,2,4,8,16@3", "--tokens", "20B")
    hours = {row["num_gpus"]: row["hours"] for row in reversed(recommended(*asked))}
    limit = (hours[4] + hours[2]) / 2
    rows = recommended(*asked, "--deadline_hours", str(limit))
    assert {row["num_gpus"] for row in rows} == {4, 8, 16}
    cheapest = rows[0]["usd"]
    assert recommended(*asked, "--budget_usd", str(cheapest * 0.5), code=1) == []


def test_nothing_within_the_limits_names_what_comes_nearest() -> None:
    done = slm_here(
        "recommend", "--model", "slm-2b", "--gpu", "a100-40gb:8@2", "--tokens", "40B", "--deadline_hours", "1"
    )
    assert done.code == 1
    assert "nothing is within 1 h" in done.out
    assert "the fastest: 8 x a100-40gb" in done.out


def test_time_ranks_the_most_gpus_first() -> None:
    rows = recommended(
        "--model", "slm-1b", "--gpu", "h100-80gb:1,8", "--tokens", "20B", "--objective", "time"
    )
    assert rows[0]["num_gpus"] == 8
    assert [row["hours"] for row in rows] == sorted(row["hours"] for row in rows)


def test_a_target_loss_takes_the_tokens_of_the_law() -> None:
    (row, *_) = recommended(
        "--model", "slm-1b", "--gpu", "h100-80gb:1", "--target_loss", "2.9", "--law", "hoffmann"
    )
    # 2.9 = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 with N = 970,458,240: 0.3563 is of size, so that
    # D^0.28 = 410.7 / 0.8537 and D = 481.1^(1/0.28) = 3.81e9
    assert row["num_tokens"] == pytest.approx(3.8e9, rel=0.02)
    assert row["expected_loss"] == pytest.approx(2.9)
    done = slm_here("recommend", "--model", "slm-1b", "--gpu", "h100-80gb", "--target_loss", "1.9")
    assert done.code == 2
    assert "hint: infinite tokens give" in done.err


def test_without_a_price_cost_is_a_dash_and_the_report_says_how_to_give_one() -> None:
    done = slm_here("recommend", "--model", "slm-100m", "--gpu", "a40:1", "--tokens", "1B")
    assert done.code == 0
    assert "a40: the price is unknown: give it as a40@USD, or with --prices" in done.err
    (row, *_) = recommended("--model", "slm-100m", "--gpu", "a40:1", "--tokens", "1B")
    assert row["usd"] is None
    assert row["usd_per_million_tokens"] is None
    assert row["hours"] > 0


def test_all_means_every_gpu_type() -> None:
    rows = recommended("--model", "slm-100m", "--gpu", "all:1", "--tokens", "1B", "--strategy", "single")
    assert {row["gpu"] for row in rows} == {gpu.name for gpu in gpus()}
    assert {row["num_gpus"] for row in rows} == {1}


def test_aligned_widths_are_named_for_each_gpu_type() -> None:
    done = slm_here(
        "recommend", "--model", "slm-500m", "--gpu", "a100-40gb:1", "h100-80gb:1", "--tokens", "1B"
    )
    for name in ("a100-40gb", "h100-80gb"):
        assert f"on {name} slm-500m-hw (FFN 4096 for 4147) should train " in done.out
    assert "should train" not in slm_here("recommend", "--model", "slm-500m-hw", "--gpu", "h100-80gb:1").out


RECORDED = (  # the flags of conftest's made_record
    *("--model", "slm-100m", "--gpu", "h100-80gb:2@3", "--strategy", "ddp", "--tokens", "1B"),
    *("--per_device_train_batch_size", "4", "--global_batch_tokens", "8192", "--loss_kernel", "hf"),
    *("--norm_kernel", "hf", "--gradient_checkpointing", "none"),
)


def test_a_measured_record_stands_before_the_estimate(tmp_path: Path) -> None:
    (before,) = recommended(*RECORDED)
    write_record(made_record(), tmp_path)
    (after,) = recommended(*RECORDED, "--records", str(tmp_path))
    assert (before["evidence"], before["memory_evidence"]) == ("estimated", "estimated")
    assert (after["evidence"], after["memory_evidence"]) == ("measured", "measured")
    assert after["tokens_per_second"] == 16_384  # 2 x 4 x 1024 tokens in 0.5 s
    assert after["hours"] == pytest.approx(1e9 / 16_384 / 3600)
    # 79.11 GiB less 500,000,000 bytes of CUDA, 544 MiB of NCCL, and the 3 GiB that the fuller rank took
    assert after["headroom_bytes"] / 2**30 == pytest.approx(79.11 - 0.4657 - 0.53125 - 3, abs=0.01)


def test_a_rehearsal_decides_what_fits_and_leaves_the_time_to_the_estimate(tmp_path: Path) -> None:
    record = made_record()
    asked = {**record.asked, "config": {**record.asked["config"], "rehearse": 2}}
    rehearsed = dataclasses.replace(record, gpu=None, asked=asked, peak_allocated_bytes=[5 * 2**30])
    write_record(rehearsed, tmp_path)
    (row,) = recommended(*RECORDED, "--records", str(tmp_path))
    assert (row["evidence"], row["memory_evidence"]) == ("estimated", "rehearsed")
    assert row["headroom_bytes"] / 2**30 == pytest.approx(79.11 - 0.4657 - 0.53125 - 5, abs=0.01)


def test_what_ran_out_of_memory_is_not_recommended(tmp_path: Path) -> None:
    write_record(dataclasses.replace(made_record(), status="oom"), tmp_path)
    assert recommended(*RECORDED, "--records", str(tmp_path), code=1) == []


def test_every_problem_of_the_flags_is_named_at_once() -> None:
    done = slm_here("recommend", "--gpu", "h100-80gb:12", "a100-40gb:8@0", "h100-80gb:x")
    assert done.code == 2
    for problem in (
        "12 GPUs: at least 1, and only full nodes of 8",
        "the price must be above 0",
        "not NAME",
    ):
        assert problem in done.err


def test_reasons_name_the_parts_that_cost_more() -> None:
    found = plans_of("ds_zero1", "ds_zero3", num_gpus=16, inter_node_gbps=50)
    ranked = best_plans(found, objective="cost")
    assert [plan.estimate.strategy for plan in ranked] == ["ds_zero1", "ds_zero3"]
    reason = reason_of(ranked[1], ranked[0], objective="cost")
    assert reason.ratio > 1
    assert reason.parts[0][0] == "communication"
    assert 1 + sum(more for _, more in reason.parts) == pytest.approx(reason.ratio, abs=0.05)
    assert reason.ties_at_usd_per_gpu_hour is None  # the same GPUs cost the same


def test_a_batch_that_fits_is_found_beyond_one_that_does_not() -> None:
    """FSDP keeps whole gradients while it accumulates: with one micro-step a larger batch may fit again."""
    asked = (
        "--model",
        "slm-13b",
        "--gpu",
        "a100-40gb:16@2",
        "--tokens",
        "10B",
        "--strategy",
        "fsdp_full_shard",
    )
    (best,) = recommended(*asked)
    alone = [
        recommended(*asked, "--per_device_train_batch_size", str(batch), code=None)
        for batch in (1, 2, 4, 8, 16, 32)
    ]
    assert best["usd"] == min(row["usd"] for rows in alone for row in rows)
    assert (best["per_device_train_batch_size"], best["gradient_accumulation_steps"]) == (32, 1)


def test_a_record_counts_where_the_estimate_says_that_it_can_not_fit(tmp_path: Path) -> None:
    record = made_record()
    config = {**record.asked["config"], "per_device_train_batch_size": 256}
    tokens = 2 * 256 * 1024
    big = dataclasses.replace(record, asked={**record.asked, "config": config}, tokens_per_step=tokens)
    write_record(big, tmp_path)
    asked = (*RECORDED[:8], "--loss_kernel", "hf", "--norm_kernel", "hf", "--gradient_checkpointing", "none")
    asked += ("--per_device_train_batch_size", "128", "256", "--global_batch_tokens", str(tokens))
    (row,) = recommended(*asked, "--records", str(tmp_path))
    assert (row["per_device_train_batch_size"], row["evidence"], row["verdict"]) == (256, "measured", "fits")


def test_gpus_without_a_price_come_last_and_are_not_compared_in_dollars() -> None:
    asked = ("--model", "slm-1b", "--gpu", "a40:8", "l4:8", "h100-80gb:8@2", "--tokens", "20B")
    rows = recommended(*asked)
    assert [row["usd"] is None for row in rows] == sorted(row["usd"] is None for row in rows)
    assert rows[-1]["gpu"] == "a40"
    shown = slm_here("recommend", *asked).out
    assert "8 x a40" in shown
    assert "without a price it can't be compared in dollars" in shown


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--strategy", "ds_zero1", "--reduce_dtype", "fp32"), "would give ZeRO-1 another optimizer"),
        (("--global_batch_tokens", "1000"), "no batch gives 1,000 tokens per step"),
        (("--gpu", "a40:16@1"), "the network between nodes is unknown (give --inter_node_gbps)"),
    ],
)
def test_what_was_not_considered_is_named_with_its_reason(flags: tuple[str, ...], reason: str) -> None:
    gpu = () if "--gpu" in flags else ("--gpu", "h100-80gb:8")
    done = slm_here("recommend", "--model", "slm-1b", "--tokens", "1B", *gpu, *flags)
    assert done.code == 1
    assert reason in done.err
    assert done.out.startswith("no plan: see what was left out")


def test_own_shards_that_don_t_divide_and_offload_are_left_out_by_name(tmp_path: Path) -> None:
    key = "parallelism_config"
    sizes = f"{key}:\n  {key}_dp_replicate_size: 2\n  {key}_dp_shard_size: 8\n"
    hybrid = own_strategy(tmp_path, FSDP2 + sizes, name="hybrid")
    offload = own_strategy(tmp_path, f"{FSDP2}  fsdp_offload_params: true\n", name="offload")
    done = slm_here(
        *("recommend", "--model", "slm-1b", "--tokens", "1B", "--gpu", "h100-80gb:8"),
        *("--strategy", hybrid, offload, "ddp"),
    )
    assert done.code == 0
    assert (
        "left out: 8 x h100-80gb hybrid: dp_replicate_size 2 x dp_shard_size 8 with --num_gpus 8" in done.err
    )
    assert "left out: offload: no closed form for the time of offload" in done.err


def test_a_grid_value_that_changes_the_training_has_a_row_and_a_column() -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:8", "--strategy", "ddp", "--tokens", "1B")
    asked += ("--numerics", "aligned", "pure_bf16")
    assert {row["numerics"] for row in recommended(*asked)} == {"aligned", "pure_bf16"}
    shown = slm_here("recommend", *asked).out
    assert " numerics " in shown
    assert " pure_bf16 " in shown


def test_a_model_that_never_reaches_the_loss_is_left_out_and_the_others_are_not() -> None:
    done = slm_here(
        *("recommend", "--model", "slm-100m", "slm-1b", "--target_loss", "2.4", "--gpu", "h100-80gb:8"),
    )
    assert done.code == 0
    assert "left out: slm-100m: " in done.err
    assert done.out.startswith("slm-1b: ")


def test_the_laws_to_choose_from_are_all_there_are() -> None:
    assert set(_LAWS) == set(LAWS)
