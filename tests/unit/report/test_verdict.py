"""The verdict of a comparison, and the order of its rows, from records with rates worked by hand."""

import argparse
import dataclasses
import io

import pytest
from conftest import made_record

from slm_toolkit.cli.output import add_output_flags, sort_of
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row, ranked, sorted_rows
from slm_toolkit.report.tables.comparison import comparison_table
from slm_toolkit.report.verdict import verdict

CPU = {"gpu": None, "cpu": "AMD", "peak_allocated_bytes": None}


def record(strategy: str, seconds: float = 0.5, peak_gib: int = 3, **changes: object) -> RunRecord:
    """30 timed steps of 8,192 tokens on two H100s, or on what `changes` name."""
    made = {"step_seconds": [[seconds] * 33] * 2, "peak_allocated_bytes": [peak_gib * 2**30] * 2}
    return made_record(**{"strategy": strategy, "identity": strategy, **made, **changes})


def rows(*records: RunRecord, usd_per_gpu_hour: float | None = None) -> list[Row]:
    pairs = [(f"{index}/record.json", one) for index, one in enumerate(records)]
    return ranked([Row([pair], prices=usd_per_gpu_hour) for pair in pairs])


def test_a_clear_winner_is_named_with_its_lead_its_cost_and_the_smallest() -> None:
    # 8192 / 0.5 = 16,384 tokens/s; the others take 0.55 s and 1 s a step: 10 % and 100 % more time.
    # 2 GPUs x $1.8 / 3600 s = $0.001 a second; 1e9 / 16,384 = 61,035 s cost $61.04
    compared = rows(
        record("ddp"), record("ds_zero2", 0.56, 2), record("ds_zero3", 1.0, 1), usd_per_gpu_hour=1.8
    )
    assert verdict(compared) == [
        "ddp is fastest: 16,384 tokens/s, 12% to 100% faster than the others.",
        "A billion tokens cost $61.04 with it.",
        "ds_zero3 needs the least memory (1.00 GiB at the peak; the most is 3.00 GiB).",
    ]


def test_a_full_tie_names_no_winner() -> None:
    # rates 1 % apart lie within 5 % of each other; 1e9 tokens: $61.04 and 1 % more
    compared = rows(record("ddp"), record("ds_zero2", 0.505), record("ds_zero3", 0.5), usd_per_gpu_hour=1.8)
    assert verdict(compared) == [
        "No row is clearly fastest: all 3 tie (16,222 to 16,384 tokens/s).",
        "A billion tokens cost $61.04 to $61.65 with these.",
        "All need the same memory (3.00 GiB at the peak).",
    ]


def test_two_that_tie_are_named_together_before_the_rest() -> None:
    compared = rows(record("ddp"), record("ds_zero2", 0.505), record("ds_zero3", 1.0))
    assert verdict(compared)[0] == (
        "ddp and ds_zero2 tie for the fastest (16,222 to 16,384 tokens/s); ddp is 100% faster than the other."
    )


def test_rows_that_dropped_out_are_named_with_the_reason() -> None:
    broken = record("ds_zero3", status="oom", reason="CUDA out of memory", step_seconds=[], losses=[])
    other, ddp, full = rows(record("ds_zero2"), record("ddp"), record("fsdp_full_shard"))
    wrong = other.with_values(parity_holds=False, parity_reference="ddp", parity="too far", rank=None)
    sentences = verdict([wrong, ddp, full, *rows(broken)])
    assert sentences[-2:] == [
        "Not ranked, computes something else: ds_zero2.",
        "Not ranked, ran out of memory: ds_zero3.",
    ]
    assert not any("computed the same" in sentence for sentence in sentences)


def test_one_row_and_too_few_steps_are_no_comparison() -> None:
    # one of ten steps is warm-up, so nine are timed
    assert verdict(rows(record("ddp")))[0] == (
        "ddp runs at 16,384 tokens/s; there is no other row to compare it with."
    )
    short = {"step_seconds": [[0.5] * 10] * 2, "losses": [10.0] * 10}
    assert verdict(rows(record("ddp", **short), record("ds_zero2", **short)))[0] == (
        "Too few steps to rank: 9 were timed, 10 are needed (--max_steps)."
    )


def test_without_a_price_there_are_no_dollars_and_on_a_cpu_the_state_is_compared() -> None:
    # the state of `made_record` is 16 bytes; half of it under ZeRO-3
    half = [{"parameters": 1, "gradients": 1, "master_weights": 2, "optimizer": 4}] * 2
    gib = [{name: size * 2**30 for name, size in rank.items()} for rank in half]
    twice = [{name: 2 * size for name, size in rank.items()} for rank in gib]
    sentences = verdict(
        rows(record("ddp", **CPU, state_bytes=twice), record("ds_zero3", **CPU, state_bytes=gib))
    )
    assert sentences[1] == (
        "ds_zero3 needs the least memory (8.00 GiB of training state per rank; the most is 16.00 GiB)."
    )
    assert "$" not in " ".join(sentences)


def test_rows_that_computed_the_same_are_counted_with_their_reference() -> None:
    reference, *others = rows(record("ddp"), record("ds_zero2"), record("ds_zero3"))
    same = [
        row.with_values(parity_holds=True, parity_reference="ddp", parity_max_loss_difference=difference)
        for row, difference in zip(others, (0.0001, 0.00034), strict=True)
    ]
    assert verdict([reference, *same])[-1] == "All 3 computed the same (largest loss difference 0.0003)."
    assert "computed the same" not in verdict([reference, same[0], others[1]])[-1]


def test_each_model_and_machine_has_its_own_line() -> None:
    on_cpu = [
        dataclasses.replace(record(name, **CPU), identity=f"cpu {name}") for name in ("ddp", "ds_zero2")
    ]
    lines = verdict(rows(record("ddp"), record("ds_zero2"), *on_cpu))
    assert [line.split(":")[0] for line in lines] == ["NVIDIA H100 80GB HBM3", "AMD"]
    assert all("No row is clearly fastest: both tie (16,384 tokens/s)." in line for line in lines)


def test_rows_are_sorted_by_rank_memory_or_cost_and_unknown_values_come_last() -> None:
    compared = rows(
        record("slow", 1.0, 1),
        record("oom", status="oom", reason="no", step_seconds=[], losses=[], peak_allocated_bytes=None),
        record("fast", 0.5, 3),
        record("tied", 0.505, 2),
    )

    def order(by: str) -> list[str]:
        return [row.strategy for row in sorted_rows(compared, by)]

    assert order("rank") == order("cost") == ["fast", "tied", "slow", "oom"]
    assert order("memory") == ["slow", "tied", "fast", "oom"]
    assert order("strategy") == ["slow", "oom", "fast", "tied"]


def test_the_flag_offers_every_order() -> None:
    parser = argparse.ArgumentParser()
    add_output_flags(parser)
    (sort,) = [action for action in parser._actions if action.dest == "sort"]
    assert sort.choices == ("rank", "strategy", "memory", "cost")
    for words, by in (([], "rank"), (["--json"], "strategy"), (["--json", "--sort", "cost"], "cost")):
        assert sort_of(parser.parse_args(words)) == by
    with pytest.raises(KeyError):
        sorted_rows(rows(record("ddp")), "name")


def test_a_rate_that_is_uncertain_by_over_20_percent_has_no_rank_and_a_remedy() -> None:
    # on a CPU of two cores of which others kept 1.2 busy: (2 / 0.8)^2 = 6.25 times as fast or slow; of which
    # others kept 0.3 busy: (2 / 1.7)^2 = 1.384 times
    for cores, interval in ((1.2, "-84.0% +525.0%"), (0.3, "-27.8% +38.4%")):
        busy = {**CPU, "other_busy_cores": cores}
        uncertain = rows(record("ddp", **busy), record("ds_zero2", 0.6, **busy))
        assert [row.rank for row in uncertain] == [None, None]
        assert verdict(uncertain)[0] == (
            "Too uncertain to rank: another run of ddp and ds_zero2 may differ by over 20% (--repeats 3 "
            "compares in rounds)."
        )
        text = comparison_text(uncertain)
        assert interval in text
        assert "too uncertain to rank" not in text  # the verdict has said it
        one = verdict([uncertain[0], *rows(record("ds_zero1", **CPU))])[0]
        assert one.startswith("Too uncertain to rank: another run of ddp may")
        assert "may" not in verdict(uncertain[:1])[0]


def test_an_uncertain_row_among_others_is_left_out_of_the_ranks_and_named() -> None:
    mixed = rows(
        record("ddp", **CPU), record("ds_zero1", 0.7, **CPU), record("ds_zero2", **CPU, other_busy_cores=1.2)
    )
    assert [row.rank for row in mixed] == [1, 2, None]
    assert "Not ranked, too uncertain: ds_zero2." in verdict(mixed)


def test_noise_promotes_no_row_and_a_chain_of_near_rows_is_no_tie_of_its_ends() -> None:
    # 2,890 tokens/s, 2,489 and 1,924 with -33 % +48 %, as seen on a busy CPU: 8,192 tokens a step
    noisy = rows(
        record("ddp", 8192 / 2890), record("ds_zero2", 8192 / 2489), record("fsdp_full_shard", 8192 / 1924)
    )
    wide = {"tokens_per_second_lowest": 1289.0, "tokens_per_second_highest": 2848.0}
    noisy[2] = noisy[2].with_values(rank=None, **wide)
    found = ranked(noisy)
    assert [row.rank for row in found] == [1, 2, None]
    assert verdict(found)[0] == "ddp is fastest: 2,890 tokens/s, 16% faster than the other."
    # +-5 %: 100 and 93 overlap, as do 93 and 86; 100 and 86 do not
    chain = rows(record("a", 0.5), record("b", 0.5 / 0.93), record("c", 0.5 / 0.86))
    assert [(row.rank, row.shares_rank) for row in chain] == [(1, True), (1, True), (3, False)]
    assert verdict(chain)[0].startswith("a and b tie for the fastest")


def test_a_row_that_computed_in_another_dtype_or_with_other_ranks_has_no_rank() -> None:
    bf16, fp32 = ({"compute_dtype": name, "autocast": name == "bfloat16"} for name in ("bfloat16", "float32"))
    ddp, own, third = rows(
        record("ddp", numerics=fp32),
        record("own", 0.3, numerics=bf16),
        record("ds_zero2", 0.7, engine="deepspeed", numerics={**fp32, "residual_dtype": "bfloat16"}),
    )
    assert [row.rank for row in (ddp, own, third)] == [1, None, 2]
    same = {"parity_holds": True, "parity_reference": "ddp", "parity_max_loss_difference": 0.0002}
    sentences = verdict([ddp, own.with_values(**same), third.with_values(**same)])
    assert sentences[0].startswith("ddp is fastest")
    assert "Not ranked, compute bfloat16 (not float32), unlike ddp: own." in sentences
    assert sentences[-1] == (
        "All 3 computed other things, with nearly the same losses (largest loss difference 0.0002)."
    )
    alone, asked_two = rows(record("ddp"), record("own", step_seconds=[[0.5] * 33], world_size=1))
    assert (alone.rank, asked_two.rank) == (None, None)
    first, *others = verdict([alone, asked_two])
    assert first == "ddp ranks=2 runs at 16,384 tokens/s; there is no other row to compare it with."
    assert "Not ranked, 1 of 2 ranks ran: own ranks=1." in others


def test_advice_to_align_a_script_is_only_given_where_it_changes_something() -> None:
    """FSDP and DDP hold other dtypes with one mixed_precision: no setting of the YAMLs makes them equal."""
    asked = {**made_record().asked, "script": ["train.py"]}
    of_ddp = {"compute_dtype": "bfloat16", "autocast": True, "residual_dtype": "float32"}
    of_fsdp = {"compute_dtype": "bfloat16", "autocast": False, "residual_dtype": "bfloat16"}
    in_fp32 = {"compute_dtype": "float32", "autocast": False, "residual_dtype": "float32"}
    probed = (("ddp", of_ddp), ("fsdp_full_shard", of_fsdp), ("own", in_fp32))
    found = rows(*(record(name, engine=name, asked=asked, numerics=seen) for name, seen in probed))
    advice = "give all YAMLs the same mixed_precision, and the JSON the same bf16 or fp16 section"
    assert [row.numerics_alignments for row in found] == [[], [], [advice]]


def test_on_a_cpu_the_price_is_that_of_a_process() -> None:
    (row,) = rows(record("ddp", **CPU), usd_per_gpu_hour=2.0)
    assert row.price == "$2.00 per process-hour (there is no GPU), given by --prices"
    # two processes for $2 an hour each, 16,384 tokens/s: 4 / 3600 / 16,384 x 1e6 = $0.0678
    assert row.usd_per_million_tokens == pytest.approx(0.0678, abs=1e-4)


def test_rows_with_one_reason_share_its_note() -> None:
    broken = [
        record("ds_zero3", identity=str(number), status="oom", reason="CUDA out of memory", step_seconds=[])
        for number in range(3)
    ]
    assert comparison_text(rows(*broken)).count("CUDA out of memory (3 rows)") == 1


def test_notes_on_dropped_columns_are_dropped_too() -> None:
    wide, narrow = (comparison_text(rows(record("ddp")), width=width) for width in (200, 50))
    assert "estimated: by closed forms" in wide
    assert "columns that did not fit: estimated GiB, tokens/s per GPU, " in " ".join(narrow.split())
    assert "estimated: by closed forms" not in narrow


def test_small_differences_of_memory_are_told_in_mib() -> None:
    states = ([{"parameters": 2**20 * mib}] * 2 for mib in (3, 1))
    small = rows(*(record(name, **CPU, state_bytes=state) for name, state in zip("ab", states, strict=True)))
    sentence = "b needs the least memory (1.0 MiB of training state per rank; the most is 3.0 MiB)."
    assert sentence in verdict(small)


def comparison_text(compared: list[Row], *, width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(compared, width=width), crop=False)
    return console.export_text()
