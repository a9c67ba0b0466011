"""Goodput: what of the launches' wall time went into steps that were kept, by hand."""

import dataclasses
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.record.goodput import LaunchTimes, time_shares
from slm_toolkit.report.charts.figures import goodput_panel
from slm_toolkit.report.rows import row_of
from slm_toolkit.report.tables.comparison import has_stopped


def launch(
    first: int, last: int, *, start: float, steps: float, saving: float, **more: object
) -> LaunchTimes:
    times = {"first_step": first, "last_step": last, "start_seconds": start, "step_seconds": steps}
    times |= {"seconds": start + steps + saving, "saving_seconds": saving, "saved_at": []}
    return LaunchTimes(started_at="2026-01-01T00:00:00+00:00", **{**times, **more})


def test_steps_that_a_later_launch_does_again_are_lost() -> None:
    # killed after step 25: the checkpoint of step 20 was at 16 s of its 20 s in steps, so 4 s are lost
    killed = launch(0, 25, start=5, steps=20, saving=2, saved_at=[{"step": 20, "step_seconds": 16.0}])
    # does steps 21 to 40 in 15 s, and 3 s of evaluation
    ended = launch(20, 40, start=6, steps=15, saving=1, seconds=6 + 15 + 1 + 3)
    shares = time_shares([killed, ended])
    assert shares.total_seconds == 27 + 25
    assert shares.kept_seconds == 16 + 15
    assert (shares.lost_seconds, shares.num_lost_steps) == (4, 5)
    assert (shares.starting_seconds, shares.saving_seconds, shares.other_seconds) == (11, 3, 3)
    assert shares.goodput == 31 / 52
    assert shares.checkpoint_overhead == 3 / 35


def test_all_work_is_lost_that_a_start_from_the_beginning_repeats() -> None:
    launches = [
        launch(0, 10, start=1, steps=10, saving=0),  # killed before its first checkpoint
        launch(0, 30, start=1, steps=30, saving=1, saved_at=[{"step": 20, "step_seconds": 21.0}]),
        launch(20, 25, start=1, steps=5, saving=0),  # repeats steps 21 to 25, and is killed, too
        launch(20, 40, start=1, steps=20, saving=1),
    ]
    shares = time_shares(launches)
    assert shares.kept_seconds == 0 + 21 + 0 + 20
    assert shares.num_lost_steps == 10 + 10 + 5


def test_a_checkpoint_that_was_not_noted_counts_steps_as_equally_long() -> None:
    shares = time_shares(
        [launch(0, 40, start=0, steps=20, saving=0), launch(30, 40, start=0, steps=5, saving=0)]
    )
    assert shares.kept_seconds == 15 + 5


def test_unknown_is_not_zero() -> None:
    assert time_shares([]) is None
    assert time_shares([launch(40, 40, start=9, steps=0, saving=0)]) is None
    row = row_of([(Path("record.json"), made_record())])
    assert (row.goodput, row.checkpoint_overhead, row.time_shares) == (None, None, None)
    assert not has_stopped(row)


@pytest.mark.parametrize(("saving", "num_launches", "shown"), [(0, 1, False), (1, 1, True), (0, 2, True)])
def test_a_report_shows_goodput_of_runs_that_saved_or_resumed(
    saving: float, num_launches: int, shown: bool
) -> None:
    launches = [launch(0, 10, start=1, steps=9, saving=saving)] * num_launches
    row = row_of([(Path("record.json"), dataclasses.replace(made_record(), launches=launches))])
    assert has_stopped(row) is shown


def test_the_chart_shows_shares_of_the_wall_time_and_names_rows_without_them() -> None:
    stopped = dataclasses.replace(made_record(), launches=[launch(0, 10, start=1, steps=7, saving=2)])
    rows = {
        name: row_of([(Path("record.json"), record)])
        for name, record in (("stopped", stopped), ("unknown", made_record()))
    }
    panel = goodput_panel(rows)
    shares = {part["name"]: part["x"] for part in panel.figures[0].data}
    assert shares == {
        **{"steps that were kept": [70.0], "steps done again": [0.0], "saving": [20.0]},
        **{"starting": [10.0], "other": [0.0]},
    }
    assert panel.notes[-1].endswith("known times: unknown")
    assert goodput_panel({"unknown": rows["unknown"]}) is None
