"""bench/gpu/digest.py on archives of a GPU whose true constants these tests have chosen."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slm_toolkit.hardware import calibration
from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration, calibration_of
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.predict.speed.attention import pass_seconds
from slm_toolkit.predict.speed.matmul import product_seconds, rates_of
from slm_toolkit.predict.speed.software import TODAY, calibrated

ROOT = Path(__file__).parents[2]
DIGEST = ROOT / "bench" / "gpu" / "digest.py"
README = (ROOT / "README.md").read_text()
H200 = gpu_of_name("h200")
FLOPS, MEMORY = 989e12, 4.8e12  # of its data sheet
TRUE = Calibration(
    matmul_share=0.70,
    misaligned_share_1=0.20,
    misaligned_share_4=0.45,
    product_start_seconds=6e-6,
    attention_forward_share_64=0.50,
    attention_forward_half_64=256.0,
    attention_backward_share_64=0.40,
    attention_backward_half_64=512.0,
    memory_share=0.90,
    optimizer_share=0.80,
    loss_share_hf=0.75,
    loss_share_fused=0.60,
    eager_slowdown=1.50,
    compiled_slowdown=1.20,
)
WITHIN = 0.005
"of each true constant, from times without noise"


@pytest.fixture(scope="module")
def digest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digest", DIGEST)
    module = sys.modules["digest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def micro_lines() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"kind": "copy", "bytes": 2**n, "seconds": 4e-6 + 2**n / (0.90 * MEMORY), "dtype": "uint8"}
        for n in (24, 28, 30, 33)
    ]
    rates = rates_of(H200, calibrated(TODAY, TRUE))
    for rows in (512, 4096, 16_384):
        for width in (2332, 4147, 4152, 4160):
            seconds = product_seconds(rates, rows=rows, inputs=1536, outputs=width, padded=False)
            for which, took in (
                ("forward", seconds.forward),
                ("dgrad", seconds.input_gradient),
                ("wgrad", seconds.weight_gradient),
            ):
                shape = {"rows": rows, "inner": 1536, "width": width, "pass": which}
                lines.append({"kind": "matmul", **shape, "seconds": took, "dtype": "bfloat16"})
    for seq_len in (512, 1024, 2048, 4096):
        # causal: 2 S T width = 2 x S x 32768 x 1536, at half of its share at 256; backward 2.5 times as much
        flop = 2 * seq_len * 32_768 * 1536
        forward = flop / (0.50 * FLOPS) * (1 + 256 / seq_len)
        backward = 2.5 * flop / (0.40 * FLOPS) * (1 + 512 / seq_len)
        for which, took in (("forward", forward), ("backward", backward)):
            shape = {"kernel": "sdpa_cudnn", "head_dim": 64, "num_heads": 24, "num_kv_heads": 24}
            shape |= {"seq_len": seq_len, "batch": 32_768 // seq_len, "pass": which}
            lines.append({"kind": "attention", **shape, "seconds": took, "dtype": "bfloat16"})
    for name, num_bytes in (("AdamW", 28), ("AdamWWithMasterWeights", 61)):
        seconds = 2**27 * num_bytes / (0.80 * MEMORY)
        shape = {"num_parameters": 2**27, "fused": True, "optimizer": name}
        lines.append({"kind": "adamw", **shape, "seconds": seconds, "dtype": "float32"})
    for kernel, rows, num_bytes, share in (("hf", 4096, 40, 0.75), ("fused_logits", 512, 26, 0.60)):
        seconds = rows * 32_000 * num_bytes / (share * MEMORY)
        shape = {"rows": rows, "chunk_rows": rows, "vocab_size": 32_000, "kernel": kernel}
        lines.append({"kind": "cross_entropy", **shape, "seconds": seconds, "dtype": "bfloat16"})
    return lines


def arm(digest: ModuleType, part: str, name: str, model: str, batch: int, **flags: Any) -> dict[str, Any]:
    asked = {"model": model, "per_device_train_batch_size": batch, "seq_len": 1024, **flags}
    result = {**asked, "asked": asked, "strategy": "single", "evidence": "measured", "world_size": 1}
    result["attn_implementation"] = flags.get("attn_implementation", "sdpa")
    seconds = digest.predictor(digest.setup_of(result, H200))(TRUE)
    rate = batch * 1024 / seconds
    result |= {"step_seconds": seconds, "tokens_per_second": rate, "mfu": 0.4, "estimated_mfu": 0.3}
    result |= {"peak_allocated_bytes": 20 * 2**30, "peak_reserved_bytes": 21 * 2**30, "losses": [3.0]}
    result |= {"estimated_peak_allocated_bytes": 20 * 2**30, "estimated_peak_reserved_bytes": 24 * 2**30}
    return {"part": part, "name": name, "command": ["x"], "status": "ok", "reason": None, "result": result}


def arm_lines(digest: ModuleType) -> list[dict[str, Any]]:
    top = {"torch_compile": True, "loss_kernel": "fused_linear", "norm_kernel": "fused"}
    lines = [
        arm(digest, part, model, model, 32, **flags)
        for part, flags in (("ladder", top), ("memory", {}))
        for model in ("slm-100m", "slm-500m", "slm-1b", "slm-2b-hw")
    ]
    for kernel in ("eager", "sdpa_flash"):
        lines.append(arm(digest, "flash", f"slm-1b {kernel}", "slm-1b", 8, attn_implementation=kernel))
    bad = {"part": "memory", "command": ["x"], "result": {}}
    lines.append({**bad, "name": "ddp", "status": "failed", "reason": "CUDA out of memory | 3 GiB\nat x"})
    return lines


def write(folder: Path, micro: list[Any], arms: list[Any], **about: Any) -> Path:
    folder.mkdir()
    said = {"gpu": "NVIDIA H200", "date": "2026-11-24", "versions": {"torch": "2.11.0"}, "driver": "580"}
    said |= {"commands": ["bench/gpu/measure.py --only micro"], "pretended": False, **about}
    (folder / "about.json").write_text(json.dumps(said))
    for name, lines in (("micro", micro), ("arms", arms)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    record = folder / "records" / "ladder" / "slm-1b" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    return folder


@pytest.fixture(scope="module")
def whole(digest: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "a", micro_lines(), arm_lines(digest))


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DIGEST), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def read(digest: ModuleType, *paths: Path) -> Any:
    archive = digest.Archive()
    for path in paths:
        archive.add(path)
    return archive


@pytest.mark.quick
def test_digest_recovers_the_true_constants(digest: ModuleType, whole: Path) -> None:
    terms, missing = digest.terms_of(read(digest, whole), H200, "here")
    found = digest.values_of(terms)
    true = {name: value for name, value in dataclasses.asdict(TRUE).items() if value is not None}
    assert found.keys() == true.keys()
    for name, value in true.items():
        assert found[name] == pytest.approx(value, rel=WITHIN), name
    alone = {"loss_share_hf", "loss_share_fused"}  # one measurement each: a fit without a residual
    assert {name for name, term in terms.items() if term.residual is None} == alone
    assert all(term.residual < WITHIN for name, term in terms.items() if name not in alone)
    for name in ("attention_forward_share_128", "cuda_context_bytes", "kernel_seconds"):
        assert any(name in reason for reason in missing), name


@pytest.mark.quick
def test_a_term_without_a_row_is_that_of_the_same_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        "gpu,term,value,residual,num_measurements,evidence,source,date",
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
    rates = rates_of(H200, calibrated(TODAY, TRUE))
    assert rates.matmul_flops == pytest.approx(0.70 * FLOPS)
    fitted = TODAY.misaligned_share.hopper
    assert [rates.misaligned_at(1536, width) for width in (4147, 4148, 4150)] == [0.20, 0.45, fitted]
    # 989 TFLOP at 0.50 of 989 TFLOP/s, and half as fast at a sequence of 256; heads of 80 are padded to 96
    given = {"gpu": H200, "software": calibrated(TODAY, TRUE), "kernel": "cudnn"}
    forward = pass_seconds("forward", FLOPS, head_dim=80, seq_len=256, **given)
    backward = pass_seconds("backward", FLOPS / 2.5, head_dim=64, seq_len=512, **given)
    assert (forward, backward) == (pytest.approx(4.0 * 96 / 80), pytest.approx(5.0))
    assert rates.memory_bytes == pytest.approx(0.90 * MEMORY)
    assert rates.optimizer_bytes == pytest.approx(0.80 * MEMORY)
    assert rates.loss_bytes("hf") == pytest.approx(0.75 * MEMORY)
    assert rates.loss_bytes("fused") == pytest.approx(0.60 * MEMORY)


def test_a_pretended_archive_is_refused_unless_it_goes_elsewhere(digest: ModuleType, tmp_path: Path) -> None:
    archive = write(tmp_path / "a", micro_lines(), arm_lines(digest), pretended=True)
    refused = run(archive)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: this GPU was pretended")
    assert run(archive, "--out", tmp_path / "out").returncode == 0
    assert "PRETENDED" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.quick
@pytest.mark.parametrize("gpu", ["h100-80gb", "h200"])
def test_the_shipped_page_and_calibration_come_from_the_shipped_archive(
    digest: ModuleType, gpu: str, tmp_path: Path
) -> None:
    done = run(ROOT / "results" / gpu, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("README.md", "about.json", "arms.jsonl", "micro.jsonl", "records.tar.gz"):
        assert (tmp_path / name).read_bytes() == (ROOT / "results" / gpu / name).read_bytes(), name
    shipped = [row for row in calibration.rows_of(calibration.FILE) if row.gpu == gpu]
    found = calibration.rows_of(tmp_path / "calibration.csv")
    expected = [(row.term, row.value) for row in found if row.term not in digest.OF_MACHINE]
    assert [(row.term, row.value) for row in shipped] == expected
    if gpu == "h200":  # README's table has rows of this page
        for row in re.findall(r"^\| slm-\S+ \| .* \| ([\d,]+) \| ([\d.]+%) \|", README, flags=re.M):
            assert f"| {row[0]} | {row[1]} |" in done.stdout


@pytest.mark.quick
def test_several_calls_are_one_archive(digest: ModuleType, tmp_path: Path) -> None:
    lines = arm_lines(digest)
    again = {**lines[-1], "status": "ok", "reason": None}
    left = {**lines[0], "status": "not run", "reason": "no time", "result": {}}
    first = write(tmp_path / "a", micro_lines(), lines)
    second = write(tmp_path / "b", [], [again, left], commands=["bench/gpu/measure.py --only memory"])
    packed = tmp_path / "b.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in sorted(second.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(second)), recursive=False)
    both = read(digest, first, packed)
    assert both.arms["memory", "ddp"]["status"] == "ok"
    assert both.arms["ladder", "slm-100m"]["status"] == "ok"  # "not run" replaces nothing
    assert both.about["commands"] == [
        "bench/gpu/measure.py --only micro",
        "bench/gpu/measure.py --only memory",
    ]
    other = write(tmp_path / "c", [], [], gpu="NVIDIA A100")
    with pytest.raises(SystemExit, match="is of 'NVIDIA A100'"):
        both.add(other)


def test_every_result_of_the_repository_names_the_commit_that_predicted_it() -> None:
    for file in sorted((ROOT / "results").glob("*/arms.jsonl")):
        for line in file.read_text().splitlines():
            result = json.loads(line)["result"]
            day = result["estimated_by"].split()[1] if "estimated_step_seconds" in result else None
            assert day is None or day == result["started_at"][:10]


def test_estimates_take_the_calibration_of_a_file(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(whole, "--out", tmp_path / "t").returncode == 0
    file = tmp_path / "t" / "calibration.csv"
    rows = calibration.rows_of(file)
    assert {(row.gpu, row.date) for row in rows} == {("h200", "2026-11-24")}
    words = ("--model", "slm-1b", "--strategy", "single", "--json", "--gpu", "h200", "a100-80gb")
    command = [sys.executable, "-X", "importtime", "-m", "slm_toolkit.cli.main", "estimate", *words]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    with_file = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not re.search(r"\b(torch|numpy)\b", with_file.stderr)
    (h200, a100), (h200_before, a100_before) = json.loads(with_file.stdout), json.loads(plain.stdout)
    assert a100 == a100_before  # a GPU without a calibration
    assert h200["calibration"].startswith(f"{len(rows)} terms measured on 2026-11-24")
    assert h200["step_seconds"] != h200_before["step_seconds"]


@pytest.mark.quick
def test_a_gpu_without_a_calibration_keeps_the_very_constants() -> None:
    assert calibration_of("a100-80gb") is NOT_CALIBRATED
    assert calibrated(TODAY, NOT_CALIBRATED) is TODAY
    rates = rates_of(H200, TODAY)
    # 0.967 of gpus.csv's best rate, 794.5 TFLOP/s; 0.147 of that; 0.85 of 4.8 TB/s
    assert rates.matmul_flops == pytest.approx(0.967 * 794.5e12)
    assert {rates.misaligned_at(1536, width) for width in (4147, 4148, 2)} == {0.147}
    assert rates.optimizer_bytes == rates.loss_bytes("hf") == rates.memory_bytes == 0.85 * MEMORY


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
        ("h200,memory_share,-1,0,1,x,y,2026-11-24", "line 2: invalid field: value (expected float > 0.0)"),
        ("h200,memory_share,0.9", "line 2: invalid field: num_measurements (expected int, got null)"),
    ],
)
def test_a_broken_calibration_is_refused(row: str, problem: str, tmp_path: Path) -> None:
    columns = [field.name for field in dataclasses.fields(calibration.CalibrationRow)]
    file = tmp_path / "calibration.csv"
    file.write_text(",".join(columns) + "\n" + row + "\n")
    with pytest.raises(ValueError, match=re.escape(problem)):
        calibration.rows_of(file)
