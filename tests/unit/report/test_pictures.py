"""Figures as files and in the terminal, and what is drawn in them."""

from pathlib import Path

import pytest
from conftest import H100, made_record
from made_records import made

from slm_toolkit.report.charts.figures import MOST_POINTS, loss_panel, speed_panel
from slm_toolkit.report.charts.memory import parts_panel, timeline_panel
from slm_toolkit.report.rows import Row, row_of, with_values
from slm_toolkit.report.tables.memory import ChartRow, MemoryPicture


def priced(rate: float, usd: float, *, spread: float = 0.05, **changes: object) -> Row:
    """A row with this rate, give or take a share of it, and dollars per million tokens."""
    row = row_of([(Path("made"), made(0))])
    ends = {"tokens_per_second_lowest": rate * (1 - spread), "tokens_per_second_highest": rate * (1 + spread)}
    return with_values(
        row,
        tokens_per_second=rate,
        usd_per_million_tokens=usd,
        tokens_per_second_by_round={},
        **ends | changes,
    )


def test_the_axis_of_rates_ends_with_the_bars_and_names_the_estimates_beyond_it() -> None:
    rows = {
        "near": priced(100, 1.0, estimated_tokens_per_second=104.0),
        "far": priced(100, 1.0, estimated_tokens_per_second=112.0),
    }
    panel = speed_panel(rows)
    (figure,) = panel.figures
    assert figure.layout["xaxis"]["range"] == pytest.approx([0, 111.3])  # 1.06 x (100 + 5)
    assert figure.data[1]["y"] == ["near"]
    assert "estimates beyond the axis are only in the table: far" in panel.notes


def test_rows_without_a_bar_are_named_with_their_reason() -> None:
    rows = {
        "good": priced(100, 1.0),
        "large": with_values(priced(100, 1.0), status="oom", tokens_per_second=None),
        "played": with_values(priced(100, 1.0), evidence="rehearsed"),
        "short": with_values(priced(100, 1.0), tokens_per_second=None),
    }
    reasons = [note for note in speed_panel(rows).notes if note.startswith("not drawn")]
    assert reasons == [
        "not drawn, ran out of memory: large",
        "not drawn, rehearsed, so not timed: played",
        "not drawn, no step was timed: short",
    ]


def test_the_optimizers_step_is_wide_enough_to_see_and_to_name(tmp_path: Path) -> None:
    parts = {"parameters": 2**30, "optimizer": 2**31}
    phases = [*["forward"] * 10, *["backward"] * 9, "optimizer"]
    moments = [ChartRow(phase, "", 3 * 2**30, parts, index == 19) for index, phase in enumerate(phases)]
    picture = MemoryPicture("optimizer", 3 * 2**30, parts, (), tuple(moments))
    (figure,) = timeline_panel({}, {"run": picture}).figures
    # twenty moments: the last gets 15 % of 20 = 3 instead of 1
    assert figure.data[0]["x"][-2:] == [19, 22]
    assert figure.layout["xaxis"]["ticktext"] == ["forward", "backward", "optimizer"]
    assert figure.layout["annotations"][0]["x"] == 20.5


def test_a_resumed_curve_begins_where_it_was_resumed_and_its_last_step_is_drawn() -> None:
    record = made_record(first_step=100, losses=[float(step) for step in range(650)])
    (figure,) = loss_panel({"resumed": row_of([(Path("made"), record)])}).figures
    (curve,) = figure.data
    assert len(curve["x"]) <= MOST_POINTS
    assert (curve["x"][-1], curve["y"][-1]) == (750, 649)
    assert curve["x"][0] > 100


def test_each_gpu_has_its_own_bars_of_memory() -> None:
    rows = {
        gpu: row_of([(Path(gpu), made_record(gpu=gpu, peak_allocated_bytes=[gib * 2**30] * 2))])
        for gpu, gib in (("NVIDIA A100-SXM4-80GB", 3), (H100, 5))
    }
    (figure,) = parts_panel(rows, {}).figures
    bars = [bar["text"] for bar in figure.layout["annotations"] if "measured" in bar["text"]]
    assert bars == ["measured 3.00 GiB", "measured 5.00 GiB"]
