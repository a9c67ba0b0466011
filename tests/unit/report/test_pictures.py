"""What the charts of a page draw."""

from pathlib import Path

from conftest import made_record
from made_records import made

from slm_toolkit.report.charts.html_page import MOST_POINTS, loss_figure, speed_figure
from slm_toolkit.report.rows import Row


def test_only_measured_rows_have_bars_each_with_its_rate_and_interval() -> None:
    good = Row([(Path("made"), made(0))]).with_values(
        tokens_per_second=100, tokens_per_second_lowest=95, tokens_per_second_highest=105
    )
    large = good.with_values(status="oom", tokens_per_second=None)
    (bars,) = speed_figure(
        {"good": good, "large": large, "played": good.with_values(evidence="rehearsed")}
    ).data
    assert (bars["y"], bars["x"]) == (["good"], [100])
    assert (bars["error_x"]["array"], bars["error_x"]["arrayminus"]) == ([5], [5])
    assert speed_figure({"large": large}) is None


def test_a_resumed_curve_begins_where_it_was_resumed_and_its_last_step_is_drawn() -> None:
    record = made_record(first_step=100, losses=[float(step) for step in range(650)])
    (curve,) = loss_figure({"resumed": Row([(Path("made"), record)])}).data
    assert len(curve["x"]) <= MOST_POINTS
    assert (curve["x"][-1], curve["y"][-1]) == (750, 649)
    assert curve["x"][0] > 100
