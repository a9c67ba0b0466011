"""Rehearse the configurations of a table on fake tensors again; `bench/memory_accuracy.py` reads the traces.

    python bench/memory_traces.py --half development    # some 10 minutes on two cores

A new table is a CSV in results/memory: the columns of one that is there, up to the flags. Seeds drew the
shipped ones (`git show 99ffb6c:bench/memory_traces.py`). Each configuration is a real run of
`slm_toolkit.train --rehearse N` in a process of its own, forked from one that has imported everything, with
the environment that `accelerate launch` would set.
"""

import argparse
import contextlib
import csv
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memory_accuracy import FOLDER, FOUND, model_named

from slm_toolkit.config.run_config import in_todays_names
from slm_toolkit.record.run_record import RECORD_FILE, installed_versions
from slm_toolkit.strategy.strategy import find_strategy

_TAKE_SECONDS_TO_IMPORT = (
    *("slm_toolkit.train", "deepspeed", "deepspeed.runtime.zero.stage3", "torch.distributed.fsdp"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
    *("accelerate.commands.launch", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "peft.tuners.lora",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", required=True, help="file of results/memory, without .csv")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    path = FOLDER / f"{args.half}.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    asked = [{key: row[key] for key in row if key not in FOUND} for row in rows]
    for module in _TAKE_SECONDS_TO_IMPORT:
        importlib.import_module(module)
    started = time.time()
    context = multiprocessing.get_context("fork")
    with path.open("w", newline="") as file, context.Pool(args.processes, maxtasksperchild=1) as pool:
        writer = csv.DictWriter(file, dict.fromkeys((*rows[0], *FOUND)))
        writer.writeheader()
        for done, row in enumerate(pool.imap_unordered(trace, asked), start=1):
            writer.writerow(row)
            file.flush()
            print(f"{done}/{len(asked)} {row['status']} {row['reason'] or ''}", file=sys.stderr)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "seconds": round(time.time() - started),
        "versions": installed_versions(),
    }
    path.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")


def trace(configuration: dict[str, Any]) -> dict[str, Any]:
    """One rehearsal, as a row: what was asked, status, peak, where it was, and the parts there."""
    from slm_toolkit import train

    strategy = find_strategy(configuration["strategy"])
    variables = launch_environment(["--config_file", strategy.path, "--num_processes", "1", "script.py"])
    keep = ("ACCELERATE_", "FSDP_")
    os.environ.update({name: value for name, value in variables.items() if name.startswith(keep)})
    os.environ["OMP_NUM_THREADS"] = "1"
    of_launch = ("strategy", "num_gpus")
    given = {name: value for name, value in configuration.items() if name not in of_launch and value != ""}
    flags = {**in_todays_names(given), "model": model_named(configuration["model"])}
    with tempfile.TemporaryDirectory() as folder:
        argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        argv += ["--rehearse", str(configuration["num_gpus"]), "--output_dir", folder, "--run_name", "r"]
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
            contextlib.suppress(Exception, SystemExit),  # the record says why
        ):
            train.main(argv)
        path = Path(folder, "r", RECORD_FILE)
        record = json.loads(path.read_text()) if path.is_file() else {"status": "failed", "reason": "refused"}
    at_peak = record.get("memory_at_peak") or {}
    return {
        **configuration,
        "status": record["status"],
        "reason": record["reason"],
        "peak_bytes": at_peak.get("num_bytes"),
        "reserved_bytes": (record.get("peak_reserved_bytes") or [None])[0],
        "peak_phase": at_peak.get("phase"),
        "peak_module": at_peak.get("module"),
        "parts": json.dumps(at_peak.get("parts")),
    }


def launch_environment(words: list[str]) -> dict[str, str]:
    """The variables that `accelerate launch WORDS` sets for its processes."""
    from accelerate.commands import launch as accelerate_launch

    args = accelerate_launch.launch_command_parser().parse_args(words)
    args, defaults, _ = accelerate_launch._validate_launch_command(args)
    if args.use_deepspeed:
        fields = [] if defaults is None else list(defaults.deepspeed_config)
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, variables = accelerate_launch.prepare_deepspeed_cmd_env(args)
    elif args.multi_gpu or args.use_fsdp:
        variables = accelerate_launch.prepare_multi_gpu_env(args)
    else:
        _, variables = accelerate_launch.prepare_simple_launcher_cmd_env(args)
    return {name: str(value) for name, value in variables.items()}


if __name__ == "__main__":
    main()
