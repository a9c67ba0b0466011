"""Rates, warm-up, intervals, ranks and audits, from records made by hand with numbers worked by hand."""

import dataclasses
from math import exp, sqrt
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row, ranked
from slm_toolkit.report.stats import (
    LAUNCH_NOISE,
    interval_of_median,
    overlap,
    paired_lead,
    throughput,
)


def with_steps(*slowest: float, **changes: object) -> RunRecord:
    """A record whose first rank took these seconds, the second half as long; 8,192 tokens each."""
    ranks = [list(slowest), [seconds / 2 for seconds in slowest]]
    return made_record(step_seconds=ranks, **{"losses": [10.0] * len(slowest), **changes})


def row_from(*launches: RunRecord) -> Row:
    return Row([(Path(f"r{index}"), record) for index, record in enumerate(launches)])


def test_the_slowest_rank_sets_the_rate_and_warm_up_does_not_count() -> None:
    rate = throughput([made_record()])  # 3 steps of 9 s, then 30 of 0.4 s and 0.5 s on two ranks
    assert rate.tokens_per_second == pytest.approx(8192 / 0.5)
    assert (rate.num_timed_steps, rate.num_warmup_steps) == (30, 3)


def test_the_median_of_blocks_is_the_rate_and_their_ends_are_the_interval() -> None:
    rate = throughput([with_steps(*[9.0] * 3, *[1.0] * 10, *[2.0] * 10, *[4.0] * 10)])
    assert (rate.tokens_per_second_lowest, rate.tokens_per_second, rate.tokens_per_second_highest) == (
        8192 / 4,
        8192 / 2,
        8192 / 1,
    )


def test_one_launch_is_never_more_certain_than_launches_are_alike() -> None:
    rate = throughput([made_record()])  # thirty equal steps
    assert rate.tokens_per_second_lowest == pytest.approx(rate.tokens_per_second * (1 - LAUNCH_NOISE))
    assert rate.tokens_per_second_highest == pytest.approx(rate.tokens_per_second * (1 + LAUNCH_NOISE))


def test_three_launches_or_more_show_themselves_how_much_they_differ() -> None:
    # rates 99, 100, 101 times 81.92: s = 81.92; t for 2 degrees of freedom 4.303; half = t s sqrt(1 + 1/3)
    launches = [with_steps(*[100 / percent] * 31) for percent in (99, 100, 101)]
    rate = throughput(launches)
    half = 4.303 * 81.92 * (4 / 3) ** 0.5
    assert rate.tokens_per_second == pytest.approx(8192)
    assert (rate.tokens_per_second_lowest, rate.tokens_per_second_highest) == pytest.approx(
        (8192 - half, 8192 + half)
    )
    assert (rate.num_launches, rate.num_timed_steps) == (3, 90)


def test_one_slow_launch_of_three_does_not_move_the_rate() -> None:
    launches = [with_steps(*[seconds] * 31) for seconds in (1.0, 1.25, 10.0)]
    assert throughput(launches).tokens_per_second == pytest.approx(8192 / 1.25)


def test_one_block_of_steps_is_taken_step_by_step() -> None:
    # ten timed steps are one block, which says nothing of how steps differ; two of them are half as fast.
    # Of ten values the second lowest and the second highest hold the median in 98 % of samples
    rate = throughput([with_steps(1.0, *[1.0] * 8, *[2.0] * 2)])
    assert rate.tokens_per_second == pytest.approx(10 * 8192 / 12)
    assert (rate.tokens_per_second_lowest, rate.tokens_per_second_highest) == pytest.approx((8192 / 2, 8192))


def test_fewer_than_ten_timed_steps_have_no_interval_and_no_rank() -> None:
    nine, ten = (with_steps(*[1.0] * (1 + count)) for count in (9, 10))
    assert (throughput([nine]).tokens_per_second_lowest, throughput([nine]).tokens_per_second_highest) == (
        None,
        None,
    )
    assert throughput([ten]).tokens_per_second_lowest == pytest.approx(8192 * (1 - LAUNCH_NOISE))
    rows = [
        row_from(dataclasses.replace(record, strategy=name)) for record, name in ((nine, "a"), (ten, "b"))
    ]
    assert [row.rank for row in ranked([*rows, rows[1]])] == [None, 1, 1]


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


@pytest.mark.parametrize("num_timed", [1, 9, 19, 20, 35])
def test_a_remainder_makes_blocks_longer_and_no_step_is_lost(num_timed: int) -> None:
    rate = throughput([with_steps(*[1.0] * (3 + num_timed), num_probed_steps=3)])
    assert (rate.num_timed_steps, rate.tokens_per_second) == (num_timed, 8192)


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
        ([9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0], [], 4),
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [], 3),  # never steady: the second half counts
        ([1.0, 1.0], [], 1),
    ],
)
def test_warm_up_is_found(slowest: list[float], graphs: list[int], expected: int) -> None:
    assert with_steps(*slowest, num_graphs_compiled=graphs).num_warmup_steps == expected


@pytest.mark.parametrize(
    ("count", "skipped"),
    # ranks of the order statistics around the median that hold it in 95 %: Conover, table A3 (p = 0.5)
    [(1, 0), (3, 0), (5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (25, 7)],
)
def test_the_interval_of_a_median_by_the_binomial_distribution(count: int, skipped: int) -> None:
    sample = [float(value) for value in range(count)]
    assert interval_of_median(sample[::-1]) == (skipped, count - 1 - skipped)


@pytest.mark.parametrize(
    ("first", "second", "tied"),
    [((1, 2), (2, 3), True), ((1, 2), (2.1, 3), False), ((2.1, 3), (1, 2), False), ((1, 9), (2, 3), True)],
)
def test_intervals_that_overlap_are_a_tie(first: tuple, second: tuple, tied: bool) -> None:
    assert overlap(first, second) is tied


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
    assert [row.rank for row in ranked([rows[0], failed, broken, rows[3]])] == [
        1,
        None,
        None,
        2,
    ]


NUMERICS = {"residual_dtype": "bfloat16", "accumulation": 1, "tokens_per_step": 8192}


def test_rows_are_marked_against_ddp_and_strict_leaves_them_out() -> None:
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
    assert [row.rank for row in ranked(made)] == [1, 1, 1]


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


def test_what_may_have_disturbed_a_run_is_said() -> None:
    quiet = {"energy_joules": None, "throttle_reasons": {}, "allocator": {"num_alloc_retries": 0}}
    record = with_steps(
        *[1.0] * 9,
        phase_seconds=[{"data": [0.1] * 9}, {"data": [0.0] * 9}],  # 10 % of the steps, on the worse rank
        num_graphs_compiled=[1, 0, 0, 0, 0, 0, 1, 0, 0],
        gpu_watch=[
            {**quiet, "num_processes_before": 0, "used_bytes_before": 2**20},
            {
                "num_processes_before": 2,
                "used_bytes_before": 3 * 2**30,
                "throttle_reasons": {"sw_power_cap": 4},
                "allocator": {"num_alloc_retries": 6},
            },
        ],
    )
    assert row_from(record).warnings == [
        "waited for data 10% of the time: --dataloader_num_workers 1 or more reads ahead",
        "compiled again in timed step 7",
        "rank 1: the GPU was in use before the run (3.0 GiB)",
        "rank 1: clocks throttled: sw_power_cap in 4 steps",
        "rank 1: the GPU was nearly full: the allocator waited, freed unused blocks and retried 6 times, "
        "which makes steps slower",
    ]
    nan = row_from(with_steps(*[1.0] * 4, losses=[5.0, 5.0, None, None]))
    assert nan.warnings == ["the loss is not finite from step 3 on"]
    assert row_from(with_steps(*[1.0] * 9)).warnings == []


def test_what_bound_a_run_is_said_with_what_helps() -> None:
    idle = {"utilization": [99, 60, 62, 58, 61, 59, 60, 60, 60], "throttle_reasons": {}}
    record = with_steps(
        *[1.0] * 9,
        phase_seconds=[{"data": [0.0] * 9}],
        tokens_counted={"drawn": 1000, "in_loss": 1000},
        num_padding_tokens=250,
        gpu_watch=[idle],
        host_ram={  # 3 of 100 GiB
            "total_bytes": 100 * 2**30,
            "least_available_bytes": 3 * 2**30,
            "swapped_out_bytes": 2**30,
        },
    )
    row = row_from(record)
    assert row.warnings == [
        "25% of the tokens were padding; --packing multipack packs documents together",
        "host RAM was short: only 3.0 of 100 GiB were free; use --streaming true, fewer "
        "--dataloader_num_workers or less offload",
        "the machine swapped 1.0 GiB out while the steps ran",
        "rank 0: the GPU was busy only 60% of the time; larger batches or --kernels compiled use it better",
    ]
    whole = row_from(dataclasses.replace(record, num_padding_tokens=0))
    assert row.tokens_per_second == pytest.approx(0.75 * whole.tokens_per_second)  # of tokens that are some
    assert row.mfu == pytest.approx(whole.mfu)  # padding was computed, too


def test_a_failed_launch_among_repeats_is_not_hidden() -> None:
    unknown = {"world_size": None, "engine": None, "tokens_per_step": None, "losses": [], "state_bytes": []}
    failed = made_record(
        status="failed", reason="the sky", step_seconds=[], **unknown
    )  # as compare writes it
    for launches in ([with_steps(*[1.0] * 9), failed], [failed, with_steps(*[1.0] * 9)]):
        row = row_from(*launches)
        assert (row.status, row.reason) == ("failed", "the sky")
        assert row.tokens_per_second == 8192  # what is known of the other stays
        assert row.usd_per_million_tokens > 0
        assert row.rank is None


def test_a_row_that_was_not_probed_has_no_rank_where_numerics_count() -> None:
    names = ("ddp", "ds_zero1")
    rows = [row_from(with_steps(*[1.0] * 13, strategy=name, identity=name)) for name in names]
    assert [row.rank for row in ranked(rows)] == [1, 1]
    assert [row.rank for row in ranked(rows, strict=True)] == [None, None]


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
