"""Figures as files and in the terminal, and what is drawn in them."""

import argparse
import dataclasses
import os
import re
import struct
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run, slm
from made_records import made, needs_browser

from slm_toolkit.record import find_records
from slm_toolkit.report.figures import pareto_front
from slm_toolkit.report.rows import row_of


def test_the_front_holds_what_none_beats_in_both() -> None:
    rates_and_dollars = {"slow": (1.0, 1.0), "worse": (1.5, 3.0), "middle": (2.0, 2.0), "fast": (3.0, 4.0)}
    row = row_of([(Path("made"), made(0))])
    rows = {
        name: dataclasses.replace(row, tokens_per_second=rate, usd_per_million_tokens=usd)
        for name, (rate, usd) in rates_and_dollars.items()
    }
    assert pareto_front(rows) == ["slow", "middle", "fast"]  # worse: slower and dearer than middle


@needs_browser
def test_each_figure_becomes_a_png_and_an_svg(tmp_path: Path) -> None:
    done = slm("report", "results/cpu", "--figures", str(tmp_path / "figures"))
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {
        f"{name}.{kind}" for name in ("speed", "memory", "losses", "errors") for kind in ("png", "svg")
    }
    png = (tmp_path / "figures" / "speed.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", png[16:20])[0] == 2160  # three times 720 pixels
    svg = (tmp_path / "figures" / "speed.svg").read_text()
    assert svg.startswith("<svg")
    assert svg.count('class="point"') == 6  # strategies


def test_without_a_browser_figures_end_with_a_hint(tmp_path: Path) -> None:
    slm_command = str(Path(sys.executable).with_name("slm"))
    env = {"PATH": str(tmp_path), "CHROME_PATH": ""}
    done = run(slm_command, "report", "results/cpu", "--figures", str(tmp_path / "figures"), env=env)
    assert done.code == 2
    assert re.search(r"^error: no Chrome or Chromium.*\nhint: `apt-get install chromium`", done.err, re.M)


@pytest.mark.parametrize("columns", [80, 120])
def test_plots_fit_the_terminal_and_have_every_row(columns: int) -> None:
    from rich.console import Console

    from slm_toolkit.output import labels, rows_of
    from slm_toolkit.report.plot import terminal_plots

    records, _ = find_records([ROOT / "results" / "cpu"])
    args = argparse.Namespace(parity_tolerance=None, usd_per_gpu_hour=None, strict=False)
    rows = rows_of(records, args)
    console = Console(width=columns, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(terminal_plots(dict(zip(labels(rows), rows, strict=True)), width=columns), crop=False)
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
    done = slm("report", "results/cpu", "--plot", *flags)
    assert done.code == 2
    assert f"--plot with {flags[0]}" in done.err
