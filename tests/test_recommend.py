"""`slm recommend`: what it ranks, why, what it writes, and what records change."""

import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import launch, made_record, record_under, slm

from slm_toolkit.cli import main
from slm_toolkit.config import RunConfig
from slm_toolkit.launch_files import launch_commands, yaml_name
from slm_toolkit.predict.plan_ranking import best_plans, reason_of
from slm_toolkit.predict.plans import GpuOffer, Job, Plan, plans
from slm_toolkit.predict.scaling_laws import LAWS
from slm_toolkit.record import write_record
from slm_toolkit.strategy import find_strategy


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
        assert row["verdict"] in ("fits", "tight")
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
    done = slm(
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
    done = slm("recommend", "--model", "slm-1b", "--gpu", "h100-80gb", "--target_loss", "1.9")
    assert done.code == 2
    assert "hint: endless tokens lead to" in done.err


def test_without_a_price_cost_is_a_dash_and_the_report_says_how_to_give_one() -> None:
    done = slm("recommend", "--model", "slm-100m", "--gpu", "a40:1", "--tokens", "1B")
    assert done.code == 0
    assert "a40: no price known: give one as a40@USD, or with --prices" in done.err
    (row, *_) = recommended("--model", "slm-100m", "--gpu", "a40:1", "--tokens", "1B")
    assert row["usd"] is None
    assert row["usd_per_million_tokens"] is None
    assert row["hours"] > 0


def test_aligned_widths_are_named_for_each_gpu_type() -> None:
    done = slm("recommend", "--model", "slm-500m", "--gpu", "a100-40gb:1", "h100-80gb:1", "--tokens", "1B")
    for name in ("a100-40gb", "h100-80gb"):
        assert f"on {name} slm-500m-hw (FFN 4096 for 4147) should train " in done.out
    assert "should train" not in slm("recommend", "--model", "slm-500m-hw", "--gpu", "h100-80gb:1").out


def test_what_is_shown_to_paste_is_what_the_first_row_says(tmp_path: Path) -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:16", "--strategy", "ds_zero3", "--tokens", "20B")
    (row, *_) = recommended(*asked, "--write", str(tmp_path / "plan"))
    script = (tmp_path / "plan" / "launch.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("accelerate launch")]
    words = shlex.split(line)
    flags = dict(zip(words[2:], words[3:], strict=False))
    assert flags["--num_processes"] == "16"
    assert flags["--num_machines"] == "2"
    assert flags["--per_device_train_batch_size"] == str(row["per_device_train_batch_size"])
    assert flags["--max_steps"] == str(row["num_steps"])
    config = yaml.safe_load(Path(flags["--config_file"]).read_text())
    assert config["num_processes"] == 16
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert Path(config["deepspeed_config"]["deepspeed_config_file"]).is_file()
    again = slm("recommend", *asked, "--write", str(tmp_path / "plan"))
    assert again.code == 2
    assert "launch.sh exists\nhint: " in again.err


def test_the_command_of_a_small_plan_trains(tmp_path: Path) -> None:
    """On this machine's CPU, a step of a small batch: the flags and the YAML are what is shown."""
    plan = plans_of("single", num_gpus=1)[0]
    (command,) = launch_commands(plan, yaml_name(plan))
    words = shlex.split(command)
    config, flags = words[words.index("--config_file") + 1], words[words.index("slm_toolkit.train") + 1 :]
    small = ("--max_steps", "1", "--seq_len", "32", "--output_dir", str(tmp_path))
    assert launch(*flags, *small, config=config).code == 0
    record = record_under(tmp_path)
    assert record["asked"]["config"]["norm_kernel"] == plan.config.norm_kernel == "fused"
    assert record["asked"]["config"]["per_device_train_batch_size"] == 8


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
    done = slm("recommend", "--gpu", "h100-80gb:12", "a100-40gb:8@0", "h100-80gb:x", "rtx-5090")
    assert done.code == 2
    for problem in (
        "12 GPUs: at least 1, and full nodes of 8",
        "a price is above 0",
        "not NAME",
        "memory is not known",
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


def plans_of(*strategies: str, num_gpus: int, inter_node_gbps: float | None = None) -> list[Plan]:
    from slm_toolkit.hardware import gpu_of_name
    from slm_toolkit.models import PRESETS
    from slm_toolkit.predict.bandwidth import cluster_of
    from slm_toolkit.predict.site import Site
    from slm_toolkit.prices import Price

    gpu = gpu_of_name("a100-80gb")
    site = Site(cluster_of(gpu, inter_node_gbps=inter_node_gbps), Price(2.0, "made up"))
    offer = GpuOffer(gpu, (num_gpus,), site)
    job = Job("slm-1m", PRESETS["slm-1m"], 1e9, num_gpus * 8 * 1024, LAWS["besiroglu"])
    if num_gpus > 1:
        job = Job("slm-500m", PRESETS["slm-500m"], 1e9, num_gpus * 8 * 1024, LAWS["besiroglu"])
    config = RunConfig(model=job.asked_model, per_device_train_batch_size=8, norm_kernel="fused")
    configs = [config.with_defaults(has_gpu=True)]
    found = [find_strategy(name) for name in strategies]
    return list(plans(job, [offer], found, configs, gpus_per_node=8, observations={}))
