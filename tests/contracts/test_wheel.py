"""The built wheel works in an empty folder, with nothing of the checkout at hand."""

import json
import sys
from pathlib import Path

from conftest import ROOT, run


def test_compare_works_from_a_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist"), str(ROOT))
    assert built.code == 0, built.err
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    installed = run(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    assert installed.code == 0, installed.err
    assert not (site / "tests").exists()
    empty.mkdir()
    # PYTHONPATH goes before the editable install of the test environment
    there = {"cwd": empty, "env": {"PYTHONPATH": str(site)}}
    done = run(
        *(sys.executable, "-m", "slm_toolkit.cli.main", "compare", "--json", "--strategy", "ddp", "ds_zero3"),
        *("--model", "slm-1m", "--max_steps", "4"),
        **there,
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert [row["engine"] for row in rows] == ["ddp", "deepspeed"]
    launched = json.loads((Path(rows[1]["record"]).parent / "launch" / "deepspeed.json").read_text())
    assert launched["zero_optimization"]["stage"] == 3
    where = run(sys.executable, "-c", "import slm_toolkit as slm; print(slm.__file__)", **there)
    assert where.out.startswith(str(site))
