"""The verdict of a comparison, the order of its rows and its notes; rates are worked by hand."""

import dataclasses
import io

import pytest
from conftest import made_record
from rich.console import Console

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row, ranked, sorted_rows
from slm_toolkit.report.tables.comparison import comparison_table
from slm_toolkit.report.verdict import verdict

CPU = {"gpu": None, "cpu": "AMD", "peak_allocated_bytes": None}
SHORT = {"step_seconds": [[0.5] * 10] * 2, "losses": [10.0] * 10}
BROKEN = {"status": "oom", "reason": "CUDA out of memory", "step_seconds": [], "losses": []}


def record(strategy: str, seconds: float = 0.5, peak_gib: float = 3, **changes: object) -> RunRecord:
    """30 timed steps of 8,192 tokens on two H100s, or on what `changes` name."""
    made = {"step_seconds": [[seconds] * 33] * 2, "peak_allocated_bytes": [int(peak_gib * 2**30)] * 2}
    return made_record(**{"strategy": strategy, "identity": strategy, **made, **changes})


def rows(*records: RunRecord, usd_per_gpu_hour: float | None = None) -> list[Row]:
    pairs = [(f"{index}/record.json", one) for index, one in enumerate(records)]
    return ranked([Row([pair], prices=usd_per_gpu_hour) for pair in pairs])


def text_of(compared: list[Row], *, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(compared, width=width), crop=False)
    return console.export_text()


def state(mib: int) -> list[dict[str, int]]:
    return [{"parameters": mib * 2**20}] * 2


def busy(name: str, cores: float) -> RunRecord:
    return record(name, **CPU, other_busy_cores=cores)


@pytest.mark.parametrize(
    ("compared", "sentences"),
    [
        (  # 8,192 / 0.5 = 16,384 tokens/s; 0.56 s and 1 s a step are 12 % and 100 % more time.
            # 2 GPUs x $1.8 / 3600 s = $0.001 a second; 1e9 / 16,384 = 61,035 s cost $61.04
            [record("ddp"), record("ds_zero2", 0.56, 2), record("ds_zero3", 1.0, 1)],
            [
                "ddp is fastest: 16,384 tokens/s, 12% to 100% faster than the others.",
                "A billion tokens cost $61.04 with it.",
                "ds_zero3 needs the least memory (1.00 GiB at the peak; the most is 3.00 GiB).",
            ],
        ),
        (  # rates 1 % apart lie within 5 % of each other
            [record("ddp"), record("ds_zero2", 0.505), record("ds_zero3", 0.5)],
            [
                "No row is clearly fastest: all 3 tie (16,222 to 16,384 tokens/s).",
                "A billion tokens cost $61.04 to $61.65 with these.",
                "All need the same memory (3.00 GiB at the peak).",
            ],
        ),
        (  # +-5 %: 100 and 93 overlap, as do 93 and 86; 100 and 86 do not
            [record("a", 0.5), record("b", 0.5 / 0.93), record("c", 0.5 / 0.86)],
            ["a and b tie for the fastest (15,237 to 16,384 tokens/s); a is 16% faster than the other."],
        ),
        (
            [record("ddp"), record("ds_zero2"), record("ds_zero3", **BROKEN)],
            [
                "No row is clearly fastest: both tie (16,384 tokens/s).",
                "Not ranked, ran out of memory: ds_zero3.",
            ],
        ),
        ([record("ddp")], ["ddp runs at 16,384 tokens/s; no other row is comparable."]),
        (  # one of ten steps is warm-up
            [record("ddp", **SHORT), record("ds_zero2", **SHORT)],
            ["Too few steps to rank: 9 were timed, 10 are needed."],
        ),
        (  # on a CPU of two cores of which others kept 1.2 busy: (2 / 0.8)^2 = 6.25 times as fast or slow
            [busy("ddp", 1.2), busy("ds_zero2", 1.2)],
            [
                "Too uncertain to rank: another run of ddp and ds_zero2 may differ by over 20% (--repeats 3 "
                "compares in rounds)."
            ],
        ),
        (
            [record("ddp", **CPU), record("ds_zero1", 0.7, **CPU), busy("ds_zero2", 1.2)],
            ["Not ranked, too uncertain: ds_zero2."],
        ),
        (
            [record("a", **CPU, state_bytes=state(3)), record("b", **CPU, state_bytes=state(1))],
            ["b needs the least memory (1.0 MiB of training state per rank; the most is 3.0 MiB)."],
        ),
        (  # a line for each machine
            [record("a"), record("b"), record("a", **CPU), record("b", **CPU)],
            [
                "slm-100m, 1024 tokens, NVIDIA H100 80GB HBM3: No row is clearly fastest: both tie (16,384 "
                "tokens/s). A billion tokens cost $61.04 with these. All need the same memory (3.00 GiB at "
                "the peak)."
            ],
        ),
    ],
)
def test_the_verdict_says_what_the_intervals_allow(compared: list[RunRecord], sentences: list[str]) -> None:
    said = verdict(rows(*compared, usd_per_gpu_hour=1.8))
    assert [sentence for sentence in sentences if sentence not in said] == [], said


def test_without_a_price_there_are_no_dollars() -> None:
    assert "$" not in " ".join(verdict(rows(record("ddp", **CPU), record("ds_zero3", **CPU))))


def test_a_row_that_computes_something_else_is_no_winner() -> None:
    wrong, ddp, full = rows(record("ds_zero2", 0.1), record("ddp"), record("fsdp_full_shard"))
    wrong = wrong.with_values(parity_holds=False, parity_reference="ddp", parity="too far")
    said = verdict(ranked([wrong, ddp, full]))
    assert said[0] == "No row is clearly fastest: both tie (16,384 tokens/s)."
    assert said[-1] == "Not ranked, computes something else: ds_zero2."


def test_rows_are_sorted_by_rank_and_unknown_ranks_come_last() -> None:
    compared = rows(
        record("slow", 1.0), record("oom", **BROKEN), record("fast", 0.5), record("tied", 0.505, 2)
    )
    assert [row.strategy for row in sorted_rows(compared)] == ["fast", "tied", "slow", "oom"]


def test_noise_promotes_no_row() -> None:
    # 2,890 tokens/s, 2,489 and 1,924 with -33 % +48 %, as seen on a busy CPU: 8,192 tokens a step
    noisy = rows(
        record("ddp", 8192 / 2890), record("ds_zero2", 8192 / 2489), record("fsdp_full_shard", 8192 / 1924)
    )
    wide = {"tokens_per_second_lowest": 1289.0, "tokens_per_second_highest": 2848.0}
    found = ranked([*noisy[:2], noisy[2].with_values(rank=None, **wide)])
    assert [row.rank for row in found] == [1, 2, None]
    assert verdict(found)[0] == "ddp is fastest: 2,890 tokens/s, 16% faster than the other."


def test_an_uncertain_rate_shows_its_interval_and_no_rank() -> None:
    # others kept 0.3 of two cores busy: (2 / 1.7)^2 = 1.384 times
    uncertain = rows(busy("ddp", 0.3), busy("ds_zero2", 0.3))
    assert [row.rank for row in uncertain] == [None, None]
    assert "-27.8% +38.4%" in text_of(uncertain)


def test_a_row_that_computed_in_another_dtype_or_with_other_ranks_has_no_rank() -> None:
    bf16, fp32 = ({"compute_dtype": name, "autocast": name == "bfloat16"} for name in ("bfloat16", "float32"))
    compared = rows(
        record("ddp", numerics=fp32),
        record("own", 0.3, numerics=bf16),
        record("ds_zero2", 0.7, engine="deepspeed", numerics={**fp32, "residual_dtype": "bfloat16"}),
    )
    assert [row.rank for row in compared] == [1, None, 2]
    assert verdict(compared)[0].startswith("ddp is fastest")
    assert "Not ranked, compute bfloat16 (not float32), unlike ddp: own." in verdict(compared)
    assert "[1] not computed as ddp: " in text_of(compared)
    alone, asked_two = rows(record("ddp"), record("own", step_seconds=[[0.5] * 33], world_size=1))
    assert (alone.rank, asked_two.rank) == (None, None)
    first, *others = verdict([alone, asked_two])
    assert first.startswith("ddp ranks=2 runs at 16,384 tokens/s")
    assert "Not ranked, 1 of 2 ranks ran: own ranks=1." in others


def test_advice_to_align_a_script_is_only_given_where_it_changes_something() -> None:
    """FSDP and DDP hold other dtypes with one mixed_precision: no setting of the YAMLs makes them equal."""
    asked = {**made_record().asked, "script": ["train.py"]}
    of_ddp = {"compute_dtype": "bfloat16", "autocast": True, "residual_dtype": "float32"}
    of_fsdp = {"compute_dtype": "bfloat16", "autocast": False, "residual_dtype": "bfloat16"}
    in_fp32 = {"compute_dtype": "float32", "autocast": False, "residual_dtype": "float32"}
    probed = (("ddp", of_ddp), ("fsdp_full_shard", of_fsdp), ("own", in_fp32))
    found = rows(*(record(name, engine=name, asked=asked, numerics=seen) for name, seen in probed))
    assert [len(row.numerics_alignments) for row in found] == [0, 0, 1]


def test_on_a_cpu_the_price_is_that_of_a_process() -> None:
    (row,) = rows(record("ddp", **CPU), usd_per_gpu_hour=2.0)
    # two processes for $2 an hour each, 16,384 tokens/s: 4 / 3600 / 16,384 x 1e6 = $0.0678
    assert row.usd_per_million_tokens == pytest.approx(0.0678, abs=1e-4)


def test_a_reason_is_told_once_and_columns_that_do_not_fit_are_named_without_their_notes() -> None:
    broken = [dataclasses.replace(record("ds_zero3", **BROKEN), identity=str(number)) for number in range(3)]
    assert text_of(rows(*broken)).count("CUDA out of memory") == 1
    tied = rows(record("ddp"), record("ds_zero2"))
    wide, narrow = (text_of(tied, width=width) for width in (200, 40))
    assert "rank: by" in wide
    assert "columns that did not fit: estimated GiB" in " ".join(narrow.split())
    assert "rank: by" not in narrow
