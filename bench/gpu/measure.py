"""Everything worth measuring on one GPU, in nine minutes, without a network: the most telling first.

    python bench/gpu/measure.py --out results/h200          # what time left out is named
    python bench/gpu/measure.py --only ladder flash         # some parts
    python bench/gpu/measure.py --smoke                     # on a CPU: tiny, to see that all of it works

gemms: the GPU's ceilings and the price of unaligned widths. ladder: speed of the paper's models and their
aligned siblings, a feature more each time. extras: CUDA graphs and float8 (torchao, if carried). memory:
rehearsed peaks of every strategy against the estimate.
trainer: ours against Hugging Face's Trainer. flash: vanilla attention against FlashAttention by batch.
Records and `measured.json` go to --out; the table is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MODELS = ("slm-100m", "slm-500m", "slm-1b", "slm-2b")
LADDER: dict[str, tuple[str, ...]] = {  # each with all above it, but for the first
    "eager": ("--attn_implementation", "eager"),
    "sdpa": ("--attn_implementation", "sdpa"),
    "fused loss": ("--loss_kernel", "fused_linear"),
    "fused norm": ("--norm_kernel", "fused"),
    "torch_compile": ("--torch_compile",),
}
STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
BATCHES = {"slm-100m": 32, "slm-500m": 16, "slm-1b": 8, "slm-2b": 8}
"of the ladder's runs: large enough to fill a GPU, small enough for eager attention in 80 GB"


@dataclass(frozen=True)
class Run:
    """One process: which part it belongs to, what to call it, and its command line."""

    part: str
    name: str
    command: tuple[str, ...]
    folder: Path | None = None
    "where it leaves a record.json"


def train(part: str, name: str, out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> Run:
    folder = out / part
    command = (*(launcher or (sys.executable, "-m")), "slm_toolkit.train", "--output_dir", str(folder))
    return Run(part, name, (*command, "--run_name", name.replace(" ", "_"), *flags), folder)


def gemms(out: Path, smoke: bool) -> Iterator[Run]:
    yield Run("gemms", "gemms", (sys.executable, str(Path(__file__).parent / "gemms.py")))


def ladder(out: Path, smoke: bool) -> Iterator[Run]:
    """All features on every model and its sibling first: that is the best MFU; then the rungs below."""
    rungs = list(LADDER)
    for rung in reversed(rungs):
        above = [word for name in rungs[1 : rungs.index(rung) + 1] for word in LADDER[name]] or LADDER[rung]
        for model in ("slm-1m",) if smoke else MODELS:
            for sibling in (model, f"{model}-hw") if rung == rungs[-1] and not smoke else (model,):
                batch = BATCHES.get(model, 2)
                yield train("ladder", f"{sibling} {rung}", out, *size(sibling, batch, smoke), *above)


def extras(out: Path, smoke: bool) -> Iterator[Run]:
    """On top of the ladder's best: CUDA graphs where launches bind, float8 where widths allow, cuDNN."""
    best = [word for flags in list(LADDER.values())[1:] for word in flags]
    graphs, fp8 = ("--torch_compile_mode", "reduce-overhead"), ("--fp8", "tensorwise")
    cudnn = ("--attn_implementation", "sdpa_cudnn")
    wanted = [("slm-100m", "CUDA graphs", graphs), ("slm-500m", "CUDA graphs", graphs)]
    wanted += [(f"{model}-hw", "fp8", fp8) for model in MODELS]
    wanted += [("slm-1b", "sdpa_cudnn", cudnn)]
    for model, name, flags in [("slm-1m", "CUDA graphs", graphs)] if smoke else wanted:
        batch = BATCHES.get(model.removesuffix("-hw"), 2)
        yield train("extras", f"{model} {name}", out, *size(model, batch, smoke), *best, *flags)


def memory(out: Path, smoke: bool) -> Iterator[Run]:
    for model in ("slm-1m",) if smoke else ("slm-500m", "slm-2b"):
        for num_ranks in (1, 8, 64):
            for strategy in STRATEGIES[:2] if smoke else STRATEGIES:
                yaml = str(ROOT / "accel_configs" / f"{strategy}.yaml")
                accelerate = (sys.executable, "-m", "accelerate.commands.launch")
                launcher = (*accelerate, "--num_processes", "1", "--config_file", yaml, "-m")
                rehearsed = (*size(model, 4, smoke), "--rehearse", str(num_ranks))
                name = f"{model} {strategy} {num_ranks}"
                yield train("memory", name, out, *rehearsed, launcher=launcher)


def trainer(out: Path, smoke: bool) -> Iterator[Run]:
    for model in ("slm-1m",) if smoke else MODELS:
        shape = ("--seq_len", "64", "--batch_size", "2") if smoke else ("--batch_size", str(BATCHES[model]))
        arms = ("trainer",) if smoke else ("trainer_compile", "trainer_compile_liger")
        command = (sys.executable, str(ROOT / "bench/throughput.py"), "--models", model, *shape)
        turns = ("--arms", *arms, "ours_compile", "--rounds", "1", "--steps", "10")
        yield Run("trainer", model, (*command, *turns, "--out", str(out / f"trainer-{model}.json")))


def flash(out: Path, smoke: bool) -> Iterator[Run]:
    for model in ("slm-1m",) if smoke else MODELS:
        for batch in (2,) if smoke else (4, 8, 16, 32, 64):
            for kernel in ("eager", "sdpa_flash"):
                name = f"{model} batch {batch} {kernel}"
                yield train("flash", name, out, *size(model, batch, smoke), "--attn_implementation", kernel)


def size(model: str, batch: int, smoke: bool) -> tuple[str, ...]:
    shape = ("--seq_len", "64", "--max_steps", "4") if smoke else ("--seq_len", "1024", "--max_steps", "14")
    return ("--model", model, "--per_device_train_batch_size", str(batch), *shape)


PARTS = {
    "gemms": gemms,
    "ladder": ladder,
    "memory": memory,
    "trainer": trainer,
    "extras": extras,
    "flash": flash,
}


def execute(run: Run, seconds_left: float) -> dict[str, Any]:
    """The run's result: its last line of JSON, or what its record says."""
    began = time.time()
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8", **os.environ}
    try:
        done = subprocess.run(run.command, capture_output=True, text=True, env=env, timeout=seconds_left)
    except subprocess.TimeoutExpired:
        return {"part": run.part, "name": run.name, "status": "no time"}
    found: dict[str, Any] = {"part": run.part, "name": run.name, "seconds": round(time.time() - began, 1)}
    if run.folder is not None:
        return {**found, **from_record(run.folder / run.name.replace(" ", "_") / "record.json", done.stderr)}
    if done.returncode != 0:
        return {**found, "status": "failed", "reason": done.stderr[-400:]}
    last = done.stdout.strip().splitlines()[-1]
    told = json.loads(last) if last.startswith("{") else {"printed": done.stdout}
    return {**found, "status": "ok", **told}


def from_record(path: Path, stderr: str) -> dict[str, Any]:
    """A record as the report reads it, with its estimate beside it."""
    if not path.is_file():
        return {"status": "failed", "reason": stderr[-400:]}
    report = (sys.executable, "-m", "slm_toolkit.cli", "report", str(path.parent), "--json")
    told = subprocess.run(report, capture_output=True, text=True)
    (row,) = json.loads(told.stdout)
    keys = ("status", "reason", "tokens_per_second", "mfu", "peak_allocated_bytes", "peak_reserved_bytes")
    return {name: row[name] for name in (*keys, "estimated_peak_bytes") if name in row}


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'run':44} {'status':8} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9} {'estimate':>9}"]
    for found in results:
        if found["part"] == "gemms" and "gemms" in found:
            lines += [
                f"  width {row['width']}: "
                + "  ".join(f"{name} {row[f'{name}_tflops']:.0f}" for name in ("forward", "dgrad", "wgrad"))
                for row in found["gemms"]
            ]
            copy = found["copy_bytes_per_second"] / 1e12
            lines.append(f"  TFLOP/s; matmul {found['matmul_tflops']:.0f} TFLOP/s, copy {copy:.2f} TB/s")
            continue
        speed, share = found.get("tokens_per_second"), found.get("mfu")
        peak, estimate = found.get("peak_allocated_bytes"), found.get("estimated_peak_bytes")
        cells = [
            f"{found['part'] + ' ' + found['name']:44}",
            f"{found['status']:8}",
            f"{speed:10,.0f}" if speed else f"{'-':>10}",
            f"{share:6.1%}" if share else f"{'-':>6}",
            f"{peak / 2**30:9.2f}" if peak else f"{'-':>9}",
            f"{estimate / 2**30:9.2f}" if estimate else f"{'-':>9}",
        ]
        lines.append(" ".join(cells) + ("\n" + found["printed"] if "printed" in found else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    deadline = time.time() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for run in (run for part in args.only for run in PARTS[part](args.out.resolve(), args.smoke)):
        left = deadline - time.time()
        if left < 10:
            results.append({"part": run.part, "name": run.name, "status": "no time"})
            continue
        results.append(execute(run, left))
        print(f"{run.part} {run.name}: {results[-1]['status']}, {left:.0f} s were left", file=sys.stderr)
        about = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d", time.gmtime())}
        (args.out / "measured.json").write_text(json.dumps({**about, "runs": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
