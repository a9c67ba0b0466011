"""Figures as files and in the terminal, and what is drawn in them."""

import dataclasses
import os
from pathlib import Path

import pytest
from conftest import H100, ROOT, made_record, slm_here
from made_records import made

from slm_toolkit.record.files import find_records
from slm_toolkit.report.charts.figures import MOST_POINTS, loss_panel, pareto_front, scaling_panel
from slm_toolkit.report.charts.memory import parts_panel
from slm_toolkit.report.rows import Row, row_of


def test_the_front_holds_what_none_beats_in_both() -> None:
    rates_and_dollars = {"slow": (1.0, 1.0), "worse": (1.5, 3.0), "middle": (2.0, 2.0), "fast": (3.0, 4.0)}
    row = row_of([(Path("made"), made(0))])
    rows = {
        name: dataclasses.replace(row, tokens_per_second=rate, usd_per_million_tokens=usd)
        for name, (rate, usd) in rates_and_dollars.items()
    }
    assert pareto_front(rows) == ["slow", "middle", "fast"]  # worse: slower and dearer than middle


@pytest.mark.parametrize("columns", [80, 120])
def test_plots_fit_the_terminal_and_have_every_row(columns: int) -> None:
    from rich.console import Console

    from slm_toolkit.report.charts.terminal import terminal_plots
    from slm_toolkit.report.rows import labelled, rows_of

    rows = rows_of(find_records([ROOT / "results" / "cpu"])[0])
    console = Console(width=columns, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(terminal_plots(labelled(rows), width=columns), crop=False)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= columns
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 12  # six rates, six peaks
    fastest = next(line for line in bars if "4,668" in line)
    slowest = next(line for line in bars if "3,570" in line)
    # 3570 / 4668 = 0.765
    assert slowest.count("█") / fastest.count("█") == pytest.approx(0.765, abs=0.03)
    assert any("⠀" <= character <= "⣿" and character != "⠀" for line in lines for character in line)


@pytest.mark.parametrize("flags", [["--json"], ["--csv", "-"]])
def test_plot_with_what_has_stdout_for_itself_is_refused(flags: list[str]) -> None:
    done = slm_here("report", "results/cpu", "--plot", *flags)
    assert done.code == 2
    assert f"--plot with {flags[0]}" in done.err


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


def test_runs_of_other_versions_are_lines_of_their_own() -> None:
    def row(folder: str, ranks: int, seconds: float) -> Row:
        record = made_record(world_size=ranks, step_seconds=[[seconds] * 33], tokens_per_step=ranks * 4096)
        return row_of([(Path(folder, "record.json"), record)])

    sizes_and_seconds = ((1, 0.5), (2, 0.5), (2, 0.25), (4, 0.5))
    rows = {f"run {n}": row(str(n), *cell) for n, cell in enumerate(sizes_and_seconds)}
    (figure,) = scaling_panel(rows).figures
    linear, line = figure.data
    assert (linear["x"], line["x"]) == ([1, 2, 4], [1, 2, 4])


def test_a_page_that_can_not_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "page.html"):
        done = slm_here("report", "results/cpu", "--html", str(place))
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("error: can't write: ")
