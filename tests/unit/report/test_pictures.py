"""Figures as files and in the terminal, and what is drawn in them."""

import os
from pathlib import Path

import pytest
from conftest import H100, ROOT, made_record, slm_here
from made_records import made, scaled

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.files import find_records
from slm_toolkit.report.charts.cost import cost_panel, unbeaten
from slm_toolkit.report.charts.figures import MOST_POINTS, loss_panel, speed_panel
from slm_toolkit.report.charts.memory import parts_panel, timeline_panel
from slm_toolkit.report.charts.scale import cells_of, fit_panel, scale_panel, scaling_panel
from slm_toolkit.report.rows import Row, labelled, row_of, rows_of, with_values
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


def test_large_marks_are_runs_that_none_beats_clearly_in_speed_and_cost() -> None:
    rows = {
        "slow": priced(100, 1.0),
        "worse": priced(150, 3.0),  # slower and dearer than middle, by more than the intervals
        "middle": priced(200, 2.0),
        "fast": priced(300, 4.0),
        "as_fast": priced(305, 4.1),
    }
    assert unbeaten(rows) == ["slow", "middle", "fast", "as_fast"]


def test_no_mark_is_large_if_all_tie_or_none_is_known() -> None:
    assert unbeaten({"a": priced(100, 1.0), "b": priced(101, 0.99), "c": priced(103, 0.97)}) == []
    # 50 % and 100 % faster at the same price of an hour, but another run may be twice as fast or slow
    assert unbeaten({"a": priced(100, 2.0), "b": priced(150, 1.33, spread=1.5)}) == []
    unknown = {"tokens_per_second_lowest": None, "tokens_per_second_highest": None}
    assert unbeaten({"a": priced(100, 2.0), "b": priced(150, 1.33, **unknown)}) == []


def test_dollars_have_the_interval_of_the_rate() -> None:
    # $2 at 100 tokens/s; at 80: $2.5, at 120: $1.6667
    (figure,) = cost_panel({"run": priced(100, 2.0, spread=0.2)}).figures
    (bar,) = figure.data
    assert (bar["error_x"]["array"], bar["error_x"]["arrayminus"]) == ([0.5], [0.33333])


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
    unpriced = {"good": priced(100, 1.0), "free": with_values(priced(100, 1.0), usd_per_million_tokens=None)}
    assert cost_panel(unpriced).notes[-1] == (
        "not drawn, no known price for this hardware: set one with --usd_per_gpu_hour: free"
    )


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


def _scaled_rows() -> tuple[dict[str, Row], dict[str, ModelSpec]]:
    records = [(Path(str(index)), scaled(index)) for index in range(24)]
    rows = labelled(rows_of(records))
    specs = {label: scaled(int(row.record)).spec for label, row in rows.items()}
    return rows, specs


def test_scale_has_the_fastest_run_of_each_model_and_number_of_gpus() -> None:
    rows, specs = _scaled_rows()
    cells = cells_of(rows, specs)
    assert [(cell.model, cell.num_gpus) for cell in cells] == [
        (model, count) for model in ("slm-100m", "slm-500m", "slm-1b", "slm-2b") for count in (1, 8, 16)
    ]
    # ZeRO-3 is 8 % slower, but the intervals of one launch are 5 % wide on each side: 0.92 x 1.05 > 0.95
    assert {(cell.words, cell.num_tied) for cell in cells} == {("ddp", 1)}
    assert cells[-1].place == "16 ranks on 2 nodes"


def test_a_run_that_computes_something_else_is_the_best_nowhere() -> None:
    rows, specs = _scaled_rows()
    rows["ddp slm-2b ranks=8"] = with_values(rows["ddp slm-2b ranks=8"], parity_holds=False)
    (cell,) = [each for each in cells_of(rows, specs) if (each.model, each.num_gpus) == ("slm-2b", 8)]
    assert cell.words == "ds_zero3"
    assert "not drawn, computes something else: ddp slm-2b ranks=8" in scale_panel(rows, specs).notes


def test_predicted_marks_are_hollow_and_measured_marks_are_filled_and_as_large_as_their_rate() -> None:
    rows, specs = _scaled_rows()
    figure = scale_panel(rows, specs).figures[0]
    by_name = {trace["name"]: trace for trace in figure.data}
    assert by_name["measured"]["marker"]["symbol"] == "circle"
    assert by_name["predicted"]["marker"]["symbol"] == "circle-open"
    fastest = max(row.tokens_per_second for row in rows.values())
    sizes = dict(zip(by_name["measured"]["customdata"], by_name["measured"]["marker"]["size"], strict=True))
    (largest,) = [label for label, row in rows.items() if row.tokens_per_second == fastest]
    assert sizes[largest] == 44
    label = "ddp slm-500m ranks=8"
    assert sizes[label] == pytest.approx(44 * (rows[label].tokens_per_second / fastest) ** 0.5, rel=1e-3)


def test_the_fit_is_drawn_with_the_four_models_that_it_was_fitted_to() -> None:
    _, specs = _scaled_rows()
    hidden, layers = fit_panel(specs.values()).figures
    line, fitted, ours = hidden.data
    assert (fitted["x"], fitted["y"]) == ([7, 13, 70, 405], [4096, 5120, 8192, 16384])
    # appendix B, table 2: nominal sizes 0.1, 0.5, 1 and 2; 832 by the printed number of parameters
    assert (ours["x"], ours["y"]) == ([0.1, 0.5, 1, 2], [832, 1536, 1920, 2496])
    # 1951.37 x 405^0.353 = 1951.37 x e^(0.353 x 6.0039) = 16,246, and the line ends at 1.5 x 405
    assert line["y"][-1] == pytest.approx(16_246 * 1.5**0.353, rel=1e-3)
    assert layers.data[2]["y"] == [9, 15, 19, 24]


@pytest.mark.parametrize("columns", [80, 120])
def test_plots_fit_the_terminal_and_have_every_row(columns: int) -> None:
    from rich.console import Console

    from slm_toolkit.report.charts.terminal import terminal_plots

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
