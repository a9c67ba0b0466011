"""Rates, MFU, dollars and the table, from records made by hand."""

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import find_gpu, find_price, gpus
from slm_toolkit.models import PRESETS
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record import RunRecord, find_records, model_facts, read_record, write_record
from slm_toolkit.report.rows import row_of
from slm_toolkit.report.stats import throughput
from slm_toolkit.report.table import comparison_table

H100 = "NVIDIA H100 80GB HBM3"


def record(**changes: object) -> RunRecord:
    """Two ranks on H100s, slm-100m: 3 warm-up steps of 9 s, then 30 steps of 0.5 s on the slower rank."""
    config = RunConfig(model="slm-100m", seq_len=1024).with_defaults(has_gpu=True)
    made = RunRecord(
        run_name="made",
        identity="0",
        status="ok",
        strategy="ddp",
        asked={"config": config.identity},
        model=model_facts(PRESETS["slm-100m"]),
        versions={},
        started_at="2026-01-01T00:00:00+00:00",
        gpu=H100,
        world_size=2,
        engine="ddp",
        tokens_per_step=2 * 4 * 1024,
        timing_warmup_steps=3,
        losses=[10.0] * 33,
        step_seconds=[[9.0] * 3 + [0.4] * 30, [1.0] * 3 + [0.5] * 30],
        state_bytes=[{"parameters": 2, "gradients": 2, "master_weights": 4, "optimizer": 8}] * 2,
        peak_allocated_bytes=[2**30, 3 * 2**30],
        peak_reserved_bytes=[2**31, 2**31],
        peak_rss_bytes=[2**31, 2**31],
    )
    return dataclasses.replace(made, **changes)


def table(rows: list, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(rows, width=width), crop=False)
    return capture.get()


def test_the_slowest_rank_sets_the_rate_and_warm_up_does_not_count() -> None:
    rate = throughput(record())
    assert rate.tokens_per_second == pytest.approx(8192 / 0.5)
    assert (rate.num_repeats, rate.lowest, rate.highest) == (
        3,
        rate.tokens_per_second,
        rate.tokens_per_second,
    )


def test_the_median_of_the_repeats_is_shown_with_the_lowest_and_highest() -> None:
    seconds = [9.0] * 3 + [1.0] * 10 + [2.0] * 10 + [4.0] * 10
    rate = throughput(record(step_seconds=[seconds, seconds]))
    assert (rate.lowest, rate.tokens_per_second, rate.highest) == (8192 / 4, 8192 / 2, 8192 / 1)


@pytest.mark.parametrize(("num_timed", "repeats"), [(1, 1), (9, 1), (19, 1), (20, 2), (35, 3)])
def test_a_remainder_makes_repeats_longer_and_no_step_is_lost(num_timed: int, repeats: int) -> None:
    rate = throughput(record(step_seconds=[[1.0] * (3 + num_timed)]))
    assert (rate.num_repeats, rate.tokens_per_second) == (repeats, 8192)


def test_a_run_shorter_than_its_warm_up_has_no_rate() -> None:
    assert throughput(record(step_seconds=[[1.0] * 3])) is None


def test_mfu_by_hand() -> None:
    # test_flops: 715,593,216 FLOPs per token; 8192 tokens/s per GPU / 989e12 = 0.5927 %
    row = row_of(record(), Path("r"))
    assert row.tokens_per_second_per_gpu == pytest.approx(8192)
    assert row.mfu == pytest.approx(8192 * 715_593_216 / 989e12)
    assert row.mfu == pytest.approx(0.005927, rel=1e-3)
    assert row.peak_allocated_bytes == 3 * 2**30


def test_an_mfu_over_100_percent_is_a_failed_row() -> None:
    row = row_of(record(step_seconds=[[0.001] * 33]), Path("r"))
    assert row.status == "failed"
    assert "of what a h100-80gb can do" in row.reason


def test_the_bf16_peak_says_nothing_of_an_fp32_run() -> None:
    asked = {"config": {**record().asked["config"], "numerics": "fp32"}}
    assert row_of(record(asked=asked), Path("r")).mfu is None


def test_an_unknown_gpu_has_no_mfu_and_no_price() -> None:
    row = row_of(record(gpu="NVIDIA Imaginary 9000"), Path("r"))
    assert row.mfu is row.usd_per_million_tokens is None
    assert row.tokens_per_second is not None


def test_dollars_by_hand() -> None:
    # a million tokens at 10,000 a second take 100 s; two GPUs at $3.60 an hour cost $0.002 a second: $0.20
    assert usd_per_million_tokens(tokens_per_second=1e4, usd_per_gpu_hour=3.6, num_gpus=2) == pytest.approx(
        0.2
    )
    row = row_of(record(), Path("r"), usd_per_gpu_hour=3.6)
    assert row.usd_per_million_tokens == pytest.approx(1e6 / 16384 * 2 * 3.6 / 3600)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GB300", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("Tesla V100-SXM2-16GB", None),
        (None, None),
    ],
)
def test_a_drivers_name_means_a_gpu_of_the_table_or_none(driver: str | None, name: str | None) -> None:
    found = find_gpu(driver)
    assert (found.name if found else None) == name


def test_every_gpu_and_price_has_a_source_and_every_price_a_date_and_a_gpu() -> None:
    from slm_toolkit.hardware import _rows

    assert all(gpu.source for gpu in gpus())
    for row in _rows("prices.csv"):
        assert row["source"]
        assert row["as_of"][:2] == "20"
        assert row["gpu"] in {gpu.name for gpu in gpus()}
        assert row["kind"] in ("on-demand", "community", "spot", "reserved")


def test_the_default_price_is_the_median_of_the_providers_newest_on_demand_ones() -> None:
    # prices.csv, h100-80gb, on-demand since 2026: AWS 6.88, Azure 12.29, CoreWeave 6.155, GCP 10.9791, Lambda
    # 3.99 (2026-09-20, not 3.78 of May), Modal 3.9492, Nebius 3.85, RunPod 3.49; in the middle 3.99 and 6.155
    price = find_price(H100, usd_per_gpu_hour=None)
    assert price.usd_per_gpu_hour == pytest.approx((3.99 + 6.155) / 2)
    assert "$3.49 to $12.29" in price.source
    assert find_price(H100, usd_per_gpu_hour=2.0).usd_per_gpu_hour == 2.0


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    rows = [row_of(record(), Path("r")), row_of(record(strategy="fsdp_shard_grad_op"), Path("r"))]
    text = table(rows, width)
    assert "16,384" in text
    assert "fsdp_shard_grad_op" in text
    assert "…" not in text
    assert "3.00" in text  # GiB allocated on the fuller rank
    assert ("left out for want of width" in text) == (width <= 120)
    if width >= 60:
        assert max(len(line) for line in text.splitlines()) <= width


def test_what_differs_is_a_column_and_what_does_not_stands_above() -> None:
    small = record()
    config = {**small.asked["config"], "per_device_train_batch_size": 16}
    rows = [row_of(small, Path("a")), row_of(dataclasses.replace(small, asked={"config": config}), Path("b"))]
    text = table(rows, 200)
    heading, *lines = [line for line in text.splitlines() if line.strip()]
    assert "slm-100m, 2 x NVIDIA H100 80GB HBM3" in heading
    assert "sequence 1024" in heading
    assert "batch" not in heading
    assert "batch" in text
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == ["4", "16"]


def test_an_oom_is_a_row_with_dashes_and_its_reason() -> None:
    broken = record(status="oom", reason="CUDA out of memory", step_seconds=[], losses=[])
    text = table([row_of(record(), Path("a")), row_of(broken, Path("b"))], 200)
    assert "oom" in text
    assert "ddp: oom: CUDA out of memory" in text


def test_a_record_is_written_whole_and_read_back_equal(tmp_path: Path) -> None:
    path = write_record(record(losses=[1.0, None]), tmp_path / "run")
    assert read_record(path) == record(losses=[1.0, None])
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    assert find_records([tmp_path]) == ([(path, record(losses=[1.0, None]))], [])


def test_a_record_with_a_number_that_json_lacks_is_not_written_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(record(losses=[float("nan")]), tmp_path)
    assert not (tmp_path / "record.json").exists()
