"""What the charts of a page draw."""

from pathlib import Path

from conftest import made_record
from made_records import made

from slm_toolkit.report.charts.figures import MOST_POINTS, loss_panel, speed_panel
from slm_toolkit.report.rows import Row


def priced(rate: float, usd: float, *, spread: float = 0.05, **changes: object) -> Row:
    """A row with this rate, give or take a share of it, and dollars per million tokens."""
    row = Row([(Path("made"), made(0))])
    ends = {"tokens_per_second_lowest": rate * (1 - spread), "tokens_per_second_highest": rate * (1 + spread)}
    return row.with_values(
        tokens_per_second=rate,
        usd_per_million_tokens=usd,
        tokens_per_second_by_round={},
        **ends | changes,
    )


def test_a_bar_has_its_rate_and_the_interval_around_it() -> None:
    ((bars,),) = [figure.data for figure in speed_panel({"one": priced(100, 1.0)}).figures]
    assert (bars["x"], bars["error_x"]["array"], bars["error_x"]["arrayminus"]) == ([100], [5], [5])


def test_only_measured_rows_with_a_rate_have_bars() -> None:
    rows = {
        "good": priced(100, 1.0),
        "large": priced(100, 1.0).with_values(status="oom", tokens_per_second=None),
        "played": priced(100, 1.0).with_values(evidence="rehearsed"),
    }
    ((bars,),) = [figure.data for figure in speed_panel(rows).figures]
    assert bars["y"] == ["good"]
    assert speed_panel({"large": rows["large"]}) is None


def test_a_resumed_curve_begins_where_it_was_resumed_and_its_last_step_is_drawn() -> None:
    record = made_record(first_step=100, losses=[float(step) for step in range(650)])
    (figure,) = loss_panel({"resumed": Row([(Path("made"), record)])}).figures
    (curve,) = figure.data
    assert len(curve["x"]) <= MOST_POINTS
    assert (curve["x"][-1], curve["y"][-1]) == (750, 649)
    assert curve["x"][0] > 100
