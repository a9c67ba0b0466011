"""Turn what measure.py has measured on a GPU into results/, a page of accuracy and a calibration.

    python bench/gpu/digest.py h200-1.tar.gz h200-2.tar.gz --dry-run     # prints all, writes nothing
    python bench/gpu/digest.py h200-1.tar.gz h200-2.tar.gz               # writes
    python bench/gpu/digest.py pretended.tar.gz --try FOLDER             # writes into FOLDER alone

Takes archives or folders, in the order of their calls; the last line of an arm counts, but "not run" replaces
nothing. Writes `--out` (default results/GPU): the page (README.md), about.json, arms.jsonl, micro.jsonl and
records.tar.gz; and the rows of slm_toolkit/hardware/calibration.csv, which `slm estimate` reads. What an
archive lacks is named and never filled in.

Terms come from the micro-benchmarks where there is one of their kind; the last three (TO_STEPS) are fitted to
the step times of every second arm and judged on the other arms.
"""

import argparse
import csv
import dataclasses
import gzip
import io
import json
import tarfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.calibration import FILE, Calibration, CalibrationRow, completed, rows_of
from slm_toolkit.hardware.gpus import Gpu, find_gpu
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates
from slm_toolkit.predict.speed.attention import kernel_of
from slm_toolkit.predict.speed.matmul import ALIGNMENT, product_seconds, rates_of
from slm_toolkit.predict.speed.software import TODAY, calibrated
from slm_toolkit.predict.speed.step import LOGIT_BYTES, OPTIMIZER_SLOWDOWN, optimizer_bytes, step_time
from slm_toolkit.predict.speed.traffic import transfers
from slm_toolkit.strategy.strategy import find_strategy

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("canary", "micro", "ladder", "memory", "trainer", "flash", "extras", "rungs")
STEP_PARTS = ("ladder", "memory", "rungs", "flash", "extras")
HELD_OUT = ("flash", "extras")
"parts of which no arm is fitted to"
SHAPES = {
    "matmul": ("rows", "inner", "width", "pass"),
    "attention": ("kernel", "head_dim", "num_heads", "seq_len", "batch", "pass"),
    "elementwise": ("bytes",),
    "copy": ("bytes",),
    "adamw": ("num_parameters", "fused"),
    "cross_entropy": ("rows", "vocab_size", "kernel"),
    "launch": ("num_launches",),
}
"fields that a micro-benchmark must have, by kind"
ADAMW_BYTES = {
    "AdamW": 28,  # fp32: gradient 4 read; weight 8, both moments 16 read and written
    "AdamWWithMasterWeights": optimizer_bytes(
        find_strategy("ddp"), RunConfig(max_grad_norm=1.0), slowdown=OPTIMIZER_SLOWDOWN
    ),
}
LOSS_BYTES = {
    "hf": LOGIT_BYTES["hf"] - 20,  # the shifted copy, 8 forward and 12 backward, is not in the benchmark
    "fused_logits": LOGIT_BYTES["fused"],
}
LARGE_ROWS = 4096
"transformers' loss on fewer rows waits for launches"
CHUNK_ROWS = 512
"of a fused loss: 64 MiB of fp32 hold 524 rows of 32,000"
LARGE_BYTES = 2**26
"element-wise kernels on less are as long as their start"
OF_MACHINE = ("kernel_seconds", "cuda_context_bytes")
"terms of this host and its driver: on the page, but not in the project's file, which is for every such GPU"
TO_STEPS = ("eager_slowdown", "compiled_slowdown", "kernel_seconds")
LEAST_EFFECT = 0.02
"of step times, per factor e of a term: a term with less is not fitted to them"
LEAST_MODELS = 2
"whose steps a term must change: one model's widths may be what is wrong with its steps"
COMPUTED = ("matmul_share", "misaligned_share", "attention_forward_share", "attention_backward_share")
REMOVED = {
    *(("optim", "lion"), ("adam_dtype", "int8"), ("adam_dtype", "bf16")),
    *(("use_liger_kernel", True), ("mlp_kernel", "fused"), ("loss_kernel", "fused_logits")),
}
"of measured arms, but of no flag of this version: such arms have no closed form"
MOST = 1.1
"of the data sheet's peak: beyond it a time or its shape is wrong"
GEMM_ROWS, GEMM_INNER = 16_384, 1536
"of the alignment table, as micro.py has them"


class BadArchive(ValueError):
    pass


@dataclass
class Archive:
    """What several calls of measure.py have measured on one GPU."""

    about: dict[str, Any] = field(default_factory=dict)
    arms: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    micro: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: str = ""
    "notes.md of a folder of results/: what a person found out about these figures"

    def add(self, path: Path) -> None:
        files = _files_of(path)
        try:
            about = json.loads(files["about.json"])
            gpu, pretended = about["gpu"], about["pretended"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadArchive(
                f"no about.json with gpu and pretended in {path} ({error!r})\n"
                "hint: give what measure.py wrote"
            ) from None
        if self.about and (gpu, pretended) != (self.about["gpu"], self.about["pretended"]):
            raise BadArchive(
                f"{path} is of {gpu!r} (pretended: {pretended}), the archives before it of "
                f"{self.about['gpu']!r} (pretended: {self.about['pretended']})\n"
                "hint: give archives of one GPU"
            )
        commands = [*self.about.get("commands", []), *about.get("commands", [])]
        dates = {*_dates(self.about), *_dates(about)}
        of_micro = {"micro_date": about["date"]} if "micro.jsonl" in files and "date" in about else {}
        self.about = {**self.about, **of_micro, **about, "commands": list(dict.fromkeys(commands))}
        self.about["dates"] = sorted(dates)
        for line in self._lines(files, "arms.jsonl", path, ("part", "name", "status", "result")):
            key = (line["part"], line["name"])
            if line["status"] != "not run" or key not in self.arms:
                self.arms[key] = line
        for line in self._lines(files, "micro.jsonl", path, ("kind", "seconds")):
            measured = ("seconds", "num_samples", "spread")
            shape = {name: value for name, value in line.items() if name not in measured}
            self.micro[json.dumps(shape, sort_keys=True)] = line
        self.notes = files.get("notes.md", self.notes.encode()).decode()
        self.records |= {name: data for name, data in files.items() if name.startswith("records/")}

    def _lines(
        self, files: dict[str, bytes], name: str, path: Path, needed: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        if name not in files and not (name == "micro.jsonl" and self.micro):
            self.problems.append(f"{path}: no {name}")
        for number, text in enumerate(files.get(name, b"").decode(errors="replace").splitlines(), start=1):
            try:
                line = json.loads(text)
            except ValueError:
                self.problems.append(f"{path}: {name} line {number} is no JSON: {text[:60]!r}")
                continue
            missing = [key for key in needed if not isinstance(line, dict) or key not in line]
            if missing:
                self.problems.append(f"{path}: {name} line {number} has no {', '.join(missing)}")
            elif "kind" in needed and (problem := _micro_problem(line)):
                self.problems.append(f"{path}: {name} line {number}: {problem}")
            else:
                yield line

    def of(self, *parts: str) -> list[dict[str, Any]]:
        """The arms that ended well, by name."""
        return [
            arm for (part, _), arm in sorted(self.arms.items()) if part in parts and arm["status"] == "ok"
        ]

    def timed(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.micro.values() if line["kind"] == kind]

    @property
    def missing_parts(self) -> list[str]:
        return [part for part in PARTS if not self.of(part) and not (part == "micro" and self.micro)]


def _dates(about: dict[str, Any]) -> list[str]:
    """The days on which there were measurements."""
    return about.get("dates") or ([about["date"]] if "date" in about else [])


def _micro_problem(line: dict[str, Any]) -> str | None:
    if missing := [key for key in SHAPES.get(line["kind"], ()) if key not in line]:
        return f"a {line['kind']} without {', '.join(missing)}"
    return None if _is_positive(line["seconds"]) else f"seconds is {line['seconds']!r}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _files_of(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        files = (each for each in path.rglob("*") if each.is_file())
        found = {str(each.relative_to(path)): each.read_bytes() for each in files}
        packed = path / "records.tar.gz"  # of a folder of results/
        return found | (_files_of(packed) if packed.exists() else {})
    try:
        with tarfile.open(path) as packed:
            return {
                member.name.removeprefix("./"): packed.extractfile(member).read()
                for member in packed
                if member.isfile()
            }
    except (OSError, EOFError, tarfile.TarError) as error:
        raise BadArchive(
            f"can't read {path}: {error}\nhint: give what measure.py wrote: GPU.tar.gz or its --out folder"
        ) from None


# ---- calibration


@dataclass(frozen=True)
class Term:
    name: str
    value: float
    residual: float | None
    "median of |predicted / measured - 1| over what it was fitted to; None: as many terms as measurements"
    num_measurements: int
    evidence: str


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


def terms_of(archive: Archive, gpu: Gpu) -> tuple[list[Term], list[str]]:
    """All terms that the archive can give, and why others are missing."""
    terms, missing = [], []

    def add(
        what: str,
        rows: list[dict[str, Any]],
        seconds: Callable[[dict[str, float]], list[float]],
        start: dict[str, float],
        nuisance: tuple[str, ...] = (),
    ) -> None:
        if len(rows) < len(start):
            missing.append(f"{', '.join(start)}: {len(rows)} micro-benchmarks of {what}, too few")
            return
        measured = np.array([row["seconds"] for row in rows])

        def predict(values: dict[str, float]) -> np.ndarray:
            return np.array(seconds(values))

        values = fitted(predict, measured, start)
        residual = _error(measured, predict(values)) if len(rows) > len(start) else None
        terms.extend(
            Term(name, value, residual, len(rows), f"micro-benchmarks of {what}")
            for name, value in values.items()
            if name not in nuisance
        )

    memory, flops = gpu.memory_bytes_per_second, gpu.dense_bf16_flops_per_second
    moved = [
        row for kind in ("elementwise", "copy") for row in archive.timed(kind) if row["bytes"] >= LARGE_BYTES
    ]
    add(
        "element-wise kernels and copies",
        moved,
        lambda v: [v["start"] + row["bytes"] / memory / v["memory_share"] for row in moved],
        {"memory_share": 0.85, "start": 5e-6},
        nuisance=("start",),
    )
    products = [row for row in archive.timed("matmul") if row.get("dtype") == "bfloat16"]
    start = {"matmul_share": 0.7, "product_start_seconds": 5e-6}
    for divisor in (1, 2, 4):
        if any(_divisor(row) == divisor for row in products):
            start[f"misaligned_share_{divisor}"] = 0.3
        else:
            missing.append(f"misaligned_share_{divisor}: no product with such a width was timed")
    of_memory = {term.name: term.value for term in terms}
    add("matrix products", products, lambda v: _products(products, gpu, {**of_memory, **v}), start)
    kernel, attention = _attention_rows(archive, gpu)
    for size in (64, 128):
        for which in ("forward", "backward"):
            rows = [row for row in attention if (row["head_dim"], row["pass"]) == (size, which)]
            share, half = (f"attention_{which}_{name}_{size}" for name in ("share", "half"))
            add(
                f"{kernel}, {which}, heads of {size}",
                rows,
                lambda v, rows=rows, share=share, half=half: [
                    _attention_flop(row) / flops / v[share] * (1 + v[half] / row["seq_len"]) for row in rows
                ],
                {share: 0.4, half: 200.0},
            )
    steps = [row for row in archive.timed("adamw") if row["fused"] and row.get("optimizer") in ADAMW_BYTES]
    add(
        "fused AdamW",
        steps,
        lambda v: [
            row["num_parameters"] * ADAMW_BYTES[row["optimizer"]] / memory / v["optimizer_share"]
            for row in steps
        ],
        {"optimizer_share": 0.8},
    )
    for loss, term in (("hf", "loss_share_hf"), ("fused_logits", "loss_share_fused")):
        rows = [
            row
            for row in archive.timed("cross_entropy")
            if row["kernel"] == loss
            and (row["rows"] >= LARGE_ROWS if loss == "hf" else row["rows"] == CHUNK_ROWS)
        ]
        add(
            f"cross-entropy, {loss}",
            rows,
            lambda v, rows=rows, loss=loss, term=term: [
                row["rows"] * row["vocab_size"] * LOSS_BYTES[loss] / memory / v[term] for row in rows
            ],
            {term: 0.8},
        )
    found = _context(archive)
    (terms if isinstance(found, Term) else missing).append(found)
    wrong = [term for term in terms if term.value > MOST and term.name.startswith(COMPUTED)]
    missing += [f"{term.name}: {term.value:.3g}, more than the data sheet's peak allows" for term in wrong]
    terms = [term for term in terms if term not in wrong]
    more, unfitted = _step_terms(archive, gpu, terms)
    return [*terms, *more], [*missing, *unfitted]


def _divisor(row: dict[str, Any]) -> int:
    return int(np.gcd.reduce([row["inner"], row["width"], ALIGNMENT]))


def _products(rows: list[dict[str, Any]], gpu: Gpu, values: dict[str, float]) -> list[float]:
    rates = rates_of(gpu, calibrated(TODAY, calibration_with(values)))
    names = {"forward": "forward", "dgrad": "input_gradient", "wgrad": "weight_gradient"}
    return [
        getattr(
            product_seconds(rates, rows=row["rows"], inputs=row["inner"], outputs=row["width"], padded=False),
            names[row["pass"]],
        )
        for row in rows
    ]


def calibration_with(values: dict[str, float]) -> Calibration:
    names = {each.name for each in dataclasses.fields(Calibration)}
    return Calibration(**{name: value for name, value in values.items() if name in names})


def _attention_rows(archive: Archive, gpu: Gpu) -> tuple[str, list[dict[str, Any]]]:
    """Of the kernel that `sdpa` takes on this GPU."""
    kernel = {"cudnn": "sdpa_cudnn", "flash_2": "sdpa_flash"}[kernel_of("sdpa", gpu, TODAY)]
    return kernel, [row for row in archive.timed("attention") if row["kernel"] == kernel]


def _attention_flop(row: dict[str, Any]) -> float:
    """Causal half counted; backward does five products for forward's two."""
    tokens, width = row["batch"] * row["seq_len"], row["num_heads"] * row["head_dim"]
    return 2.0 * row["seq_len"] * tokens * width * (1.0 if row["pass"] == "forward" else 2.5)


def _context(archive: Archive) -> Term | str:
    found = [
        arm["result"]["cuda_context_bytes"]
        for arm in archive.of(*PARTS)
        if _is_positive(arm["result"].get("cuda_context_bytes"))
    ]
    if not found:
        return "cuda_context_bytes: no arm has measured it"
    middle = median(found)
    return Term("cuda_context_bytes", middle, _error(found, [middle] * len(found)), len(found), "arms")


def _error(measured: Sequence[float], predicted: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(predicted) / np.array(measured) - 1)))


def _is_real(arm: dict[str, Any]) -> bool:
    """Not rehearsed: one process on one GPU."""
    return arm["result"].get("evidence") == "measured" and arm["result"].get("world_size") == 1


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


def steps_of(archive: Archive, gpu: Gpu) -> list[Step]:
    """Arms on one GPU that have a closed form; every second one is held out, and all of HELD_OUT."""
    timed = [
        (arm, setup)
        for arm in archive.of(*STEP_PARTS)
        if _is_real(arm) and _is_positive(arm["result"].get("step_seconds")) and "asked" in arm["result"]
        if (setup := _setup_of(arm["result"], gpu)) is not None
    ]
    fitted_to = [arm for arm, _ in timed if arm["part"] not in HELD_OUT][::2]
    return [
        Step(
            f"{arm['part']} {arm['name']}",
            setup.spec.name,
            arm["result"]["step_seconds"],
            arm["result"].get("estimated_step_seconds"),
            _predictor(setup),
            is_fitted=arm in fitted_to,
        )
        for arm, setup in timed
    ]


def _setup_of(result: dict[str, Any], gpu: Gpu) -> Setup | None:
    """None: without a closed form."""
    if has_removed_flags(result):
        return None
    known = {each.name for each in dataclasses.fields(RunConfig) if each.init}
    asked = {name: value for name, value in result["asked"].items() if name in known}
    config = RunConfig(**asked).with_defaults(has_gpu=True)
    spec = find_model(config.model)
    if unknown_to_estimates(config, gpu=gpu, spec=spec):
        return None
    return Setup(spec, find_strategy(result["strategy"]), config, num_gpus=1, gpu=gpu).launched


def has_removed_flags(result: dict[str, Any]) -> bool:
    return any(result["asked"].get(name) == value for name, value in REMOVED)


def _predictor(setup: Setup) -> Callable[[Calibration], float]:
    sent = transfers(setup)

    def predict(calibration: Calibration) -> float:
        return step_time(setup, sent, calibrated(TODAY, calibration)).step_seconds

    return predict


def _step_terms(archive: Archive, gpu: Gpu, terms: list[Term]) -> tuple[list[Term], list[str]]:
    steps = [step for step in steps_of(archive, gpu) if step.is_fitted]
    if not steps:
        return [], [f"{', '.join(TO_STEPS)}: no step time to fit them to"]
    of_micro = {term.name: term.value for term in terms}
    measured = np.array([step.measured_seconds for step in steps])

    def predict(values: dict[str, float]) -> np.ndarray:
        calibration = completed(gpu.name, calibration_with({**of_micro, **values}))
        return np.array([step.predict(calibration) for step in steps])

    start = {name: getattr(TODAY, name) for name in TO_STEPS}
    at_start, missing = predict(start), []
    for name in TO_STEPS:
        effects = np.abs(np.log(predict({**start, name: start[name] * 1.1}) / at_start)) / np.log(1.1)
        models = {step.model for step, effect in zip(steps, effects, strict=True) if effect >= LEAST_EFFECT}
        if len(models) < LEAST_MODELS:
            changed = f"changes the fitted steps of {len(models)} models by more than {LEAST_EFFECT:.0%}"
            missing.append(f"{name}: {changed}; a fit needs {LEAST_MODELS}")
            del start[name]
    if len(steps) < len(start) or not start:
        return [], [*missing, *[f"{', '.join(start)}: {len(steps)} arms, too few"] * bool(start)]
    values = fitted(predict, measured, start)
    residual = _error(measured, predict(values)) if len(steps) > len(start) else None
    return [Term(n, v, residual, len(steps), "step times of arms") for n, v in values.items()], missing


# ---- the page

GIB = 2**30
BEFORE = "what `slm estimate` printed on the day of the measurement (`said_before.py`)"


def table(title: str, columns: Sequence[str], rows: list[Sequence[Any]], note: str = "") -> list[str]:
    """Markdown; a title without rows says that nothing was measured."""
    lines = ["", f"## {title}", ""]
    lines += [note, ""] if note else []
    if not rows:
        return [*lines, "Not measured."]
    lines += [_row(columns), _row(["---"] * len(columns))]
    return [*lines, *(_row(row) for row in rows)]


def _row(cells: Sequence[Any]) -> str:
    shown = ("-" if cell is None else str(cell) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in shown) + " |"


def _gib(value: Any) -> str | None:
    return f"{value / GIB:.2f}" if isinstance(value, int | float) else None


def _off(predicted: Any, measured: Any) -> str | None:
    return f"{predicted / measured - 1:+.1%}" if _is_positive(measured) and _is_positive(predicted) else None


def _number(value: Any, form: str) -> str | None:
    return format(value, form) if isinstance(value, int | float) else None


def memory_table(archive: Archive) -> list[str]:
    rows = []
    for arm in archive.of("memory"):
        r = arm["result"]
        cells = [r.get("model"), r.get("strategy"), r.get("evidence"), r.get("world_size")]
        for kind in ("allocated", "reserved"):
            predicted, seen = r.get(f"estimated_peak_{kind}_bytes"), r.get(f"peak_{kind}_bytes")
            cells += [_gib(predicted), _gib(seen), _off(predicted, seen)]
        rows.append(cells)
    columns = ("model", "strategy", "evidence", "ranks")
    for kind in ("allocated", "reserved"):
        columns += (f"{kind} GiB, predicted", "seen", "off by")
    note = f"Predicted: {BEFORE}. Seen: measured on one GPU, or rehearsed."
    return table("Memory", columns, rows, note)


def step_table(steps: list[Step], calibration: Calibration) -> list[str]:
    rows = []
    for step in steps:
        seen = step.measured_seconds
        cells = [step.arm, f"{1e3 * seen:.1f}"]
        for _, predicted in _predictions(step, calibration):
            cells += [predicted and f"{1e3 * predicted:.1f}", _off(predicted, seen)]
        rows.append([*cells, "fit" if step.is_fitted else "held out"])
    columns = ["arm", "ms measured"]
    for name in ("predicted before", "today's forms, uncalibrated", "today's forms, calibrated"):
        columns += [name, "off by"]
    note = f"One GPU. Before: {BEFORE}. "
    note += "; ".join(residuals(steps, calibration))
    return table("Seconds of a step", (*columns, "arm is of the"), rows, note if rows else "")


def _predictions(step: Step, calibration: Calibration) -> list[tuple[str, float | None]]:
    uncalibrated, calibrated = step.predict(Calibration()), step.predict(calibration)
    return [("before", step.said_seconds), ("uncalibrated", uncalibrated), ("calibrated", calibrated)]


def residuals(steps: list[Step], calibration: Calibration) -> Iterator[str]:
    """Of each prediction, for both halves."""
    for half_name, is_fitted in (("fit", True), ("held out", False)):
        half = [step for step in steps if step.is_fitted == is_fitted]
        errors: dict[str, list[float]] = {}
        for step in half:
            for name, predicted in _predictions(step, calibration):
                if predicted:
                    errors.setdefault(name, []).append(predicted / step.measured_seconds - 1)
        summaries = ", ".join(f"{_summary(np.array(found))} {name}" for name, found in errors.items())
        if half:
            yield f"{half_name} ({len(half)} arms): {summaries}"


def _summary(errors: np.ndarray) -> str:
    return f"median |error| {np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.1%}"


def ladder_table(archive: Archive, parts: tuple[str, ...] = ("rungs", "ladder", "extras")) -> list[str]:
    rows = []
    for arm in archive.of(*parts):
        r = arm["result"]
        of_rate = _number(r.get("tokens_per_second"), ",.0f")
        mfu = [_number(r.get(name), ".1%") for name in ("mfu", "estimated_mfu")]
        rows.append([arm["part"], arm["name"], r.get("per_device_train_batch_size"), of_rate, *mfu])
    columns = ("part", "arm", "batch", "tokens/s, measured", "MFU, measured", "MFU, predicted before")
    return table("The ladder", columns, rows, f"Of the data sheet's dense bf16 peak. Before: {BEFORE}.")


def trainer_table(archive: Archive) -> list[str]:
    rows = [
        (arm["name"], r["arm"], f"{1e3 * r['step_seconds']:.1f}", f"{r['tokens_per_second']:,.0f}")
        for arm in archive.of("trainer")
        for r in arm["result"].get("rows", [])
    ]
    return table("Against Trainer and others", ("model", "arm", "ms, measured", "tokens/s, measured"), rows)


def flash_table(archive: Archive) -> list[str]:
    found: dict[tuple[str, int], dict[str, float]] = {}
    for arm in archive.of("flash"):
        r = arm["result"]
        if _is_positive(r.get("tokens_per_second")):
            key = (r["model"], r["per_device_train_batch_size"])
            found.setdefault(key, {})[r["attn_implementation"]] = r["tokens_per_second"]
    rows = []
    for (model, batch), by_kernel in sorted(found.items()):
        eager, flash = by_kernel.get("eager"), by_kernel.get("sdpa_flash")
        gain = f"{flash / eager:.2f}x" if eager and flash else None
        rows.append([model, batch, _number(eager, ",.0f"), _number(flash, ",.0f"), gain])
    columns = ("model", "batch", "tokens/s, vanilla, measured", "FlashAttention, measured", "gain")
    return table("FlashAttention by batch", columns, rows)


def gemm_table(archive: Archive) -> list[str]:
    found: dict[int, dict[str, float]] = {}
    for row in archive.timed("matmul"):
        if (row["rows"], row["inner"]) == (GEMM_ROWS, GEMM_INNER):
            flop = 2 * row["rows"] * row["inner"] * row["width"]
            found.setdefault(row["width"], {})[row["pass"]] = flop / row["seconds"] / 1e12
    passes = ("forward", "dgrad", "wgrad")
    rows = [
        [width, int(np.gcd(width, 64)), *(_number(by_pass.get(name), ".0f") for name in passes)]
        for width, by_pass in sorted(found.items())
    ]
    columns = ("width", "multiple of", *(f"{name} TFLOP/s, measured" for name in passes))
    return table("Matrix products by alignment", columns, rows, f"{GEMM_ROWS} x {GEMM_INNER} x width, bf16.")


def launch_lines(archive: Archive) -> list[str]:
    rows = [
        (row["num_launches"], f"{1e6 * row['seconds'] / row['num_launches']:.2f}")
        for row in archive.timed("launch")
    ]
    note = "A bare kernel's; `kernel_seconds` is fitted to steps, where Python and autograd come on top."
    return table("Launches", ("kernels in a row", "microseconds each, measured"), rows, note)


def term_table(terms: list[Term], missing: list[str]) -> list[str]:
    rows = [
        (t.name, f"{t.value:.4g}", _number(t.residual, ".1%"), t.num_measurements, f"measured: {t.evidence}")
        for t in terms
    ]
    columns = ("term", "value", "median error of its fit", "measurements", "from")
    note = (
        f"What `slm estimate` takes for this GPU; {' and '.join(OF_MACHINE)} only from a file of one's own."
    )
    lines = table("Calibration", columns, rows, note)
    if missing:
        heading = "Not calibrated, so the same chip's, if one is measured, or as for other GPUs (predicted):"
        lines += ["", heading, "", *(f"- {m}" for m in missing)]
    return lines


def ended_badly(archive: Archive) -> list[str]:
    """What failed, with the beginning of its reason, and the names of what was not run."""
    arms = sorted(archive.arms.items())
    rows = [
        (part, name, arm["status"], textwrap.shorten(str(arm.get("reason") or ""), 160, placeholder=" ..."))
        for (part, name), arm in arms
        if arm["status"] not in ("ok", "not run")
    ]
    lines = table("What did not end well", ("part", "arm", "status", "reason"), rows) if rows else []
    left: dict[str, list[str]] = {}
    for (part, name), arm in arms:
        if arm["status"] == "not run":
            left.setdefault(part, []).append(name)
    if left:
        lines += ["", "Not run, most of them for want of time (`arms.jsonl` has the reasons):", ""]
        lines += [f"- {part}: {', '.join(names)}" for part, names in left.items()]
    if archive.missing_parts:
        lines += ["", f"Parts without any result: {', '.join(archive.missing_parts)}."]
    if archive.problems:
        lines += ["", "Left out:", "", *(f"- {problem}" for problem in archive.problems)]
    return lines


def page(archive: Archive, gpu: Gpu, terms: list[Term], missing: list[str]) -> str:
    about = archive.about
    calibration = completed(gpu.name, calibration_with({term.name: term.value for term in terms}))
    lines = [f"# Measured on {about['gpu']}, {' and '.join(_dates(about)) or 'date unknown'}", ""]
    if about["pretended"]:
        lines += ["**PRETENDED: there was no GPU. No number here means anything.**", ""]
    versions = ", ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items())
    lines += [f"Driver {about.get('driver') or '-'}; {versions or 'versions unknown'}.", ""]
    lines += ["```bash", *about.get("commands", []), "```", ""]
    lines += ["`arms.jsonl` has the command of each arm; `measure.py` without `--arms` runs all of them."]
    lines += ["`records.tar.gz` has the records: unpack it for `slm report`."]
    lines += ["", archive.notes.strip()] if archive.notes else []
    lines += memory_table(archive)
    lines += step_table(steps_of(archive, gpu), calibration)
    results = {arm["name"]: arm["result"] for arm in archive.of(*STEP_PARTS)}
    if gone := [name for name, r in results.items() if "asked" in r and has_removed_flags(r)]:
        lines += ["", f"Their flags were removed since, and with them their closed forms: {', '.join(gone)}."]
    lines += ladder_table(archive) + trainer_table(archive) + flash_table(archive)
    lines += gemm_table(archive) + launch_lines(archive) + term_table(terms, missing) + ended_badly(archive)
    return "\n".join(lines) + "\n"


def readme_table(archive: Archive, gpu: Gpu) -> str:
    """For README.md, between its markers: the best of each model, or of its aligned sibling."""
    best: dict[str, dict[str, Any]] = {}
    for arm in archive.of("ladder", "rungs", "extras"):
        r = arm["result"]
        if _is_positive(r.get("tokens_per_second")) and _is_real(arm):
            family = r["model"].removesuffix("-hw")
            if family not in best or r["tokens_per_second"] > best[family]["tokens_per_second"]:
                best[family] = {**r, "arm": arm["name"]}
    columns = ("model", "with", "batch", "tokens/s, measured", "MFU", "peak GiB", "predicted before")
    rows = [
        [
            *(r["model"], r["arm"].removeprefix(r["model"]).strip(), r.get("per_device_train_batch_size")),
            _number(r["tokens_per_second"], ",.0f"),
            *(_number(r.get("mfu"), ".1%"), _gib(r.get("peak_allocated_bytes"))),
            _number(r.get("estimated_tokens_per_second"), ",.0f"),
        ]
        for r in sorted(best.values(), key=lambda r: -r["tokens_per_second"])
    ]
    begin, end = markers(gpu)
    return "\n".join([begin, *(_row(row) for row in (columns, ["---"] * len(columns), *rows)), end])


def markers(gpu: Gpu) -> tuple[str, str]:
    return f"<!-- measured on {gpu.name} -->", f"<!-- end of measured on {gpu.name} -->"


# ---- writing


def calibration_text(file: Path, gpu: Gpu, terms: list[Term], *, source: str, about: dict[str, Any]) -> str:
    """The file with this GPU's rows replaced."""
    last = about.get("date", "unknown")
    rows = [row for row in rows_of(file) if row.gpu != gpu.name] if file.exists() else []
    for term in terms:
        measured = (term.value, term.residual, term.num_measurements, term.evidence)
        date = about.get("micro_date", last) if term.evidence.startswith("micro") else last
        rows.append(CalibrationRow(gpu.name, term.name, *measured, source, date))
    text = io.StringIO()
    columns = [field.name for field in dataclasses.fields(CalibrationRow)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in sorted(rows, key=lambda row: row.gpu):
        formatted = {"value": f"{row.value:.6g}", "residual": _number(row.residual, ".4f")}
        writer.writerow(dataclasses.asdict(row) | formatted)
    return text.getvalue()


def files_to_write(
    archive: Archive, gpu: Gpu, terms: list[Term], missing: list[str], *, out: Path, calibration: Path
) -> dict[Path, bytes]:
    text = page(archive, gpu, terms, missing)
    if calibration == FILE:
        terms = [term for term in terms if term.name not in OF_MACHINE]
    shown = str(out.resolve().relative_to(ROOT)) if out.resolve().is_relative_to(ROOT) else str(out)
    written = calibration_text(calibration, gpu, terms, source=shown, about=archive.about)
    slim = [
        {**arm, "result": {k: v for k, v in arm["result"].items() if k != "losses"}}
        for arm in archive.arms.values()
    ]
    lines = {"arms.jsonl": slim, "micro.jsonl": archive.micro.values()}
    files = {
        out / name: "".join(json.dumps(line) + "\n" for line in found).encode()
        for name, found in lines.items()
    }
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as records,
    ):
        for name, data in sorted(archive.records.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            records.addfile(info, io.BytesIO(data))
    return {
        out / "README.md": text.encode(),
        out / "about.json": (json.dumps(archive.about, indent=1) + "\n").encode(),
        **files,
        out / "records.tar.gz": packed.getvalue(),
        calibration: written.encode(),
    }


def readme_with(text: str, new: str, gpu: Gpu) -> str | None:
    """README.md with its table replaced; None where it has no markers."""
    begin, end = markers(gpu)
    if begin not in text or end not in text:
        return None
    return text[: text.index(begin)] + new + text[text.index(end) + len(end) :]


def digest(args: argparse.Namespace) -> None:
    archive = Archive()
    for path in args.archives:
        archive.add(path)
    if archive.about["pretended"] and args.try_folder is None:
        raise BadArchive(
            f"{archive.about['gpu']} was pretended, and nothing pretended is ever shipped\n"
            "hint: --try FOLDER writes into a folder of yours"
        )
    if archive.about["pretended"] and args.try_folder.resolve().is_relative_to(ROOT):
        raise BadArchive(
            f"{args.try_folder} is a folder of this project, and what was pretended stays out of it\n"
            "hint: --try a folder elsewhere"
        )
    gpu = find_gpu(archive.about["gpu"])
    if gpu is None:
        raise BadArchive(
            f"no GPU is known by {archive.about['gpu']!r}\nhint: add it to slm_toolkit/hardware/gpus.csv"
        )
    out, calibration = args.out or ROOT / "results" / gpu.name, FILE
    if args.try_folder is not None:
        out, calibration = args.try_folder / "results" / gpu.name, args.try_folder / "calibration.csv"
    terms, missing = terms_of(archive, gpu)
    files = files_to_write(archive, gpu, terms, missing, out=out, calibration=calibration)
    print(files[out / "README.md"].decode())
    new = readme_table(archive, gpu)
    print(new + "\n")
    if args.try_folder is None:
        readme = readme_with((ROOT / "README.md").read_text(), new, gpu)
        if readme is not None:
            files[ROOT / "README.md"] = readme.encode()
        else:
            print(f"README.md has no {markers(gpu)[0]}: paste the table above where it belongs")
    for path, data in files.items():
        same = path.exists() and path.read_bytes() == data
        done = "unchanged" if same else "would write" if args.dry_run else "wrote"
        print(f"{done}: {path} ({len(data):,} bytes)")
        if not args.dry_run and not same:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archives", type=Path, nargs="+", help="GPU.tar.gz or folders, in the calls' order")
    parser.add_argument("--out", type=Path, help="default: results/GPU")
    parser.add_argument("--dry-run", action="store_true", help="print all, write nothing")
    parser.add_argument("--try", dest="try_folder", type=Path, help="write into this folder alone")
    args = parser.parse_args()
    try:
        digest(args)
    except BadArchive as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
