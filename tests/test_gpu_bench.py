"""`bench/gpu/measure.py`, which waits for a GPU: its smoke run shows on a CPU that every part works."""

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run


def smoke(out: Path, *parts: str) -> list[dict]:
    command = (sys.executable, str(ROOT / "bench/gpu/measure.py"), "--smoke", "--out", str(out))
    done = run(*command, "--only", *parts)
    assert done.code == 0, done.err
    runs = json.loads((out / "measured.json").read_text())["runs"]
    assert [found for found in runs if found["status"] != "ok"] == []
    assert set(parts) == {found["part"] for found in runs}
    assert all(found["part"] in done.out for found in runs if found["part"] != "gemms")
    return runs


def test_a_sample_of_its_parts_works(tmp_path: Path) -> None:
    runs = smoke(tmp_path, "gemms", "flash")
    assert [row["width"] for row in runs[0]["gemms"]] == [2332, 4147, 4148, 4152, 4160]
    assert runs[0]["copy_bytes_per_second"] > 0
    assert all(found["tokens_per_second"] > 0 for found in runs[1:])


@pytest.mark.slow
def test_the_other_parts_work(tmp_path: Path) -> None:
    runs = smoke(tmp_path, "ladder", "memory", "trainer", "extras")
    for found in runs:
        if found["part"] == "memory":  # of so small a model, buffers of some KiB show
            assert found["peak_allocated_bytes"] == pytest.approx(found["estimated_peak_bytes"], rel=0.05)


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    command = (sys.executable, str(ROOT / "bench/gpu/measure.py"), "--smoke", "--out", str(tmp_path))
    done = run(*command, "--only", "flash", "--minutes", "0")
    assert done.code == 0, done.err
    assert done.out.count("no time") == 2
