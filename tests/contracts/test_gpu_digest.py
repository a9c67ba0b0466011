"""bench/gpu/digest.py makes the shipped pages and calibration, which estimates take."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slm_toolkit import api
from slm_toolkit.hardware import calibration
from slm_toolkit.hardware.calibration import Calibration, calibration_of
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.predict.speed.attention import pass_seconds
from slm_toolkit.predict.speed.matmul import rates_of
from slm_toolkit.predict.speed.software import TODAY, calibrated

ROOT = Path(__file__).parents[2]
DIGEST = ROOT / "bench" / "gpu" / "digest.py"
README = (ROOT / "README.md").read_text()
H200 = gpu_of_name("h200")
COLUMNS = "gpu,term,value,residual,num_measurements,evidence,source,date"
FLOPS, MEMORY = 989e12, 4.8e12  # of its data sheet


@pytest.fixture(scope="module")
def digest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digest", DIGEST)
    module = sys.modules["digest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, arms: list[Any], **about: Any) -> Path:
    folder.mkdir()
    said = {"gpu": "NVIDIA H200", "date": "2026-11-24", "versions": {"torch": "2.11.0"}, "driver": "580"}
    said |= {"commands": ["bench/gpu/measure.py --only micro"], "pretended": False, **about}
    (folder / "about.json").write_text(json.dumps(said))
    (folder / "arms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in arms))
    return folder


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DIGEST), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_fit_recovers_the_true_constants(digest: ModuleType) -> None:
    sizes = np.array([2.0**24, 2.0**28, 2.0**33])

    def seconds(values: dict[str, float]) -> np.ndarray:
        return values["start"] + sizes / MEMORY / values["share"]

    true = {"share": 0.90, "start": 4e-6}
    assert digest.fitted(seconds, seconds(true), {"share": 0.5, "start": 1e-5}) == pytest.approx(true)


@pytest.mark.quick
def test_a_term_without_a_row_is_that_of_the_same_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        COLUMNS,
        "h100-80gb,eager_slowdown,1.5,0.01,9,step times of arms,results/h100-80gb,2026-11-26",
        "h100-80gb,matmul_share,0.8,0.01,9,micro-benchmarks,results/h100-80gb,2026-11-26",
        "h100-80gb,kernel_seconds,2e-5,0.01,9,step times of arms,results/h100-80gb,2026-11-26",
        "h200,matmul_share,0.7,0.01,9,micro-benchmarks,results/h200,2026-11-26",
    ]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.setenv("SLM_CALIBRATION", str(tmp_path / "rows.csv"))
    own, chips = calibration_of("h200"), calibration_of("gh200")
    assert (own.matmul_share, own.eager_slowdown, own.kernel_seconds) == (0.7, 1.5, None)
    assert (chips.matmul_share, chips.eager_slowdown, chips.kernel_seconds) == (0.8, 1.5, None)
    assert "results/h200" in own.described
    assert "a GPU with the same chip" in chips.described


@pytest.mark.quick
def test_calibrated_rates_are_those_that_were_measured() -> None:
    true = Calibration(
        **{"matmul_share": 0.70, "misaligned_share_1": 0.20, "misaligned_share_4": 0.45},
        **{"attention_forward_share_64": 0.50, "attention_forward_half_64": 256.0},
        **{"memory_share": 0.90, "optimizer_share": 0.80, "loss_share_hf": 0.75},
    )
    rates = rates_of(H200, calibrated(TODAY, true))
    assert rates.matmul_flops == pytest.approx(0.70 * FLOPS)
    fitted = TODAY.misaligned_share.hopper
    assert [rates.misaligned_at(1536, width) for width in (4147, 4148, 4150)] == [0.20, 0.45, fitted]
    # 989 TFLOP at 0.50 of 989 TFLOP/s, and half as fast at a sequence of 256; heads of 80 are padded to 96
    given = {"gpu": H200, "software": calibrated(TODAY, true), "kernel": "cudnn"}
    forward = pass_seconds("forward", FLOPS, head_dim=80, seq_len=256, **given)
    assert forward == pytest.approx(4.0 * 96 / 80)
    found = rates.memory_bytes, rates.optimizer_bytes, rates.loss_bytes("hf")
    assert found == pytest.approx((0.90 * MEMORY, 0.80 * MEMORY, 0.75 * MEMORY))


def test_a_pretended_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a"
    shutil.copytree(ROOT / "results" / "h200", archive)
    about = (archive / "about.json").read_text()
    (archive / "about.json").write_text(about.replace('"pretended": false', '"pretended": true'))
    refused = run(archive)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: this GPU was pretended")


@pytest.mark.quick
@pytest.mark.parametrize("gpu", ["h100-80gb", "h200"])
def test_the_shipped_page_and_calibration_come_from_the_shipped_archive(
    digest: ModuleType, gpu: str, tmp_path: Path
) -> None:
    done = run(ROOT / "results" / gpu, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("README.md", "about.json", "arms.jsonl", "micro.jsonl", "records.tar.gz"):
        same = (tmp_path / name).read_bytes() == (ROOT / "results" / gpu / name).read_bytes()
        assert same, f"{name}: run `python bench/gpu/digest.py results/{gpu}`"
    shipped = [row for row in calibration.rows_of(calibration.FILE) if row.gpu == gpu]
    found = calibration.rows_of(tmp_path / "calibration.csv")
    expected = [(row.term, row.value) for row in found if row.term not in digest.OF_MACHINE]
    assert [row.term for row in shipped] == [term for term, _ in expected]
    assert [row.value for row in shipped] == pytest.approx([value for _, value in expected], rel=1e-4)
    if gpu == "h200":  # README's table has rows of this page
        for row in re.findall(r"^\| slm-\S+ \| .* \| ([\d,]+) \| ([\d.]+%) \|", README, flags=re.M):
            assert f"| {row[0]} | {row[1]} |" in done.stdout


def test_several_calls_are_one_archive(digest: ModuleType, tmp_path: Path) -> None:
    ok = {"part": "ladder", "name": "slm-1b", "status": "ok", "result": {"mfu": 0.5}}
    failed = {"part": "memory", "name": "ddp", "status": "failed", "result": {}}
    second = [{**failed, "status": "ok"}, {**ok, "status": "not run", "result": {}}]
    both = digest.Archive()
    both.add(write(tmp_path / "a", [ok, failed]))
    both.add(write(tmp_path / "b", second, commands=["bench/gpu/measure.py --only memory"]))
    assert both.arms["memory", "ddp"]["status"] == "ok"
    assert both.arms["ladder", "slm-1b"]["status"] == "ok"  # "not run" replaces nothing
    assert len(both.about["commands"]) == 2
    with pytest.raises(SystemExit, match="is of 'NVIDIA A100'"):
        both.add(write(tmp_path / "c", [], gpu="NVIDIA A100"))


def test_estimates_take_the_calibration_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calibration.csv"
    file.write_text(f"{COLUMNS}\nh200,memory_share,0.5,,1,tests,here,2026-11-24\n")
    given = {"model": "slm-1b", "strategy": "single"}
    before = {gpu: api.estimate(gpu=gpu, **given).rows[0] for gpu in ("h200", "a100-80gb")}
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    for gpu, is_changed in (("h200", True), ("a100-80gb", False)):  # the second has no calibration
        row = api.estimate(gpu=gpu, **given).rows[0]
        assert (row.step_seconds != before[gpu].step_seconds) is is_changed
        assert str(row.calibration).startswith("1 terms measured on 2026-11-24") is is_changed


@pytest.mark.quick
def test_no_shipped_calibration_was_pretended() -> None:
    for row in calibration.rows_of(calibration.FILE):
        about = json.loads((ROOT / row.source / "about.json").read_text())
        assert about["pretended"] is False, row


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("h200,flash,0.5,0,1,x,y,2026-11-24", "line 2: invalid field: term (invalid enum value 'flash')"),
        ("h200,memory_share,0.9", "line 2: invalid field: num_measurements (expected int, got null)"),
    ],
)
def test_a_broken_calibration_is_refused(row: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.csv"
    file.write_text(f"{COLUMNS}\n{row}\n")
    with pytest.raises(ValueError, match=re.escape(problem)):
        calibration.rows_of(file)
