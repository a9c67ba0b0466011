"""Train for some minutes and see that no rank's memory grows with its steps.

    python bench/soak.py --minutes 15
    python bench/soak.py --minutes 2 --strategy single

slm-1m on two CPU processes (or the strategy's own number), evaluated and saved every 50 steps, so that all
parts have worked once in the first tenth of half a minute. Resident memory is read from /proc once a second.
What is compared are the medians of the second and of the last tenth of the time: the first has imports,
compiling and the first steps. Exits with 1 where a rank has grown by more than --limit_mib.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--limit_mib", type=float, default=2.0, help="that a rank may grow")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        samples, step = soak(args.strategy, Path(folder), args.minutes * 60)
    tenth = max(1, len(samples) // 10)
    grown_mib = []
    for rank, of_rank in enumerate(zip(*samples, strict=True)):
        start, end = (
            statistics.median(part) / 2**20 for part in (of_rank[tenth : 2 * tenth], of_rank[-tenth:])
        )
        grown_mib.append(end - start)
        print(f"rank {rank}: {start:.1f} MiB at the start, {end:.1f} MiB at the end: {end - start:+.2f} MiB")
    print(f"{args.strategy}: {step:,} steps in {args.minutes:g} minutes")
    raise SystemExit(max(grown_mib) > args.limit_mib)


def soak(strategy: str, folder: Path, seconds: float) -> tuple[list[list[int]], int]:
    """Resident bytes of every rank, once a second from the first step on, and the last step known."""
    process = start(strategy, folder)
    try:
        progress = folder / "run" / "progress.json"
        while not progress.exists():
            time.sleep(0.2)
            if process.poll() is not None:
                raise RuntimeError(
                    f"the run ended before its first step: see stderr, code {process.returncode}"
                )
        ranks = [each for each in [psutil.Process(process.pid), *children(process)] if is_rank(each)]
        samples, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            samples.append([rank.memory_info().rss for rank in ranks])
            time.sleep(1)
        return samples, json.loads(progress.read_text())["step"]
    finally:
        for each in [*children(process), process]:
            each.kill()
        process.wait()


def start(strategy: str, folder: Path) -> subprocess.Popen:
    words = ("--model", "slm-1m", "--seq_len", "32", "--per_device_train_batch_size", "1")
    words += ("--max_steps", "100000000", "--save_steps", "50", "--eval_steps", "50", "--eval_batches", "1")
    words += ("--output_dir", str(folder), "--run_name", "run")
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--main_process_port", "0"]
    config = ["--config_file", str(ROOT / "accel_configs" / f"{strategy}.yaml")]
    return subprocess.Popen(
        [*launch, *config, "-m", "slm_toolkit.train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def children(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def is_rank(process: psutil.Process) -> bool:
    words = process.cmdline()
    return "slm_toolkit.train" in words and "launch" not in words and "accelerate" not in " ".join(words[:3])


if __name__ == "__main__":
    main()
