"""The study's figures are drawn by a real browser; a page is written where nobody reads the table."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from made_records import needs_browser


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


def test_files_are_written_without_any_stdout(tmp_path: Path) -> None:
    slm_command = Path(sys.executable).with_name("slm")
    for number, stdout in enumerate((">&-", "--json | true")):  # closed, or read by nobody
        page = tmp_path / f"{number}.html"
        done = run("sh", "-c", f"{slm_command} report results/cpu --export {page} {stdout}")
        assert (done.code, page.is_file(), "Traceback" in done.err) == (0, True, False)
