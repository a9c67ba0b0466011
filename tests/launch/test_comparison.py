"""Six strategies really trained through `slm compare`: engines, shares of the state, losses."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import ALIGNED, Comparison, compare, made_record, slm

from slm_toolkit.record.files import find_records, read_record, write_record
from slm_toolkit.report.stats import throughput
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy

SHARDED = [
    (name, part)
    for name in STUDIED_STRATEGIES
    for part in ("parameters", "gradients", "optimizer")
    if part in find_strategy(name).sharded_parts
]
NUMERICS = pytest.mark.parametrize("numerics", [pytest.param("aligned", marks=pytest.mark.quick), "fp32"])


@pytest.mark.quick
def test_what_ran_is_what_the_yaml_asks_for(aligned: Comparison) -> None:
    assert aligned.finished.code == 0, aligned.finished.err
    assert list(aligned.rows) == list(STUDIED_STRATEGIES)
    for name, row in aligned.rows.items():
        strategy = find_strategy(name)
        found = [
            row[key] for key in ("status", "world_size", "engine", "zero_stage", "reshard_after_forward")
        ]
        asked = ["ok", 2, strategy.engine, strategy.zero_stage, strategy.reshard_after_forward]
        assert found == asked


@pytest.mark.parametrize(("name", "part"), SHARDED)
@NUMERICS
def test_what_a_strategy_shards_is_half_of_ddps_on_two_ranks(
    numerics: str, name: str, part: str, request: pytest.FixtureRequest
) -> None:
    rows = request.getfixturevalue(numerics).rows
    mine, of_ddp = rows[name]["state_bytes_per_rank"][part], rows["ddp"]["state_bytes_per_rank"][part]
    assert mine == pytest.approx(of_ddp / 2, rel=0.02)


@NUMERICS
def test_ddp_holds_sixteen_bytes_per_parameter(numerics: str, request: pytest.FixtureRequest) -> None:
    # slm-1m has 951,424: bf16 weights and gradients 2 + 2, fp32 master 4, Adam 8; in fp32 4 + 4 + 8
    wanted = {"aligned": (2, 2, 4, 8), "fp32": (4, 4, 0, 8)}[numerics]
    state = request.getfixturevalue(numerics).rows["ddp"]["state_bytes_per_rank"]
    parts = [state[part] for part in ("parameters", "gradients", "master_weights", "optimizer")]
    assert parts == pytest.approx([951_424 * bytes_each for bytes_each in wanted], rel=1e-3)


@pytest.mark.quick
def test_on_cpu_gpu_figures_are_unknown_and_process_memory_is_not(aligned: Comparison) -> None:
    for row in aligned.rows.values():
        assert row["mfu"] is row["peak_allocated_bytes"] is row["usd_per_million_tokens"] is None
        assert 2e8 < row["peak_rss_bytes"] < 4e9


@pytest.mark.quick
def test_rates_count_both_ranks(aligned: Comparison) -> None:
    for row in aligned.rows.values():
        assert row["tokens_per_second"] == pytest.approx(2 * row["tokens_per_second_per_gpu"])
        record = json.loads(Path(row["record"]).read_text())
        assert record["tokens_per_step"] == 2 * 4 * 128
        assert len(record["step_seconds"]) == 2
        slowest = [max(seconds) for seconds in zip(*record["step_seconds"], strict=True)]
        timed = slowest[row["num_warmup_steps"] :]  # fewer than 20 of 20 steps: one block
        assert row["tokens_per_second"] == pytest.approx(len(timed) * 2 * 4 * 128 / sum(timed))


@pytest.mark.quick
def test_deepspeeds_estimate_stands_beside_zero_2_and_3_only(aligned: Comparison) -> None:
    found = {name: row["deepspeed_bytes"] for name, row in aligned.rows.items() if row["deepspeed_bytes"]}
    # stage 2: 2P + 18P/2; stage 3: 4 * largest layer (384 * 128 = 128 * 384 = 49,152) + 18P/2; P = 951,424
    assert found == {"ds_zero2": 11 * 951_424, "ds_zero3": 4 * 49_152 + 9 * 951_424}


@pytest.mark.quick
def test_a_second_comparison_keeps_the_records_and_prints_the_same(aligned: Comparison) -> None:
    again = slm("compare", "--json", "--model", "slm-1m", *ALIGNED, "--output_dir", str(aligned.folder))
    assert again.out == aligned.finished.out
    assert again.err.count("kept from ") == 8  # two references too


@pytest.mark.quick
def test_report_prints_a_table_of_the_same_rows(aligned: Comparison) -> None:
    as_json = json.loads(slm("report", str(aligned.folder), "--json").out)
    assert {row["strategy"]: row for row in as_json} == aligned.rows
    table = slm("report", str(aligned.folder), "--prices", "1.5").out
    for row in aligned.rows.values():
        assert f"{row['tokens_per_second']:,.0f}" in table
        assert f"{row['final_loss']:.4f}" in table
    # dollars per million tokens: 1e6 / rate seconds at 2 * $1.5 an hour
    ddp = aligned.rows["ddp"]["tokens_per_second"]
    assert f"${1e6 / ddp * 3 / 3600:.4f}" in table
    assert "parity holds against single-process fp32 over 20 steps: |Δloss| " in table
    assert "the largest difference of 6 runs" in table


@pytest.mark.quick
def test_each_record_keeps_the_files_that_were_launched_and_the_log(aligned: Comparison) -> None:
    for row in aligned.rows.values():
        folder = aligned.folder / row["record"].split("/")[-2]
        assert find_strategy(str(folder / "launch" / f"{row['strategy']}.yaml")).engine == row["engine"]
        assert (folder / "log.txt").is_file()
        assert not (folder / "progress.json").exists()


def test_repeats_are_launches_of_their_own_and_one_row(tmp_path: Path) -> None:
    words = ("--strategy", "single", "--max_steps", "8", "--seq_len", "32", "--repeats", "3")
    done = compare(*words, folder=tmp_path)
    assert done.finished.code == 0, done.finished.err
    records = [record for _, record in find_records([tmp_path])[0]]
    assert len({record.started_at for record in records}) == 3
    assert {record.losses[3] for record in records} == {records[0].losses[3]}  # the same run, thrice
    row = done.rows["single"]
    assert (row["num_launches"], row["num_timed_steps"] >= 3) == (3, True)
    rates = sorted(throughput([record]).tokens_per_second for record in records)
    assert row["tokens_per_second"] == pytest.approx(rates[1])
    assert row["tokens_per_second_lowest"] < rates[0] <= rates[2] < row["tokens_per_second_highest"]


@pytest.mark.quick
def test_compare_with_a_baseline_is_a_table_a_verdict_and_an_exit_code(
    aligned: Comparison, tmp_path: Path
) -> None:
    before, after, other = (tmp_path / name for name in ("before", "after", "other"))
    for name in ("ddp", "ds_zero3"):
        record = read_record(Path(aligned.rows[name]["record"]))
        for folder, seconds in ((before, 0.1), (after, 0.125 if name == "ds_zero3" else 0.1)):
            quiet = {"other_busy_cores": 0.0, "step_seconds": [[seconds] * 20] * 2}  # as on our own machine
            write_record(dataclasses.replace(record, **quiet), folder / name)
    write_record(made_record(), other)
    for now, code, said in (
        (before, 0, "nothing is slower, bigger or less accurate"),
        (after, 1, "slower (-20.0%)"),
        (other, 1, "has none of these runs"),
    ):
        done = slm("report", str(now), "--baseline", str(before))
        assert (done.code, said in done.out) == (code, True), done.out
    rows = json.loads(slm("report", str(after), "--baseline", str(before), "--json").out)
    assert [row["baseline"]["speed"] for row in rows] == ["tie", "slower"]
