"""Rates, warm-up, intervals, ranks and audits, from records made by hand with numbers worked by hand."""

import dataclasses
from math import exp, sqrt
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row, ranked
from slm_toolkit.report.stats import interval_of_median, paired_lead, throughput


def with_steps(*slowest: float, **changes: object) -> RunRecord:
    """A record whose first rank took these seconds, the second half as long; 8,192 tokens each."""
    ranks = [list(slowest), [seconds / 2 for seconds in slowest]]
    return made_record(step_seconds=ranks, **{"losses": [10.0] * len(slowest), **changes})


def row_from(*launches: RunRecord) -> Row:
    return Row([(Path(f"r{index}"), record) for index, record in enumerate(launches)])


def launches(*seconds: float) -> list[RunRecord]:
    """Launches of 30 timed steps of so many seconds each."""
    return [with_steps(*[each] * 31) for each in seconds]


HALF = 4.303 * 81.92 * (4 / 3) ** 0.5
# a case, its launches, the rate, the ends of its interval, and the timed steps
RATES = {
    # 3 steps of 9 s, then 30 of 0.4 s and 0.5 s on two ranks, of which the slowest counts; at least 5 % noise
    "one launch": ([made_record()], 8192 / 0.5, (0.95 * 8192 / 0.5, 1.05 * 8192 / 0.5), 30),
    "blocks": (
        [with_steps(*[9.0] * 3, *[1.0] * 10, *[2.0] * 10, *[4.0] * 10)],
        8192 / 2,
        (8192 / 4, 8192),
        30,
    ),
    # rates 99, 100, 101 times 81.92: s = 81.92; t for 2 degrees of freedom 4.303; half = t s sqrt(1 + 1/3)
    "three launches": (launches(100 / 99, 1.0, 100 / 101), 8192, (8192 - HALF, 8192 + HALF), 90),
    # ten steps are one block, which does not show how steps differ; two of them are half as fast. Of ten
    # values the second lowest and the second highest hold the median in 98 % of samples
    "one block": ([with_steps(1.0, *[1.0] * 8, *[2.0] * 2)], 10 * 8192 / 12, (8192 / 2, 8192), 10),
    "too few steps": ([with_steps(*[1.0] * 10)], 8192, (None, None), 9),
    "a remainder": ([with_steps(*[1.0] * 36)], 8192, (0.95 * 8192, 1.05 * 8192), 35),
}


@pytest.mark.parametrize("name", RATES)
def test_the_rate_is_the_median_after_warm_up_with_an_interval(name: str) -> None:
    records, rate, interval, num_timed_steps = RATES[name]
    found = throughput(records)
    assert found.tokens_per_second == pytest.approx(rate)
    assert (found.tokens_per_second_lowest, found.tokens_per_second_highest) == pytest.approx(interval)
    assert (found.num_timed_steps, found.num_launches) == (num_timed_steps, len(records))


def test_one_slow_launch_of_three_does_not_move_the_rate() -> None:
    assert throughput(launches(1.0, 1.25, 10.0)).tokens_per_second == pytest.approx(8192 / 1.25)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"gpu": None, "num_cores": 4, "other_busy_cores": 1.0}, (4 / 3) ** 2),
        ({"gpu": None, "num_cores": 4, "other_busy_cores": 0.2}, 1.05),  # below a quarter: not disturbed
        ({"num_cores": 4, "other_busy_cores": 1.0}, 1.05),  # on a GPU the host's cores are seldom what counts
        ({"gpu_watch": [{"num_processes_before": 1}, {}]}, 2.0),
        ({"gpu_watch": [{"used_bytes_before": 2**31}, {}]}, 2.0),
    ],
)
def test_what_others_took_widens_the_interval(changes: dict, factor: float) -> None:
    rate = throughput([made_record(**changes)])
    assert rate.tokens_per_second_highest == pytest.approx(rate.tokens_per_second * factor)


def test_a_run_shorter_than_its_warm_up_has_no_rate() -> None:
    assert throughput([with_steps(1.0, 1.0, 1.0, num_probed_steps=3)]) is None
    assert throughput([with_steps(1.0)]) is None  # one step, which was probed
    assert throughput([with_steps()]) is None


@pytest.mark.parametrize(
    ("slowest", "graphs", "expected"),
    [
        ([1.0] * 10, [], 1),  # the first is probed
        ([5.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [], 2),
        ([5.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0], [], 3),  # one good step is not the steady state
        ([5.0, 1.05, 1.0, 1.0, 1.0, 1.0], [], 1),  # 5 % is noise
        ([1.0] * 10, [1, 0, 0, 2, 0, 0, 0, 0, 0, 0], 4),  # compiled again in the fourth
        ([1.0] * 10, [1, 0, 0, 0, 0, 0, 0, 1, 0, 0], 1),  # in the second half it is no warm-up
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [], 3),  # never steady: the second half counts
    ],
)
def test_warm_up_is_found(slowest: list[float], graphs: list[int], expected: int) -> None:
    assert with_steps(*slowest, num_graphs_compiled=graphs).num_warmup_steps == expected


@pytest.mark.parametrize(
    ("count", "skipped"),
    # ranks of the order statistics around the median that hold it in 95 %: Conover, table A3 (p = 0.5)
    [(1, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (25, 7)],
)
def test_the_interval_of_a_median_by_the_binomial_distribution(count: int, skipped: int) -> None:
    sample = [float(value) for value in range(count)]
    assert interval_of_median(sample[::-1]) == (skipped, count - 1 - skipped)


def test_ranks_count_the_rows_that_are_clearly_faster() -> None:
    # +-5 % each: 1.00 and 0.97 overlap, 0.80 does not, and is not clearly faster than 0.75
    seconds = {"ddp": 1.0, "ds_zero1": 1 / 0.97, "ds_zero2": 1 / 0.8, "ds_zero3": 1 / 0.75}
    rows = [
        row_from(with_steps(*[each] * 11, strategy=name, identity=name, losses=[10.0] * 11))
        for name, each in seconds.items()
    ]
    found = ranked(rows)
    assert [row.rank for row in found] == [1, 1, 3, 3]
    assert [row.shares_rank for row in found] == [True] * 4
    failed = rows[1].with_values(status="failed")
    broken = rows[2].with_values(parity_holds=False)
    assert [row.rank for row in ranked([rows[0], failed, broken, rows[3]])] == [1, None, None, 2]


NUMERICS = {"residual_dtype": "bfloat16", "accumulation": 1, "tokens_per_step": 8192}


def test_rows_are_marked_against_ddp() -> None:
    other = {**NUMERICS, "residual_dtype": "float32"}
    made = [
        row_from(with_steps(*[1.0] * 13, strategy=name, identity=name, engine=engine, numerics=numerics))
        for name, engine, numerics in (
            ("ds_zero2", "deepspeed", NUMERICS),
            ("ddp", "ddp", NUMERICS),
            ("fsdp_full_shard", "fsdp2", other),
        )
    ]
    rows = ranked(made)
    assert [row.numerics_differences for row in rows] == [[], [], ["residual float32 (not bfloat16)"]]
    assert [row.numerics_reference for row in rows] == ["ddp", None, "ddp"]
    assert [row.rank for row in rows] == [1, 1, 1]


def test_tokens_are_counted_three_ways_and_must_agree() -> None:
    # 9 steps of 8,192 tokens: 73,728
    fine = with_steps(*[1.0] * 9, tokens_counted={"drawn": 73_728, "in_loss": 73_728}, numerics=NUMERICS)
    assert row_from(fine).status == "ok"
    for counted in ({"drawn": 73_728, "in_loss": 36_864}, {"drawn": 36_864, "in_loss": 36_864}):
        row = row_from(dataclasses.replace(fine, tokens_counted=counted))
        assert row.status == "failed"
        assert "tokens were counted differently: planned 73,728" in row.reason
    half = {**NUMERICS, "tokens_per_step": 4096}
    assert "probed 36,864" in row_from(dataclasses.replace(fine, numerics=half)).reason


def test_both_conventions_of_flops_are_there() -> None:
    # slm-100m, sequence 1024 (test_flops): 715,593,216 with attention's 12 L H S, and 6 N without
    row = row_from(made_record())
    attention = row.flops_per_token - row.flops_per_token_without_attention
    assert row.flops_per_token == 715_593_216
    assert attention == 12 * 9 * 832 * 1024  # layers, heads x head_dim, sequence
    share = row.flops_per_token_without_attention / row.flops_per_token
    assert row.mfu_without_attention == pytest.approx(row.mfu * share)


def test_joules_per_token_are_of_all_gpus_and_timed_steps_only() -> None:
    # two GPUs: 700 J and 300 J in each of 8 timed steps of 8,192 tokens; the first 9,000 J don't count;
    # of 8 steps of 0.2 s, 1.6 s in all, the counter tells too little
    watch = [{"energy_joules": [9000.0] + [joules] * 8} for joules in (700.0, 300.0)]
    assert row_from(with_steps(*[1.0] * 9, gpu_watch=watch)).joules_per_token == pytest.approx(1000 / 8192)
    assert row_from(with_steps(*[0.2] * 9, gpu_watch=watch)).joules_per_token is None
    # half of the tokens are padding, which no rate counts
    half = {"tokens_counted": {"drawn": 100, "in_loss": 100}, "num_padding_tokens": 50}
    padded = row_from(with_steps(*[1.0] * 9, gpu_watch=watch, **half))
    assert padded.joules_per_token == pytest.approx(1000 / 4096)
    unknown = [watch[0], {"energy_joules": None}]
    assert row_from(with_steps(*[1.0] * 9, gpu_watch=unknown)).joules_per_token is None


QUIET = {"energy_joules": None, "throttle_reasons": {}, "allocator": {"num_alloc_retries": 0}}
WARNINGS = {
    # 10 % of the steps, on the worse rank
    "waited for data 10% of the time": {"phase_seconds": [{"data": [0.1] * 9}, {"data": [0.0] * 9}]},
    "compiled again in timed step 7": {"num_graphs_compiled": [1, 0, 0, 0, 0, 0, 1, 0, 0]},
    "rank 1: the GPU was in use before the run (3.0 GiB)": {
        "gpu_watch": [QUIET, {"num_processes_before": 2, "used_bytes_before": 3 * 2**30}]
    },
    "rank 0: clocks throttled: sw_power_cap in 4 steps": {
        "gpu_watch": [{"throttle_reasons": {"sw_power_cap": 4}}]
    },
    "rank 0: the GPU was nearly full": {"gpu_watch": [{"allocator": {"num_alloc_retries": 6}}]},
    "the loss is not finite from step 3 on": {"losses": [5.0, 5.0, None] + [5.0] * 6},
    "25% of the tokens were padding: --packing multipack": {
        "tokens_counted": {"drawn": 1000},
        "num_padding_tokens": 250,
        "tokens_per_step": None,
    },
    "the machine swapped 1.0 GiB out": {
        "host_ram": {"total_bytes": 0, "least_available_bytes": 0, "swapped_out_bytes": 2**30}
    },
    "other programs kept 1.5 CPU cores busy": {"gpu": None, "other_busy_cores": 1.5},
    "the fp32 steps failed: why": {"fp32_pass": {"status": "failed", "reason": "why"}},
    "plain": {"plain_kernels": "plain"},
}


@pytest.mark.parametrize("warning", WARNINGS)
def test_what_disturbed_or_slowed_a_run_is_a_warning(warning: str) -> None:
    warnings = row_from(with_steps(*[1.0] * 9, **WARNINGS[warning])).warnings
    assert warnings[-1].startswith(warning)
    assert row_from(with_steps(*[1.0] * 9, gpu_watch=[QUIET])).warnings == []


def test_padding_counts_for_mfu_alone() -> None:
    record = with_steps(*[1.0] * 9, tokens_counted={"drawn": 73_728, "in_loss": 73_728})
    whole, row = row_from(record), row_from(dataclasses.replace(record, num_padding_tokens=18_432))
    assert row.tokens_per_second == pytest.approx(0.75 * whole.tokens_per_second)
    assert row.mfu == pytest.approx(whole.mfu)  # padding was computed, too


def test_a_failed_launch_among_repeats_is_not_hidden() -> None:
    unknown = {"world_size": None, "engine": None, "tokens_per_step": None, "losses": [], "state_bytes": []}
    failed = made_record(status="failed", reason="the sky", step_seconds=[], **unknown)
    for launches in ([with_steps(*[1.0] * 9), failed], [failed, with_steps(*[1.0] * 9)]):
        row = row_from(*launches)
        assert (row.status, row.reason) == ("failed", "the sky")
        assert row.tokens_per_second == 8192  # what is known of the other stays
        assert row.usd_per_million_tokens > 0
        assert row.rank is None


def test_labels_tell_rows_apart_by_what_differs() -> None:
    rows = [row_from(with_steps(1.0, 1.0, world_size=size)) for size in (2, 4)]
    assert list(labelled(rows)) == ["ddp ranks=2", "ddp ranks=4"]
    record = with_steps(1.0, 1.0)
    twice = [Row([(Path(folder, "ddp", "record.json"), record)]) for folder in ("a", "b")]
    assert list(labelled(twice)) == ["ddp a/ddp", "ddp b/ddp"]


def test_rounds_are_paired_so_that_a_drift_of_the_machine_hides_no_difference() -> None:
    # the machine gets up to twice as slow from round to round, but b always takes 5 % longer than a: the
    # ratio of their rates is 1.05 in each round, so the interval of its mean has no width
    slowness = (1.0, 1.5, 2.0, 1.2)
    a, b, c = (
        row_from(
            *(
                with_steps(*[factor * share] * 13, strategy=name, identity=name, run_name=f"{name}{suffix}")
                for factor, suffix in zip(slowness, ("", "-r2", "-r3", "-r4"), strict=True)
            )
        )
        for name, share in (("a", 1.0), ("b", 1.05), ("c", 1.0))
    )
    assert a.tokens_per_second_by_round.keys() == {1, 2, 3, 4}
    lead = paired_lead(a.tokens_per_second_by_round, b.tokens_per_second_by_round)
    assert lead == pytest.approx((1.05, 1.05))
    assert a.is_uncertain  # one more launch may be over twice as slow: alone, this rate has no rank
    assert [row.rank for row in ranked([a, b, c])] == [1, 3, 1]


def test_the_interval_of_paired_rounds_is_students() -> None:
    # ratios e^0.1, e^0.2, e^0.3: mean of the logarithms 0.2, s = 0.1, t for 2 degrees of freedom 9.925
    rates = {1: exp(0.1), 2: exp(0.2), 3: exp(0.3), 5: 7.0}
    half = 9.925 * 0.1 / sqrt(3)
    assert paired_lead(rates, {1: 1.0, 2: 1.0, 3: 1.0, 4: 9.0}) == pytest.approx(
        (exp(0.2 - half), exp(0.2 + half))
    )
    assert paired_lead(rates, {1: 1.0, 2: 1.0}) is None


def test_launches_of_the_same_round_are_not_paired() -> None:
    assert throughput([made_record(), made_record()]).by_round == {}
