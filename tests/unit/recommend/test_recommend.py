"""`slm recommend`: what it ranks, why, and what it writes."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from conftest import SMALL_LLAMA, bench, plans_of, slm_here

from slm_toolkit.cli.main import main
from slm_toolkit.hardware.gpus import gpus
from slm_toolkit.hardware.prices import price_of
from slm_toolkit.recommend import plans
from slm_toolkit.recommend.plan_table import reasons
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.recommend.ranking import best_plans


def recommended(*arguments: str, code: int = 0) -> list[dict]:
    """The rows of `slm recommend --json`, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["recommend", "--json", *arguments])
    assert ended.value.code == code
    return json.loads(out.getvalue())


def test_rows_are_ranked_by_dollars_and_are_what_their_own_figures_say() -> None:
    rows = recommended(
        "--model", "slm-500m", "--gpu", "a100-40gb:1,8@1.29", "h100-80gb:8@2.99", "--tokens", "20B"
    )
    hardware = {(row["gpu"], row["num_gpus"]) for row in rows}
    assert hardware == {("a100-40gb", 1), ("a100-40gb", 8), ("h100-80gb", 8)}
    dearest = 0.0
    for row in rows:
        dearest = max(dearest, row["usd"])
        assert dearest <= row["usd"] * 1.07  # none stands behind one dearer by more than a tie: 1.03 x 1.03
        assert row["hours"] == pytest.approx(20e9 / row["tokens_per_second"] / 3600)
        price = {"a100-40gb": 1.29, "h100-80gb": 2.99}[row["gpu"]]
        assert row["usd"] == pytest.approx(row["hours"] * row["num_gpus"] * price)
        assert row["usd_per_million_tokens"] == pytest.approx(row["usd"] / 20_000)
        assert row["verdict"] in ("fits", "may fit")
        assert row["evidence"] == "estimated"
        micro_steps, batch = row["gradient_accumulation_steps"], row["per_device_train_batch_size"]
        assert row["tokens_per_step"] == row["num_gpus"] * micro_steps * batch * 1024
        assert row["tokens_per_step"] == 524_288  # 0.5M tokens, all counts are powers of two
        assert row["num_steps"] == 38_147  # 20e9 / 524,288 = 38,146.97


def test_a_deadline_and_a_budget_leave_out_what_breaks_them() -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:1,2,4,8,16@3", "--tokens", "20B", "--strategy", "ddp")
    hours = {row["num_gpus"]: row["hours"] for row in reversed(recommended(*asked))}
    limit = (hours[4] + hours[2]) / 2
    rows = recommended(*asked, "--deadline_hours", str(limit))
    assert {row["num_gpus"] for row in rows} == {4, 8, 16}
    assert recommended(*asked, "--budget_usd", str(rows[0]["usd"] / 2), code=1) == []


def test_nothing_within_the_limits_names_what_comes_nearest() -> None:
    done = slm_here(
        "recommend", "--model", "slm-2b", "--gpu", "a100-40gb:8@2", "--tokens", "40B", "--deadline_hours", "1"
    )
    assert done.code == 1
    assert "nothing is within 1 h" in done.out
    assert "the fastest: 8 x a100-40gb" in done.out


def test_a_target_loss_takes_the_tokens_of_the_law() -> None:
    (row, *_) = recommended("--model", "slm-1b", "--gpu", "h100-80gb:1", "--target_loss", "2.9")
    # 2.9 = 1.81686 + 482.006 / N^0.34781 + 2085.434 / D^0.36585 with N = 970,458,240: 0.36081 is of size, so
    # that D^0.36585 = 2085.434 / 0.72233 and D = 2887.1^(1/0.36585) = 2.876e9
    assert row["num_tokens"] == pytest.approx(2.876e9, rel=0.001)
    assert row["expected_loss"] == pytest.approx(2.9)
    done = slm_here("recommend", "--model", "slm-1b", "--gpu", "h100-80gb", "--target_loss", "1.9")
    assert done.code == 2
    assert "hint: infinite tokens give" in done.err


def test_without_a_price_cost_is_unknown_and_the_report_says_how_to_give_one() -> None:
    asked = ("--model", "slm-100m", "--gpu", "a40:1", "--tokens", "1B")
    assert "a40: the price is unknown: give it as a40@USD" in slm_here("recommend", *asked).err
    (row, *_) = recommended(*asked)
    assert row["usd"] is row["usd_per_million_tokens"] is None


def test_without_gpu_every_type_with_a_known_price_is_ranked() -> None:
    rows = recommended("--model", "slm-100m", "--num_gpus", "1", "--tokens", "1B")
    priced = {gpu.name for gpu in gpus() if price_of(gpu.name) is not None}
    assert {row["gpu"] for row in rows} == priced
    rows = recommended("--model", "slm-100m", "--gpu", "all:1", "--tokens", "1B", "--strategy", "single")
    assert {(row["gpu"], row["num_gpus"]) for row in rows} == {(gpu.name, 1) for gpu in gpus()}


def test_every_problem_of_the_flags_is_named_at_once() -> None:
    done = slm_here("recommend", "--gpu", "h100-80gb:13", "a100-40gb:8@0", "h100-80gb:x", "l4:0")
    assert done.code == 2
    for problem in (
        "13 GPUs can't be the same number on each node of up to 8: use full nodes, such as 8 or 16",
        "the price must be above 0",
        "not NAME",
        "--gpu l4:0: 0 GPUs: at least 1",
    ):
        assert problem in done.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--strategy", "ds_zero3", "--peft", "qlora"), "--peft qlora: ZeRO-3"),
        (("--global_batch_tokens", "1000"), "no batch gives 1,000 tokens per step"),
        (("--gpu", "a40:16@1"), "the network between nodes is unknown (give --network)"),
        (
            ("--gpu", "h100-80gb:2", "--strategy", "fsdp_hybrid_shard"),
            "fsdp_hybrid_shard on 2 ranks: two or more copies need at least two ranks each",
        ),
    ],
)
def test_what_was_not_considered_is_named_with_its_reason(flags: tuple[str, ...], reason: str) -> None:
    gpu = () if "--gpu" in flags else ("--gpu", "h100-80gb:8")
    done = slm_here("recommend", "--model", "slm-1b", "--tokens", "1B", *gpu, *flags)
    assert done.code == 1
    assert reason in done.err
    assert done.out.startswith("no plan: ")


def test_what_is_not_given_is_searched_and_what_is_given_stays() -> None:
    asked = ("--model", "slm-500m", "--gpu", "a100-40gb:1@2", "--tokens", "1B")
    (best,) = recommended(*asked)
    names = ("fused", "compiled", "plain")
    rows = [recommended(*asked, "--kernels", name)[0] for name in names]
    assert tuple(row["kernels"] for row in rows) == names
    fused, compiled, slow = (row["usd"] for row in rows)
    assert best["usd"] == min(fused, compiled) < fused + compiled - best["usd"] < slow


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("--model", "slm-500m", "--gpu", "l4:1,8", "a100-40gb:1,3,8"), marks=pytest.mark.full),
        ("--model", "slm-13b", "--gpu", "a100-40gb:16@2"),
        ("--model", "slm-2b", "--gpu", "rtx-4090:2", "--seq_len", "4096", "--objective", "time"),
    ],
)
def test_what_the_search_skips_would_not_be_better(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recommended(*asked, "--tokens", "1B")
    monkeypatch.setattr(plans, "_ENOUGH_BATCHES", 1000)
    candidates_of = plans.candidates_of

    def unlike(*args: object) -> list[plans.Candidate]:
        return [dataclasses.replace(each, with_any_saving=n) for n, each in enumerate(candidates_of(*args))]

    monkeypatch.setattr(plans, "candidates_of", unlike)
    assert recommended(*asked, "--tokens", "1B") == found


def made_plans(*strategies: str, usd: list[float]) -> list[Plan]:
    """Plans on 16 A100s at these dollars, and hours to match."""
    found = zip(plans_of(*strategies, num_gpus=16), usd, strict=True)
    return [dataclasses.replace(plan, usd=amount, hours=amount / 32) for plan, amount in found]


def names_of(ranked: list[Plan]) -> list[str]:
    return [plan.strategy.name for plan in ranked]


def test_ties_go_to_the_simplest_strategy() -> None:
    order = ("ddp", "ds_zero1", "fsdp_shard_grad_op", "ds_zero2", "fsdp_full_shard", "ds_zero3")
    reverse = made_plans(*reversed(order), usd=[100, 100.5, 101, 101.5, 102, 102.5])
    for objective in ("cost", "time"):
        assert names_of(best_plans(reverse, objective=objective)) == list(order)
    # 103.5 is more than 3% above 100, and less than 3% above 102
    ranked = best_plans(made_plans("ds_zero3", "ds_zero2", "ddp", usd=[100, 102, 103.5]), objective="cost")
    assert names_of(ranked) == ["ds_zero2", "ds_zero3", "ddp"]
    (line,) = reasons(ranked[:2], objective="cost")
    assert "too close to rank: 2." in line


def test_a_gpu_type_without_published_runs_is_marked() -> None:
    shown = slm_here("recommend", "--model", "slm-100m", "--gpu", "gh200:1", "l4:1", "--tokens", "1B").out
    assert re.search(r"1 x gh200 .* never measured ", shown)
    assert "rarely measured" in shown


def test_the_report_says_what_may_not_fit() -> None:
    words = ("--model", "slm-2b", "--gpu", "a100-40gb:8", "--strategy", "ddp", "--tokens", "1B")
    assert re.search(r"estimated, may fit \d\d%", slm_here("recommend", *words).out)


def test_fine_tuning_needs_its_length_and_promises_no_loss(tmp_path: Path) -> None:
    own = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    (tmp_path / "model.safetensors").touch()  # an estimate does not read weights
    for model in (own, "qwen2.5-1.5b"):
        done = slm_here("recommend", "--model", model, "--gpu", "h100-80gb:1")
        assert done.code == 2
        assert f"--model {model} has weights" in done.err
        assert "hint: --tokens 50M" in done.err
        (row,) = recommended("--model", model, "--gpu", "h100-80gb:1@2", "--tokens", "50M")
        assert row["expected_loss"] is None
        assert row["tokens_per_step"] == 128 * 1024
    refused = slm_here("recommend", "--model", own, "--gpu", "l4:1", "--target_loss", "3").err
    assert "scaling laws don't say how long" in refused
    shown = slm_here("recommend", "--model", "qwen2.5-1.5b", "--gpu", "l4:8", "--tokens", "50M").out
    assert shown.startswith("qwen2.5-1.5b, from the weights of Qwen/Qwen2.5-1.5B: 50.0M tokens")


def test_the_evidence_of_gpus_agrees_with_the_tables() -> None:
    rows = bench("speed_rows").published_rows
    fitted, compared = ({row.gpu.name for row in found} for found in (rows(), rows("other_speed.csv")))
    for gpu in gpus():
        found = "fitted" if gpu.name in fitted else "compared" if gpu.name in compared else "none"
        assert gpu.speed_evidence == found, gpu.name
