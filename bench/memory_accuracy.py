"""How far `slm estimate`'s peak memory is from traces of the real engines, over a seeded grid.

    python bench/memory_accuracy.py    # reads results/memory/*.csv, which bench/memory_traces.py wrote

The development half was looked at while the formulas were made, the held-out half only when ZeRO's were
made simpler (2026-11-28). Tracer (`run/observe/allocations.py`) and estimator (`predict/`) share no code.
Peaks are of allocated bytes on rank 0. Where a half was traced while rehearsals replayed their allocations
(until 2026-11-28), reserved bytes are compared, too, with what a model of PyTorch's allocator reserved.
"""

import argparse
import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

from slm_toolkit.config.run_config import RunConfig, in_todays_names
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.machine import allocator_slack
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

FOLDER = Path(__file__).parent.parent / "results" / "memory"
MODELS = Path(__file__).parent / "data" / "models"
"small models that are no presets: a folder with config.json each"
HALVES = (
    *("development", "held_out", "fresh", "adapters", "adapters_held_out"),
    *("adapters_today", "adapters_today_held_out"),
    *("today", "today_held_out"),
    "optimizers",
)
"those that docs/accuracy.md shows"
READ = (
    *("development", "adapters", "adapters_today", "small_zero", "today"),
    "optimizers",
)
"those whose worst rows may be looked at"
_NUMBERS = ("per_device_train_batch_size", "seq_len", "gradient_accumulation_steps", "lora_r")
_FRACTIONS = ("lora_dropout",)
FOUND = ("status", "reason", "peak_bytes", "reserved_bytes", "peak_phase", "peak_module", "parts")
_NOT_FLAGS = ("strategy", "num_gpus", *FOUND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--worst", type=int, default=5, help="rows of the development half to list (default: 5)"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--halves", nargs="+", default=HALVES, help="files to read, without .csv")
    args = parser.parse_args()
    for half in args.halves:
        rows = traces(args.folder / f"{half}.csv")
        about = json.loads((args.folder / f"{half}.json").read_text())
        print(f"{half}: {summary([error for error, _ in rows])}; traced {about['date']}: {about['command']}")
        for strategy in sorted({row["strategy"] for _, row in rows}):
            print(f"  {strategy:20} {summary([e for e, row in rows if row['strategy'] == strategy])}")
        if replayed := [reserved_error(row) for _, row in rows if row.get("reserved_bytes")]:
            print(f"  reserved, against replays: {summary(replayed)}")
        if half in READ:
            for error, row in sorted(rows, key=lambda found: -abs(found[0]))[: args.worst]:
                asked = " ".join(str(row[name]) for name in row if name not in _NOT_FLAGS[2:])
                print(f"    {error:+.2%}  {asked}, traced at {row['peak_phase']} {row['peak_module']}")


def traces(path: Path) -> list[tuple[float, dict[str, Any]]]:
    """Each traced configuration, with the estimate's error as a fraction of the trace."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    return [(estimate_of(row).peak_bytes / int(row["peak_bytes"]) - 1, row) for row in rows]


def estimate_of(row: dict[str, Any]) -> MemoryEstimate:
    """What the estimator says of a traced configuration."""
    return peak(setup_of(row))


def reserved_error(row: dict[str, Any]) -> float:
    """The error of the estimated reserved bytes, as a fraction of the replayed ones."""
    setup = setup_of(row)
    memory = peak(setup)
    slack = allocator_slack(setup, memory, allocated=memory.peak_bytes)
    return (memory.peak_bytes + slack) / int(row["reserved_bytes"]) - 1


def setup_of(row: dict[str, Any]) -> Setup:
    spec, strategy = find_model(model_named(row["model"])), find_strategy(row["strategy"])
    return Setup(spec, strategy, config_of(row), num_gpus=int(row["num_gpus"]))


def config_of(row: dict[str, Any]) -> RunConfig:
    """The flags of a traced configuration; an empty one was not given."""
    kinds = {**dict.fromkeys(_NUMBERS, int), **dict.fromkeys(_FRACTIONS, float)}
    flags = {
        name: kinds.get(name, str)(value)
        for name, value in row.items()
        if name not in _NOT_FLAGS and value not in ("", None)
    }
    return RunConfig(**in_todays_names(flags)).with_defaults(has_gpu=True)


def model_named(name: str) -> str:
    """What `--model` takes: a preset, or the folder of a small model that is none."""
    folder = MODELS / name
    return str(folder) if folder.is_dir() else name


def summary(errors: list[float]) -> str:
    number, middle, worst = figures(errors)
    return f"{number} configurations, median error {middle}, worst {worst}"


def figures(errors: list[float]) -> tuple[str, str, str]:
    """Number, median and worst."""
    sizes = sorted(abs(error) for error in errors)
    return str(len(sizes)), f"{median(sizes):.3%}", f"{sizes[-1]:.2%}"


if __name__ == "__main__":
    main()
