"""Do one run of another trainer: write its work, start its ranks with `accelerate launch`, write the record.

    python -m slm_toolkit.rivals.launch --trainer trainer --strategy ddp --config_file ddp.yaml \\
        --num_processes 2 --main_process_port 29500 --model slm-10m ...      # then the flags of our run

`slm compare --ours_against` starts it as it starts our runs.
"""

import argparse
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.compare.outcome import as_typed
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import num_cores, this_machine
from slm_toolkit.model.names import find_model, has_weights
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import PROGRESS_FILE, RunRecord, finite, model_facts
from slm_toolkit.rivals.rivals import PROGRAM, RIVALS, WORK_FILE, Facts, Rival
from slm_toolkit.strategy.strategy import find_strategy

SCRIPT = Path(__file__).with_name("training.py")


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trainer", choices=RIVALS, required=True)
    parser.add_argument("--strategy", required=True, help="name of the strategy in --config_file")
    parser.add_argument("--config_file", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--main_process_port", required=True)
    args, flags = parser.parse_known_args()
    rival = RIVALS[args.trainer]
    if rival.missing is not None:
        print(f"error: {rival.missing}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the work is deleted
    with user_errors():
        return _run(args, training_config(flags), rival)


def _run(args: argparse.Namespace, config: RunConfig, rival: Rival) -> int:
    """Do the run, and write its record if it ended ok or out of memory; return its exit code."""
    from slm_toolkit.rivals.work import write_work  # imports torch

    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    run_dir, spec = Path(config.output_dir, config.run_name), find_model(config.model)
    folder = run_dir / "work"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        work = write_work(
            folder,
            config,
            num_processes=args.num_processes,
            progress=run_dir / PROGRESS_FILE,
        )
        exit_code = _launch(args, folder, work)
        written = [folder / f"rank{rank}.json" for rank in range(args.num_processes)]
        ranks = [json.loads(path.read_text()) for path in written if path.exists()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it has a copy of the model
    out_of_memory = next((rank["out_of_memory"] for rank in ranks if "out_of_memory" in rank), None)
    if exit_code != 0 and out_of_memory is None:
        return exit_code
    strategy = dataclasses.replace(find_strategy(args.config_file), name=args.strategy)
    gpu = this_machine().gpu
    facts = Facts.of(config, strategy, args.num_processes, rival, gpu)
    record = RunRecord(
        run_name=config.run_name,
        identity=facts.identity,
        status="oom" if out_of_memory else "ok",
        reason=out_of_memory,
        strategy=rival.name_under(strategy),
        asked=facts.asked,
        model=model_facts(spec),
        versions=facts.versions,
        started_at=started_at,
        command=as_typed([sys.executable, "-m", PROGRAM, *sys.argv[1:]]),
        seconds_total=time.monotonic() - began,
        gpu=gpu,
        num_cores=num_cores(),
        weights=spec.path if has_weights(spec) else f"random, seed {config.seed}",
        attn_implementation=config.attn_implementation,
        timing_warmup_steps=config.timing_warmup_steps,
        tokens_per_step=work["tokens_per_step"],
        **({} if out_of_memory else _observed(ranks)),
    )
    write_record(record, run_dir)
    return exit_code


def _launch(args: argparse.Namespace, folder: Path, work: dict[str, Any]) -> int:
    """Train on the work in `folder` with `accelerate launch`; return its exit code."""
    options = ["--config_file", args.config_file, "--num_processes", str(args.num_processes)]
    options += ["--main_process_port", args.main_process_port]
    # the YAML's mixed_precision would reach Hugging Face's Trainer through the environment
    options += ["--mixed_precision", "no" if work["numerics"] == "fp32" else "bf16"]
    words = [*options, str(SCRIPT), args.trainer, str(folder / WORK_FILE)]
    return subprocess.run([sys.executable, "-m", "accelerate.commands.launch", *words]).returncode


def _observed(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return fields of the record from what each rank wrote."""
    by_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    losses = [finite(sum(of_step) / len(ranks)) for of_step in by_step]
    load = ranks[0]["load"]
    of_others = load["machine"] - sum(rank["load"]["process"] for rank in ranks)
    on_gpu = ranks[0]["peak_allocated_bytes"] is not None
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes") if on_gpu else ()
    return {
        "world_size": ranks[0]["world_size"],
        "num_machines": 1,
        "engine": ranks[0]["engine"],
        "losses": losses,
        "grad_norms": [finite(norm) for norm in ranks[0]["grad_norms"]],
        "step_seconds": [rank["step_seconds"] for rank in ranks],
        "other_busy_cores": max(0.0, of_others / load["elapsed"]),
        "tokens_counted": {"drawn": sum(rank["num_tokens"] for rank in ranks)},
        **{name: [rank[name] for rank in ranks] for name in (*peaks, "peak_rss_bytes")},
    }


if __name__ == "__main__":
    sys.exit(main())
