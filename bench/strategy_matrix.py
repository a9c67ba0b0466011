"""What each shipped strategy does on CPU processes: losses against one process, and a rehearsed peak.

    python bench/strategy_matrix.py --out results/strategies     # about ten minutes on two cores

For each YAML in accel_configs: a run of 8 steps in fp32 on real processes, and one process that plays rank 0
of 8 (`--rehearse 8`) with slm-100m, whose traced peak is compared with the estimate. What can't run says why.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slm_toolkit.api import estimate

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, NUM_RANKS = 8, 8
PROCESSES = {"single": 1, "fsdp_hybrid_shard": 4}
"all others: 2"
BATCH = 8
"sequences of a step, whatever the number of processes"
RUN = ("--model", "slm-1m", "--seq_len", "64", "--numerics", "fp32", "--max_steps", str(NUM_STEPS))
REHEARSED = {"model": "slm-100m", "seq_len": 1024, "per_device_train_batch_size": 4}


def launched(strategy: str, num_processes: int, *flags: str) -> dict[str, Any] | str:
    """The record of a run, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        yaml = str(ROOT / "accel_configs" / f"{strategy}.yaml")
        command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", yaml]
        command += ["--num_processes", str(num_processes), "--main_process_port", "0"]
        command += ["-m", "slm_toolkit.train", *flags, "--output_dir", folder, "--run_name", "run"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        record = Path(folder, "run", "record.json")
        said = done.stderr.strip().splitlines()
        if not record.is_file():
            return next((line for line in said if line.startswith("error: ")), f"exit code {done.returncode}")
        found = json.loads(record.read_text())
        return found if found["status"] == "ok" else found["reason"].splitlines()[0]


def row_of(strategy: str, alone: list[float] | None) -> dict[str, Any]:
    num_processes = PROCESSES.get(strategy, 2)
    batch = ("--per_device_train_batch_size", str(BATCH // num_processes))
    record = launched(strategy, num_processes, *RUN, *batch)
    row: dict[str, Any] = {"strategy": strategy, "num_processes": num_processes}
    if isinstance(record, str):
        row |= {"problem": record}
    else:
        row |= {"losses": record["losses"]}
        if alone is not None:
            row["farthest_loss"] = max(abs(a - b) for a, b in zip(record["losses"], alone, strict=True))
    flags = [word for name, value in REHEARSED.items() for word in (f"--{name}", str(value))]
    rehearsed = launched(strategy, 1, *flags, "--rehearse", str(NUM_RANKS))
    if isinstance(rehearsed, str):
        return {**row, "rehearsal_problem": rehearsed}
    (estimated,) = estimate(strategy=strategy, num_gpus=NUM_RANKS, **REHEARSED)
    traced = rehearsed["peak_allocated_bytes"][0]
    return {**row, "traced_peak_bytes": traced, "predicted_peak_bytes": estimated.peak_allocated_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for matrix.json")
    names = sorted(path.stem for path in (ROOT / "accel_configs").glob("*.yaml"))
    parser.add_argument("--strategy", nargs="+", choices=names, default=names, help="(default: all)")
    args = parser.parse_args()
    file, kept, date = args.out / "matrix.json", [], time.strftime("%Y-%m-%d", time.gmtime())
    if file.exists() and args.strategy != names:
        before = json.loads(file.read_text())
        kept, date = [row for row in before["rows"] if row["strategy"] not in args.strategy], before["date"]
    rows, alone = [], None
    for name in sorted({*args.strategy, "single"}, key=lambda name: (name != "single", name)):
        row = row_of(name, alone)
        alone = alone or row.get("losses")
        rows.append(row)
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"date": date, "steps": NUM_STEPS, "ranks": NUM_RANKS}
    new = [{key: value for key, value in row.items() if key != "losses"} for row in rows]
    rows = {row["strategy"]: row for row in (*kept, *new)}  # others compare their losses with single's
    in_order = [rows[name] for name in sorted(rows, key=lambda name: (name != "single", name))]
    file.write_text(json.dumps({**about, "rows": in_order}, indent=1) + "\n")


if __name__ == "__main__":
    main()
