"""Figures and pages are written by a real browser, and where nobody reads the table."""

import re
import struct
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run, slm
from made_records import needs_browser


@needs_browser
def test_each_figure_becomes_a_png_and_an_svg(tmp_path: Path) -> None:
    done = slm("report", "results/cpu", "--figures", str(tmp_path / "figures"))
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    charts = ("speed", "memory", "loss_differences", "losses", "errors")
    assert names == {f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")}
    png = (tmp_path / "figures" / "speed.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", png[16:20])[0] == 2160  # three times 720 pixels
    svg = (tmp_path / "figures" / "speed.svg").read_text()
    assert svg.startswith("<svg")
    assert svg.count('class="point"') == 6  # strategies
    assert "AMD EPYC (2 cores); 2026-11-20" in svg  # a picture in a slide says what it is


@pytest.mark.slow
@needs_browser
def test_the_study_is_drawn_with_its_origin_in_every_title(tmp_path: Path) -> None:
    script = str(ROOT / "studies" / "ashkboos" / "compare.py")
    done = run(sys.executable, script, "--figures", str(tmp_path / "figures"))
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    charts = ("scale", "scale-best", "fit-hidden-size", "fit-layers")
    assert names == {f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")}
    assert "predicted for nodes of 8 h100-80gb" in (tmp_path / "figures" / "scale.svg").read_text()


def test_without_a_browser_figures_end_with_a_hint(tmp_path: Path) -> None:
    slm_command = str(Path(sys.executable).with_name("slm"))
    env = {"PATH": str(tmp_path), "CHROME_PATH": ""}
    done = run(slm_command, "report", "results/cpu", "--figures", str(tmp_path / "figures"), env=env)
    assert done.code == 2
    assert re.search(r"^error: no Chrome or Chromium.*\nhint: `apt-get install chromium`", done.err, re.M)


def test_a_page_is_written_though_nobody_reads_the_table(tmp_path: Path) -> None:
    slm_command = Path(sys.executable).with_name("slm")
    page = tmp_path / "page.html"
    run("sh", "-c", f"{slm_command} report results/cpu --json --html {page} | true")
    assert page.is_file()


def test_files_are_written_without_any_stdout(tmp_path: Path) -> None:
    slm_command = Path(sys.executable).with_name("slm")
    done = run("sh", "-c", f"{slm_command} report results/cpu --html {tmp_path}/page.html >&-")
    assert (done.code, (tmp_path / "page.html").is_file()) == (0, True)
    assert "Traceback" not in done.err
