"""Turn what measure.py has measured on a GPU into results/GPU, its page and a calibration.

    python bench/gpu/digest.py results/h200 h200.tar.gz              # adds the archive to results/h200
    python bench/gpu/digest.py h200.tar.gz --out tried               # all, and calibration.csv, in tried/

Takes archives or folders, in the order of their calls. The last line of an arm counts, but "not run" replaces
nothing. Writes the page (README.md), about.json, arms.jsonl, micro.jsonl and records.tar.gz, and without
--out also the rows of slm_toolkit/hardware/calibration.csv, which `slm estimate` reads.

Terms come from the micro-benchmarks where there is one of their kind. The last three (TO_STEPS) are fitted to
the step times of every second arm and judged on the other arms.
"""

import argparse
import csv
import dataclasses
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slm_toolkit.config.run_config import RunConfig, in_todays_names
from slm_toolkit.hardware.calibration import FILE, TERMS, Calibration, CalibrationRow, completed, rows_of
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates
from slm_toolkit.predict.speed.attention import kernel_of
from slm_toolkit.predict.speed.matmul import ALIGNMENT, product_seconds, rates_of
from slm_toolkit.predict.speed.software import TODAY, calibrated
from slm_toolkit.predict.speed.step import LOGIT_BYTES, OPTIMIZER_SLOWDOWN, optimizer_bytes, step_time
from slm_toolkit.predict.speed.traffic import transfers
from slm_toolkit.strategy.strategy import find_strategy

ROOT = Path(__file__).resolve().parent.parent.parent
HELD_OUT = ("flash", "extras")
"parts of which no arm is fitted to"
STEP_PARTS = ("ladder", "memory", "rungs", *HELD_OUT)
ADAMW_BYTES = {
    "AdamW": 28,  # fp32: gradient 4 read; weight 8, both moments 16 read and written
    "AdamWWithMasterWeights": optimizer_bytes(
        Setup(find_model("slm-100m"), find_strategy("ddp"), RunConfig(max_grad_norm=1.0), num_gpus=1),
        slowdown=OPTIMIZER_SLOWDOWN,
    ),
}
LOSSES = {
    # on fewer rows it waits for launches; the benchmark lacks the shifted copy, 8 forward and 12 backward
    "hf": ("loss_share_hf", range(4096, 10**9), LOGIT_BYTES["hf"] - 20),
    # 64 MiB of fp32 hold 524 rows of 32,000
    "fused_logits": ("loss_share_fused", range(512, 513), LOGIT_BYTES["fused"]),
}
"term, rows of the benchmarks and bytes per logit, by kernel"
LARGE_BYTES = 2**26
"element-wise kernels on less are as long as their start"
OF_MACHINE = ("kernel_seconds", "cuda_context_bytes")
"terms of this host and its driver: on the page, but not in the project's file, which is for every such GPU"
TO_STEPS = ("eager_slowdown", "compiled_slowdown", "kernel_seconds")
LEAST_EFFECT = 0.02
"of step times, per factor e of a term: a term with less is not fitted to them"
LEAST_MODELS = 2
"whose steps a term must change: one model's widths may be what is wrong with its steps"
PASSES = {"forward": "forward", "dgrad": "input_gradient", "wgrad": "weight_gradient"}
GEMM_ROWS, GEMM_INNER = 16_384, 1536
"of the alignment table, as micro.py has them"
GIB = 2**30
BEFORE = "what `slm estimate` printed on the day of the measurement"


@dataclass
class Archive:
    """What several calls of measure.py have measured on one GPU."""

    about: dict[str, Any] = field(default_factory=dict)
    arms: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    micro: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    notes: str = ""
    "notes.md of a folder of results/: what a person found out about these figures"

    def add(self, path: Path) -> None:
        files = files_of(path)
        about = json.loads(files["about.json"])
        if self.about.get("gpu", about["gpu"]) != about["gpu"]:
            raise SystemExit(f"error: {path} is of {about['gpu']!r}, not of {self.about['gpu']!r}")
        commands = [*self.about.get("commands", []), *about["commands"]]
        dates = {*self.about.get("dates", []), *about.get("dates", [about["date"]])}
        of_micro = {"micro_date": about["date"]} if "micro.jsonl" in files else {}
        self.about = {**self.about, **of_micro, **about, "commands": list(dict.fromkeys(commands))}
        self.about["dates"] = sorted(dates)
        for arm in lines_of(files, "arms.jsonl"):
            key = arm["part"], arm["name"]
            if arm["status"] != "not run" or key not in self.arms:
                self.arms[key] = arm
        for line in lines_of(files, "micro.jsonl"):
            measured = ("seconds", "num_samples", "spread")
            shape = {name: value for name, value in line.items() if name not in measured}
            self.micro[json.dumps(shape, sort_keys=True)] = line
        self.notes = files.get("notes.md", self.notes.encode()).decode()
        self.records |= {name: data for name, data in files.items() if name.startswith("records/")}

    def of(self, *parts: str) -> list[dict[str, Any]]:
        """The arms that ended well, by name."""
        arms = sorted(self.arms.items())
        return [arm for (part, _), arm in arms if part in parts and arm["status"] == "ok"]

    def timed(self, kind: str, **shape: Any) -> list[dict[str, Any]]:
        return [row for row in self.micro.values() if shape.items() <= row.items() and row["kind"] == kind]


def lines_of(files: dict[str, bytes], name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.get(name, b"").splitlines()]


def files_of(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        files = (each for each in path.rglob("*") if each.is_file())
        found = {str(each.relative_to(path)): each.read_bytes() for each in files}
        packed = path / "records.tar.gz"  # of a folder of results/
        return found | (files_of(packed) if packed.exists() else {})
    with tarfile.open(path) as packed:
        return {member.name: packed.extractfile(member).read() for member in packed if member.isfile()}


# ---- calibration


@dataclass(frozen=True)
class Step:
    """The step of one arm."""

    arm: str
    model: str
    measured_seconds: float
    said_seconds: float | None
    "what `slm estimate` printed on the day of the measurement; None: unknown"
    predict: Callable[[Calibration], float]
    is_fitted: bool
    "else held out"


Terms = dict[str, CalibrationRow]


def fitted(
    predict: Callable[[dict[str, float]], np.ndarray], measured: np.ndarray, start: dict[str, float]
) -> dict[str, float]:
    """The positive values with the least squared log errors: Gauss-Newton, each step by numpy's lstsq."""
    logs = np.log(list(start.values()))

    def errors(at: np.ndarray) -> np.ndarray:
        values = dict(zip(start, np.exp(at), strict=True))
        return np.log(predict(values) / measured)

    for _ in range(60):
        now = errors(logs)
        slopes = np.stack([(errors(logs + 1e-5 * unit) - now) / 1e-5 for unit in np.eye(len(logs))], axis=1)
        step = np.clip(np.linalg.lstsq(slopes, -now, rcond=1e-9)[0], -1.0, 1.0)
        for _ in range(20):
            if np.sum(errors(logs + step) ** 2) <= np.sum(now**2):
                break
            step = step / 2
        logs = logs + step
        if np.abs(step).max() < 1e-9:
            break
    return {name: float(value) for name, value in zip(start, np.exp(logs), strict=True)}


def terms_of(archive: Archive, gpu: Gpu, source: str) -> tuple[Terms, list[str]]:
    """All terms that the archive can give, and why others are missing."""
    terms: Terms = {}
    missing: list[str] = []
    date = archive.about["date"]

    def add(
        evidence: str,
        measured: Sequence[float],
        predict: Callable[[dict[str, float]], Sequence[float]],
        start: dict[str, float],
        date: str = date,
    ) -> None:
        if len(measured) < len(start):
            missing.append(f"{', '.join(start)}: {len(measured)} {evidence}, too few")
            return
        values = fitted(lambda at: np.array(predict(at)), np.array(measured), start)
        residual = error_of(measured, predict(values)) if len(measured) > len(start) else None
        for name, value in values.items():
            if name in TERMS:
                row = (name, value, residual, len(measured), evidence, source, date)
                terms[name] = CalibrationRow(gpu.name, *row)

    def add_micro(
        what: str,
        rows: list[dict[str, Any]],
        model: Callable[[dict[str, float]], Callable[[dict[str, Any]], float]],
        start: dict[str, float],
    ) -> None:
        """model: from values of the terms to a function from a benchmark to its seconds."""
        add(
            f"micro-benchmarks of {what}",
            [row["seconds"] for row in rows],
            lambda values: list(map(model(values), rows)),
            start,
            archive.about.get("micro_date", date),
        )

    def add_share(
        what: str, rows: list[dict[str, Any]], num_bytes: Callable[[dict[str, Any]], float], term: str
    ) -> None:
        add_micro(what, rows, lambda v: lambda row: num_bytes(row) / memory / v[term], {term: 0.8})

    memory, flops = gpu.memory_bytes_per_second, gpu.dense_bf16_flops_per_second
    moved = [
        row for row in archive.timed("elementwise") + archive.timed("copy") if row["bytes"] >= LARGE_BYTES
    ]
    add_micro(
        "element-wise kernels and copies",
        moved,
        lambda v: lambda row: v["start"] + row["bytes"] / memory / v["memory_share"],
        {"memory_share": 0.85, "start": 5e-6},
    )
    products = archive.timed("matmul", dtype="bfloat16")
    divisors = {int(np.gcd.reduce([row["inner"], row["width"], ALIGNMENT])) for row in products}
    start = {f"misaligned_share_{divisor}": 0.3 for divisor in (1, 2, 4) if divisor in divisors}
    of_memory = values_of(terms)
    add_micro(
        "matrix products",
        products,
        lambda v: product_model(gpu, {**of_memory, **v}),
        {"matmul_share": 0.7, "product_start_seconds": 5e-6, **start},
    )
    kernel = {"cudnn": "sdpa_cudnn", "flash_2": "sdpa_flash"}[kernel_of("sdpa", gpu, TODAY)]
    for head_dim in (64, 128):
        for which in ("forward", "backward"):
            share, half = (f"attention_{which}_{name}_{head_dim}" for name in ("share", "half"))
            add_micro(
                f"{kernel}, {which}, heads of {head_dim}",
                archive.timed("attention", kernel=kernel, head_dim=head_dim, **{"pass": which}),
                lambda v, share=share, half=half: (
                    lambda row: attention_flop(row) / flops / v[share] * (1 + v[half] / row["seq_len"])
                ),
                {share: 0.4, half: 200.0},
            )
    add_share(
        "fused AdamW",
        [row for row in archive.timed("adamw", fused=True) if row["optimizer"] in ADAMW_BYTES],
        lambda row: row["num_parameters"] * ADAMW_BYTES[row["optimizer"]],
        "optimizer_share",
    )
    for loss, (term, of_rows, num_bytes) in LOSSES.items():
        add_share(
            f"cross-entropy, {loss}",
            [row for row in archive.timed("cross_entropy", kernel=loss) if row["rows"] in of_rows],
            lambda row, each=num_bytes: row["rows"] * row["vocab_size"] * each,
            term,
        )
    contexts = [arm["result"]["cuda_context_bytes"] for arm in archive.of("micro")]
    name = "cuda_context_bytes"
    add("arms", contexts, lambda v: [v[name]] * len(contexts), {name: 5e8})
    steps = [step for step in steps_of(archive, gpu) if step.is_fitted]
    before = values_of(terms)

    def predict(values: dict[str, float]) -> list[float]:
        calibration = completed(gpu.name, Calibration(**before, **values))
        return [step.predict(calibration) for step in steps]

    slowdowns = {name: getattr(TODAY, name) for name in TO_STEPS}
    at_start, chosen = np.array(predict(slowdowns)), {}
    for name, value in slowdowns.items():
        effects = np.log(np.array(predict({**slowdowns, name: value * 1.1})) / at_start) / np.log(1.1)
        pairs = zip(steps, np.abs(effects), strict=True)
        models = {step.model for step, effect in pairs if effect >= LEAST_EFFECT}
        if len(models) >= LEAST_MODELS:
            chosen[name] = value
        else:
            changed = f"changes the fitted steps of {len(models)} models by more than {LEAST_EFFECT:.0%}"
            missing.append(f"{name}: {changed}; a fit needs {LEAST_MODELS}")
    if chosen:
        add("step times of arms", [step.measured_seconds for step in steps], predict, chosen)
    return terms, missing


def product_model(gpu: Gpu, values: dict[str, float]) -> Callable[[dict[str, Any]], float]:
    known = {name: value for name, value in values.items() if name in TERMS}
    rates = rates_of(gpu, calibrated(TODAY, Calibration(**known)))

    def seconds(row: dict[str, Any]) -> float:
        shape = {"rows": row["rows"], "inputs": row["inner"], "outputs": row["width"]}
        return getattr(product_seconds(rates, **shape, padded=False), PASSES[row["pass"]])

    return seconds


def attention_flop(row: dict[str, Any]) -> float:
    """Causal half counted; backward does five products for forward's two."""
    tokens, width = row["batch"] * row["seq_len"], row["num_heads"] * row["head_dim"]
    return 2.0 * row["seq_len"] * tokens * width * (1.0 if row["pass"] == "forward" else 2.5)


def values_of(terms: Terms) -> dict[str, float]:
    return {name: row.value for name, row in terms.items()}


def error_of(measured: Sequence[float], predicted: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(predicted) / np.array(measured) - 1)))


def steps_of(archive: Archive, gpu: Gpu) -> list[Step]:
    """Arms on one GPU that have a closed form; every second one is held out, and all of HELD_OUT."""
    timed = [
        (arm, setup)
        for arm in archive.of(*STEP_PARTS)
        if is_real(arm["result"]) and (setup := setup_of(arm["result"], gpu)) is not None
    ]
    fitted_to = [arm for arm, _ in timed if arm["part"] not in HELD_OUT][::2]
    return [
        Step(
            f"{arm['part']} {arm['name']}",
            setup.spec.name,
            arm["result"]["step_seconds"],
            arm["result"].get("estimated_step_seconds"),
            predictor(setup),
            is_fitted=arm in fitted_to,
        )
        for arm, setup in timed
    ]


def is_real(result: dict[str, Any]) -> bool:
    """Whether it is of one process on one GPU, not rehearsed, with a rate."""
    real = result.get("evidence") == "measured" and result["world_size"] == 1
    return real and bool(result["tokens_per_second"])


def setup_of(result: dict[str, Any], gpu: Gpu) -> Setup | None:
    """None: without a closed form."""
    known = {each.name for each in dataclasses.fields(RunConfig) if each.init}
    asked = {name: value for name, value in in_todays_names(result["asked"]).items() if name in known}
    config = RunConfig(**asked).with_defaults(has_gpu=True)
    spec = find_model(config.model)
    if unknown_to_estimates(config, gpu=gpu, spec=spec):
        return None
    return Setup(spec, find_strategy(result["strategy"]), config, num_gpus=1, gpu=gpu).launched


def predictor(setup: Setup) -> Callable[[Calibration], float]:
    sent = transfers(setup)
    return lambda calibration: step_time(setup, sent, calibrated(TODAY, calibration)).step_seconds


# ---- the page


def table(columns: Sequence[str], rows: list[Sequence[Any]]) -> list[str]:
    """Markdown lines; None is a dash."""
    return (
        [row_of(columns), row_of(["---"] * len(columns)), *map(row_of, rows)] if rows else ["Not measured."]
    )


def row_of(cells: Sequence[Any]) -> str:
    shown = ("-" if cell is None else str(cell) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in shown) + " |"


def shown(value: float | None, form: str, scale: float = 1.0) -> str | None:
    return None if value is None else format(value * scale, form)


def off(predicted: float | None, measured: float | None) -> str | None:
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else None


def memory_table(archive: Archive) -> list[str]:
    rows = []
    for arm in archive.of("memory"):
        r = arm["result"]
        row = [r["model"], r["strategy"], r["evidence"], r["world_size"]]
        for kind in ("allocated", "reserved"):
            predicted, seen = r.get(f"estimated_peak_{kind}_bytes"), r[f"peak_{kind}_bytes"]
            row += [shown(predicted, ".2f", 1 / GIB), shown(seen, ".2f", 1 / GIB), off(predicted, seen)]
        rows.append(row)
    columns = ("model", "strategy", "evidence", "ranks")
    for kind in ("allocated", "reserved"):
        columns += (f"{kind} GiB, predicted", "seen", "off by")
    note = f"Predicted: {BEFORE}. Seen: measured on one GPU, or rehearsed."
    return ["", "## Memory", "", note, "", *table(columns, rows)]


def step_table(steps: list[Step], calibration: Calibration) -> list[str]:
    rows = []
    errors: dict[tuple[bool, str], list[float]] = {}
    for step in steps:
        seen = step.measured_seconds
        row = [step.arm, shown(seen, ".1f", 1e3)]
        for name, predicted in (
            ("before", step.said_seconds),
            ("uncalibrated", step.predict(Calibration())),
            ("calibrated", step.predict(calibration)),
        ):
            row += [shown(predicted, ".1f", 1e3), off(predicted, seen)]
            if predicted:
                errors.setdefault((step.is_fitted, name), []).append(abs(predicted / seen - 1))
        rows.append([*row, "fit" if step.is_fitted else "held out"])
    halves = []
    for is_fitted, half in ((True, "fit"), (False, "held out")):
        found = [
            f"median |error| {median(each):.1%}, worst {max(each):.1%} {name}"
            for (fitted_to, name), each in errors.items()
            if fitted_to == is_fitted
        ]
        number = sum(step.is_fitted == is_fitted for step in steps)
        halves += [f"{half} ({number} arms): {', '.join(found)}"] if found else []
    columns = ["arm", "ms measured"]
    for name in ("predicted before", "today's forms, uncalibrated", "today's forms, calibrated"):
        columns += [name, "off by"]
    note = f"One GPU. Before: {BEFORE}. {'; '.join(halves)}"
    return ["", "## Seconds of a step", "", note, "", *table([*columns, "arm is of the"], rows)]


def ladder_table(archive: Archive) -> list[str]:
    rows = []
    for arm in archive.of("rungs", "ladder", "removed", *HELD_OUT):
        r = arm["result"]
        row = [arm["part"], arm["name"], r["per_device_train_batch_size"]]
        row.append(shown(r["tokens_per_second"], ",.0f"))
        rows.append([*row, shown(r["mfu"], ".1%"), shown(r.get("estimated_mfu"), ".1%")])
    columns = ("part", "arm", "batch", "tokens/s, measured", "MFU, measured", "MFU, predicted before")
    note = (
        f"Of the data sheet's dense bf16 peak. Before: {BEFORE}. Flags of part `removed` were removed since."
    )
    return ["", "## The ladder", "", note, "", *table(columns, rows)]


def trainer_table(archive: Archive) -> list[str]:
    rows = [
        (arm["name"], r["arm"], shown(r["step_seconds"], ".1f", 1e3), shown(r["tokens_per_second"], ",.0f"))
        for arm in archive.of("trainer")
        for r in arm["result"]["rows"]
    ]
    columns = ("model", "arm", "ms, measured", "tokens/s, measured")
    return ["", "## Against Trainer and others", "", *table(columns, rows)]


def gemm_table(archive: Archive) -> list[str]:
    found: dict[int, dict[str, float]] = {}
    for row in archive.timed("matmul", rows=GEMM_ROWS, inner=GEMM_INNER):
        flop = 2 * row["rows"] * row["inner"] * row["width"]
        found.setdefault(row["width"], {})[row["pass"]] = flop / row["seconds"]
    rows = [
        (width, int(np.gcd(width, 64)), *(shown(by_pass.get(name), ".0f", 1e-12) for name in PASSES))
        for width, by_pass in sorted(found.items())
    ]
    columns = ("width", "multiple of", *(f"{name} TFLOP/s, measured" for name in PASSES))
    note = f"{GEMM_ROWS} x {GEMM_INNER} x width, bf16."
    return ["", "## Matrix products by alignment", "", note, "", *table(columns, rows)]


def term_table(terms: Terms, missing: list[str]) -> list[str]:
    rows = [
        (t.term, f"{t.value:.4g}", shown(t.residual, ".1%"), t.num_measurements, f"measured: {t.evidence}")
        for t in terms.values()
    ]
    columns = ("term", "value", "median error of its fit", "measurements", "from")
    note = (
        f"What `slm estimate` takes for this GPU; {' and '.join(OF_MACHINE)} only from a file of one's own."
    )
    lines = ["", "## Calibration", "", note, "", *table(columns, rows)]
    if missing:
        heading = "Not calibrated, so the same chip's, if one is measured, or as for other GPUs (predicted):"
        lines += ["", heading, "", *(f"- {each}" for each in missing)]
    return lines


def page(archive: Archive, gpu: Gpu, terms: Terms, missing: list[str]) -> str:
    about = archive.about
    calibration = completed(gpu.name, Calibration(**values_of(terms)))
    lines = [f"# Measured on {about['gpu']}, {' and '.join(about['dates'])}", ""]
    if about["pretended"]:
        lines += ["**PRETENDED: there was no GPU. No number here means anything.**", ""]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += [f"Driver {about['driver']}; {versions}.", ""]
    lines += ["```bash", *about["commands"], "```", ""]
    lines += ["`arms.jsonl` has the command of each arm."]
    lines += ["`records.tar.gz` has the records: unpack it for `slm report`."]
    lines += ["", archive.notes.strip()] if archive.notes else []
    lines += memory_table(archive) + step_table(steps_of(archive, gpu), calibration)
    lines += ladder_table(archive) + trainer_table(archive) + gemm_table(archive) + term_table(terms, missing)
    bad = [arm for arm in archive.arms.values() if arm["status"] not in ("ok", "not run")]
    rows = [(arm["part"], arm["name"], arm["status"], arm["reason"][:160]) for arm in bad]
    lines += ["", "## Failed", "", *table(("part", "arm", "status", "reason"), rows)] if bad else []
    return "\n".join(lines) + "\n"


# ---- writing


def calibration_text(gpu: Gpu, terms: list[CalibrationRow], others: Sequence[CalibrationRow]) -> str:
    """A calibration file with this GPU's rows replaced."""
    rows = [*(row for row in others if row.gpu != gpu.name), *terms]
    text = io.StringIO()
    columns = [each.name for each in dataclasses.fields(CalibrationRow)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in sorted(rows, key=lambda row: row.gpu):
        formatted = {"value": f"{row.value:.6g}", "residual": shown(row.residual, ".4f")}
        writer.writerow(dataclasses.asdict(row) | formatted)
    return text.getvalue()


def packed(records: dict[str, bytes]) -> bytes:
    """A tar.gz with the same bytes for the same records."""
    data = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, content in sorted(records.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archives", type=Path, nargs="+", help="GPU.tar.gz or folders, in the calls' order")
    parser.add_argument("--out", type=Path, help="write all into this folder, and nothing elsewhere")
    args = parser.parse_args()
    archive = Archive()
    for path in args.archives:
        archive.add(path)
    if archive.about["pretended"] and args.out is None:
        raise SystemExit(
            "error: this GPU was pretended, and nothing pretended is shipped\nhint: --out FOLDER"
        )
    gpu = gpu_of_name(archive.about["gpu"])
    folder = Path("results") / gpu.name
    out, source = args.out or ROOT / folder, str(args.out or folder)
    terms, missing = terms_of(archive, gpu, source)
    text = page(archive, gpu, terms, missing)
    print(text)
    lines = {"arms.jsonl": archive.arms.values(), "micro.jsonl": archive.micro.values()}
    for arm in archive.arms.values():
        arm["result"].pop("losses", None)
    files = {
        out / "README.md": text,
        out / "about.json": json.dumps(archive.about, indent=1) + "\n",
        **{out / name: "".join(json.dumps(each) + "\n" for each in found) for name, found in lines.items()},
    }
    if args.out is None:
        shipped = [row for name, row in terms.items() if name not in OF_MACHINE]
        files[FILE] = calibration_text(gpu, shipped, rows_of(FILE))
    else:
        files[out / "calibration.csv"] = calibration_text(gpu, list(terms.values()), [])
    out.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_text(content)
    (out / "records.tar.gz").write_bytes(packed(archive.records))


if __name__ == "__main__":
    main()
