"""How long `slm report` takes on 10,000 records, in all and by part, on one core.

python bench/report_speed.py [--num_records 10000] [--launches 3] [--profile]

The records are made in a temporary folder from those under results/cpu: models x GPUs x ranks x sequence
lengths x batches x strategies, each launched `--launches` times. As a whole process, `slm report FOLDER` with
its output in a pipe; the split is of a second, warm one, in this process.
"""

import argparse
import contextlib
import cProfile
import dataclasses
import io
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODELS = ("slm-100m", "slm-500m", "slm-1b", "slm-2b")
GPUS = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", None)
RANKS = (2, 4)
SEQ_LENS = (512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32)
PARTS = {  # what `slm report` does, by the functions that do it
    "find and read": ("slm_toolkit.record.files", "find_records"),
    "parity": ("slm_toolkit.report.rows", "judge"),
    "rows, with estimates": ("slm_toolkit.report.rows", "row_of"),
    "of those, estimates": ("slm_toolkit.report.rows", "estimate_of"),
    "of those, statistics": ("slm_toolkit.report.rows", "throughput"),
    "ranking": ("slm_toolkit.report.rows", "ranked"),
    "table": ("slm_toolkit.report.tables.comparison", "comparison_table"),
}


def made_records(launches: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Folder and content, in the order of a grid; seconds and losses differ from launch to launch."""
    from slm_toolkit.model.model_spec import PRESETS

    chance = random.Random(0)
    templates = [json.loads(path.read_text()) for path in sorted(ROOT.glob("results/cpu/*/record.json"))]
    for number, cell in enumerate(product(MODELS, GPUS, RANKS, SEQ_LENS, BATCHES, templates)):
        model, gpu, ranks, seq_len, batch, template = cell
        spec = PRESETS[model]
        flags = {"model": model, "seq_len": seq_len, "per_device_train_batch_size": batch}
        config = {**template["asked"]["config"], **flags}
        tokens = ranks * batch * seq_len
        num_steps = len(template["losses"])
        for launch in range(launches):
            scale = chance.uniform(0.98, 1.02) * tokens / template["tokens_per_step"]
            yield (
                f"{number:05}-{launch}",
                {
                    **template,
                    "run_name": f"{model}-{template['strategy']}-{number:012x}",
                    "identity": f"{number:012x}",
                    "asked": {**template["asked"], "config": config, "num_processes": ranks},
                    "model": {**dataclasses.asdict(spec), "num_params": spec.num_params},
                    "gpu": gpu,
                    "world_size": ranks,
                    "tokens_per_step": tokens,
                    "tokens_counted": dict.fromkeys(("drawn", "in_loss"), tokens * num_steps),
                    "numerics": {**template["numerics"], "tokens_per_step": tokens},
                    "losses": [loss * chance.uniform(0.9999, 1.0001) for loss in template["losses"]],
                    "step_seconds": [
                        [
                            second * scale * chance.uniform(0.97, 1.03)
                            for second in template["step_seconds"][0]
                        ]
                        for _ in range(ranks)
                    ],
                    "phase_seconds": template["phase_seconds"][:1] * ranks,
                    "state_bytes": template["state_bytes"][:1] * ranks,
                    "peak_allocated_bytes": [2**33] * ranks if gpu else None,
                },
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_records", type=int, default=10_000)
    parser.add_argument("--launches", type=int, default=3, help="of each configuration")
    parser.add_argument("--profile", action="store_true", help="print cProfile's thirty largest, too")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        num_bytes = 0
        for folder, content in islice(made_records(args.launches), args.num_records):
            path = Path(name, folder, "record.json")
            path.parent.mkdir()
            num_bytes += path.write_text(json.dumps(content) + "\n")
        print(f"{args.num_records:,} records of {num_bytes / args.num_records / 1e3:.1f} kB, one core")
        used = 0.0
        for words in ((), ("--json",)):
            command = [sys.executable, "-m", "slm_toolkit.cli.main", "report", name, *words]
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            of_cpu = now.ru_utime + now.ru_stime - used
            used += of_cpu
            lines = len(done.stdout.splitlines())
            shown = " ".join(("slm report FOLDER", *words))
            ended = f"exit {done.returncode}, {lines:,} lines"
            print(f"{shown:25} {seconds:6.2f} s ({of_cpu:.2f} s of CPU), {ended}")
        print_split(name, profile=args.profile)


def print_split(folder: str, *, profile: bool) -> None:
    import importlib

    from slm_toolkit.cli.main import main as slm

    spent = dict.fromkeys(PARTS, 0.0)
    for part, (module_name, function_name) in PARTS.items():
        module = importlib.import_module(module_name)
        setattr(module, function_name, timed(getattr(module, function_name), spent, part))
    profiler = cProfile.Profile() if profile else contextlib.nullcontext()
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit), profiler:
        slm(["report", folder])
    print(f"in this process {time.perf_counter() - began:.2f} s:")
    for part, seconds in spent.items():
        print(f"  {part:22} {seconds:6.2f} s")
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def timed(function: Any, spent: dict[str, float], part: str) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[part] += time.perf_counter() - began

    return wrapper


if __name__ == "__main__":
    main()
