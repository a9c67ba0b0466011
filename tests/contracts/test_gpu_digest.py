"""bench/gpu/digest.py on archives of a GPU whose true constants these tests have chosen."""

import csv
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
    lines.append({"kind": "launch", "num_launches": 1000, "seconds": 4e-3, "dtype": "bfloat16"})
    return lines


def arm(digest: ModuleType, part: str, name: str, model: str, batch: int, **flags: Any) -> dict[str, Any]:
    asked = {"model": model, "per_device_train_batch_size": batch, "seq_len": 1024, **flags}
    result = {**asked, "asked": asked, "strategy": "single", "evidence": "measured", "world_size": 1}
    result["attn_implementation"] = flags.get("attn_implementation", "sdpa")
    seconds = digest._predictor(digest._setup_of(result, H200))(TRUE)
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
    said |= {"commands": ["bench/gpu/measure.py --part 1"], "pretended": False, **about}
    (folder / "about.json").write_text(json.dumps(said))
    for name, lines in (("micro", micro), ("arms", arms)):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
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
    terms, missing = digest.terms_of(read(digest, whole), H200)
    found = {term.name: term.value for term in terms}
    true = {name: value for name, value in dataclasses.asdict(TRUE).items() if value is not None}
    assert found.keys() == true.keys()
    for name, value in true.items():
        assert found[name] == pytest.approx(value, rel=WITHIN), name
    alone = {"loss_share_hf", "loss_share_fused"}  # one measurement each: a fit without a residual
    assert {term.name for term in terms if term.residual is None} == alone
    assert all(term.residual < WITHIN for term in terms if term.name not in alone)
    for name in ("misaligned_share_2", "attention_forward_share_128", "cuda_context_bytes", "kernel_seconds"):
        assert any(name in reason for reason in missing), name


@pytest.mark.quick
def test_noise_shows_in_the_residual_and_held_out_arms_get_better(digest: ModuleType, tmp_path: Path) -> None:
    micro = micro_lines()
    for number, line in enumerate(micro):
        line["seconds"] *= 1.05 if number % 2 else 0.95
    archive = read(digest, write(tmp_path / "a", micro, arm_lines(digest)))
    terms, _ = digest.terms_of(archive, H200)
    by_name = {term.name: term for term in terms}
    assert 0.02 < by_name["matmul_share"].residual < 0.08  # each time is off by 5 %
    steps = [step for step in digest.steps_of(archive, H200) if not step.is_fitted]
    with_terms = digest.calibration_with({term.name: term.value for term in terms})

    def worst(constants: Calibration) -> float:
        return max(abs(step.predict(constants) / step.measured_seconds - 1) for step in steps)

    assert len(steps) == 6  # every second of the eight, and both of flash
    assert worst(with_terms) < 0.06 < worst(NOT_CALIBRATED)


@pytest.mark.quick
def test_steps_of_one_model_are_no_fit(digest: ModuleType, tmp_path: Path) -> None:
    lines = [line for line in arm_lines(digest) if line["part"] == "ladder" or "100m" in line["name"]]
    terms, missing = digest.terms_of(read(digest, write(tmp_path / "a", micro_lines(), lines)), H200)
    assert "compiled_slowdown" in {term.name for term in terms}
    assert "eager_slowdown: changes the fitted steps of 1 models by more than 2%; a fit needs 2" in missing


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
def test_a_share_beyond_the_data_sheet_is_no_term(digest: ModuleType, tmp_path: Path) -> None:
    micro = [{**line, "seconds": line["seconds"] / 3} for line in micro_lines()]
    terms, missing = digest.terms_of(read(digest, write(tmp_path / "a", micro, [])), H200)
    # heads of 64 forward: 0.50 of the peak, three times as fast
    assert "attention_forward_share_64: 1.5, more than the data sheet's peak allows" in missing
    assert not any(term.name in ("matmul_share", "attention_forward_share_64") for term in terms)


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
    shipped = {path: path.read_bytes() for path in (calibration.FILE, ROOT / "README.md")}
    refused = run(archive, "--out", tmp_path / "out")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: NVIDIA H200 was pretended")
    assert "hint: --try FOLDER" in refused.stderr
    inside = run(archive, "--try", ROOT / "slm_toolkit" / "data")
    assert inside.returncode == 1
    assert "stays out of it" in inside.stderr
    assert not (tmp_path / "out").exists()
    elsewhere = run(archive, "--try", tmp_path / "try")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert "PRETENDED" in (tmp_path / "try" / "results" / "h200" / "README.md").read_text()
    assert {path: path.read_bytes() for path in shipped} == shipped


@pytest.mark.quick
def test_arms_with_removed_flags_are_named_and_not_predicted(digest: ModuleType) -> None:
    archive, gpu = digest.Archive(), gpu_of_name("h100-80gb")
    archive.add(ROOT / "results" / gpu.name)
    gone = ["slm-500m 8-bit moments", "slm-500m Liger", "slm-500m Lion", "slm-500m bf16 moments"]
    page = digest.page(archive, gpu, [], [])
    assert f"with them their closed forms: {', '.join(gone)}.\n" in page
    steps = {step.arm.removeprefix("extras ") for step in digest.steps_of(archive, gpu)}
    assert not steps & set(gone)
    assert "slm-500m Muon" in steps


@pytest.mark.quick
def test_broken_lines_and_missing_parts_are_named(digest: ModuleType, tmp_path: Path) -> None:
    micro = [*micro_lines()[:4], '{"kind": "mat', {"kind": "matmul", "rows": 4, "seconds": 1.0}]
    micro.append({"kind": "copy", "bytes": 2**28, "seconds": 0})
    archive = read(digest, write(tmp_path / "a", micro, [{"part": "ladder"}]))
    assert [problem.split(": ", 1)[1] for problem in archive.problems] == [
        "arms.jsonl line 1 has no name, status, result",
        'micro.jsonl line 5 is no JSON: \'{"kind": "mat\'',
        "micro.jsonl line 6: a matmul without inner, width, pass",
        "micro.jsonl line 7: seconds is 0",
    ]
    terms, missing = digest.terms_of(archive, H200)
    assert [term.name for term in terms] == ["memory_share"]
    text = digest.page(archive, H200, terms, missing)
    assert "Parts without any result: canary, ladder" in text
    assert all(problem in text for problem in archive.problems)
    assert "## Against Trainer and others\n\nNot measured." in text


@pytest.mark.quick
def test_several_calls_are_one_archive(digest: ModuleType, tmp_path: Path) -> None:
    lines = arm_lines(digest)
    again = {**lines[-1], "status": "ok", "reason": None}
    left = {**lines[0], "status": "not run", "reason": "no time", "result": {}}
    first = write(tmp_path / "a", micro_lines(), lines)
    second = write(tmp_path / "b", [], [again, left], commands=["bench/gpu/measure.py --part 2"])
    packed = tmp_path / "b.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in sorted(second.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(second)), recursive=False)
    both = read(digest, first, packed)
    assert both.arms["memory", "ddp"]["status"] == "ok"
    assert both.arms["ladder", "slm-100m"]["status"] == "ok"  # "not run" replaces nothing
    assert both.about["commands"] == ["bench/gpu/measure.py --part 1", "bench/gpu/measure.py --part 2"]
    other = write(tmp_path / "c", [], [], gpu="NVIDIA A100")
    with pytest.raises(digest.BadArchive, match="give archives of one GPU"):
        both.add(other)


@pytest.mark.quick
def test_tables_are_well_formed(digest: ModuleType, whole: Path) -> None:
    archive = read(digest, whole)
    text = digest.page(archive, H200, *digest.terms_of(archive, H200)) + digest.readme_table(archive, H200)
    widths = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        cells = [len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()]
        assert len(set(cells)) == 1, block
        assert set(block.splitlines()[1]) <= set("|- ")
        widths.append(cells[0])
    assert len(widths) == 9  # memory, steps, ladder, flash, products, launches, terms, what failed; README's
    assert "CUDA out of memory \\| 3 GiB at x" in text
    # 2 x 16384 x 1536 x 4160 at 0.70 of 989 TFLOP/s at most
    (row,) = re.findall(r"^\| 4160 \| 64 \| (\d+) \|", text, flags=re.M)
    assert 500 < int(row) < 693
    begin, end = digest.markers(H200)
    table = digest.readme_table(archive, H200)
    before = f"a\n{begin}\nold\n{end}\nb"
    assert digest.readme_with(before, table, H200) == f"a\n{table}\nb"
    assert digest.readme_with("a", table, H200) is None


@pytest.mark.quick
def test_before_is_what_the_command_printed_on_the_day_of_the_measurement(
    digest: ModuleType, tmp_path: Path
) -> None:
    """Not what today's forms say without a calibration."""
    lines = [arm(digest, "ladder", "slm-1b", "slm-1b", 8), arm(digest, "ladder", "slm-2b", "slm-2b", 8)]
    lines[0]["result"] |= {"step_seconds": 0.5, "estimated_step_seconds": 0.4321}  # 0.4321 / 0.5 = 0.864
    archive = read(digest, write(tmp_path / "a", [], lines))
    rows = "\n".join(digest.step_table(digest.steps_of(archive, H200), Calibration()))
    assert "| ladder slm-1b | 500.0 | 432.1 | -13.6% |" in rows
    assert re.search(r"\| ladder slm-2b \| [\d.]+ \| - \| - \|", rows)  # unknown


def test_every_result_of_the_repository_names_the_commit_that_predicted_it() -> None:
    for file in sorted((ROOT / "results").glob("*/arms.jsonl")):
        for line in file.read_text().splitlines():
            result = json.loads(line)["result"]
            day = result["estimated_by"].split()[1] if "estimated_step_seconds" in result else None
            assert day is None or day == result["started_at"][:10]


def test_a_dry_run_writes_nothing_and_a_run_what_it_showed(
    digest: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = run(whole, "--try", tmp_path / "t", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.count("would write: ") == 6
    assert not (tmp_path / "t").exists()
    assert run(whole, "--try", tmp_path / "t").returncode == 0
    assert run(whole, "--try", tmp_path / "t").stdout.count("unchanged: ") == 6
    names = {path.name for path in (tmp_path / "t" / "results" / "h200").iterdir()}
    assert names == {"README.md", "about.json", "arms.jsonl", "micro.jsonl", "records.tar.gz"}
    file = tmp_path / "t" / "calibration.csv"
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["gpu"] for row in rows} == {"h200"}
    assert {row["date"] for row in rows} == {"2026-11-24"}
    estimate = (
        "estimate",
        "--model",
        "slm-1b",
        "--strategy",
        "single",
        "--json",
        "--gpu",
        "h200",
        "a100-80gb",
    )
    command = [sys.executable, "-X", "importtime", "-m", "slm_toolkit.cli.main", *estimate]
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
