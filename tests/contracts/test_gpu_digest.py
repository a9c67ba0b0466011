"""bench/gpu/digest.py makes the shipped pages and calibration, which estimates take."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Finished, run

from slm_toolkit import api
from slm_toolkit.hardware import calibration
from slm_toolkit.hardware.calibration import Calibration, calibration_of
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.predict.speed.attention import pass_seconds
from slm_toolkit.predict.speed.matmul import rates_of
from slm_toolkit.predict.speed.software import TODAY, calibrated

README = (ROOT / "README.md").read_text()
H200 = gpu_of_name("h200")
COLUMNS = "gpu,term,value,residual,num_measurements,evidence,source,date"
FLOPS, MEMORY = 989e12, 4.8e12  # of its data sheet


def digested(*words: str) -> Finished:
    return run(sys.executable, str(ROOT / "bench" / "gpu" / "digest.py"), *words)


@pytest.mark.quick
def test_a_term_without_a_row_is_that_of_the_same_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = (
        *("h100-80gb,eager_slowdown,1.5", "h100-80gb,matmul_share,0.8", "h100-80gb,kernel_seconds,2e-5"),
        "h200,matmul_share,0.7",
    )
    rows = [f"{term},0.01,9,arms,results/{term[:4]},2026-11-26\n" for term in terms]
    (tmp_path / "rows.csv").write_text(f"{COLUMNS}\n{''.join(rows)}")
    monkeypatch.setenv("SLM_CALIBRATION", str(tmp_path / "rows.csv"))
    own, chips = calibration_of("h200"), calibration_of("gh200")
    assert (own.matmul_share, own.eager_slowdown, own.kernel_seconds) == (0.7, 1.5, None)
    assert (chips.matmul_share, chips.eager_slowdown, chips.kernel_seconds) == (0.8, 1.5, None)
    assert "results/h200" in own.described
    assert "a GPU with the same chip" in chips.described


@pytest.mark.quick
def test_calibrated_rates_are_those_that_were_measured() -> None:
    true = {"matmul_share": 0.70, "misaligned_share_1": 0.20, "misaligned_share_4": 0.45}
    true |= {"attention_forward_share_64": 0.50, "attention_forward_half_64": 256.0}
    true |= {"memory_share": 0.90, "optimizer_share": 0.80, "loss_share_hf": 0.75}
    software = calibrated(TODAY, Calibration(**true))
    rates = rates_of(H200, software)
    assert rates.matmul_flops == pytest.approx(0.70 * FLOPS)
    fitted = TODAY.misaligned_share.hopper
    assert [rates.misaligned_at(1536, width) for width in (4147, 4148, 4150)] == [0.20, 0.45, fitted]
    # 989 TFLOP at 0.50 of 989 TFLOP/s, and half as fast at a sequence of 256
    given = {"gpu": H200, "software": software, "kernel": "cudnn", "head_dim": 64, "seq_len": 256}
    assert pass_seconds("forward", FLOPS, **given) == pytest.approx(4.0)
    found = rates.memory_bytes, rates.optimizer_bytes, rates.loss_bytes("hf")
    assert found == pytest.approx((0.90 * MEMORY, 0.80 * MEMORY, 0.75 * MEMORY))


def test_a_pretended_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a"
    shutil.copytree(ROOT / "results" / "h200", archive)
    about = (archive / "about.json").read_text()
    (archive / "about.json").write_text(about.replace('"pretended": false', '"pretended": true'))
    refused = digested(str(archive))
    assert refused.code == 1
    assert refused.err.startswith("error: this GPU was pretended")


@pytest.mark.quick
@pytest.mark.parametrize("gpu", ["h100-80gb", "h200"])
def test_the_shipped_page_and_calibration_come_from_the_shipped_archive(gpu: str, tmp_path: Path) -> None:
    done = digested(str(ROOT / "results" / gpu), "--out", str(tmp_path))
    assert done.code == 0, done.err
    for name in ("README.md", "about.json", "arms.jsonl", "micro.jsonl", "records.tar.gz"):
        assert (tmp_path / name).read_bytes() == (ROOT / "results" / gpu / name).read_bytes(), name
    shipped = [row for row in calibration.rows_of(calibration.FILE) if row.gpu == gpu]
    of_machine = ("kernel_seconds", "cuda_context_bytes")  # only in a file of one's own
    found = calibration.rows_of(tmp_path / "calibration.csv")
    expected = [row for row in found if row.term not in of_machine]
    assert [row.term for row in shipped] == [row.term for row in expected]
    assert [row.value for row in shipped] == pytest.approx([row.value for row in expected], rel=1e-4)
    if gpu == "h200":  # README's table has rows of this page
        for row in re.findall(r"^\| slm-\S+ \| .* \| ([\d,]+) \| ([\d.]+%) \|", README, flags=re.M):
            assert f"| {row[0]} | {row[1]} |" in done.out


def test_estimates_take_the_calibration_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calibration.csv"
    file.write_text(f"{COLUMNS}\nh200,memory_share,0.5,,1,tests,here,2026-11-24\n")
    asked = {"model": "slm-1b", "strategy": "single", "gpu": ["h200", "a100-80gb"]}
    before = {row.gpu: row.step_seconds for row in api.estimate(**asked).rows}
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    for row in api.estimate(**asked).rows:
        is_changed = row.gpu == "h200"  # the other has no calibration
        assert (row.step_seconds != before[row.gpu]) is is_changed
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
