"""What checkpoints and failures cost: the shares of wall time of runs that are killed and resumed.

    python bench/goodput.py                               # two intervals, without kills and with 120 per hour
    python bench/goodput.py --save_steps 20 100 --kills_per_hour 0 60 --max_steps 2000
    python bench/goodput.py --strategy ds_zero3 --async_save

Each run is an `accelerate launch` of two CPU processes. At random moments one rank is killed by SIGKILL (the
launcher, if no rank has started); once all processes have ended, the run is launched again with
--resume_from_checkpoint auto, until it reaches its last step. Kills are a Poisson process: the time until
the next one is exponential with a mean of 3600 s / kills per hour. Wall time is measured here, from the first
launch to the end of the last, and split by the record's notes (`slm_toolkit/record/goodput.py` defines
goodput). The rest is starting: launchers, imports, and the seconds until a kill has ended all ranks.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from kill_test import ranks_of, record_of
from rich.console import Console
from rich.table import Table

from slm_toolkit.record.files import read_record
from slm_toolkit.record.goodput import time_shares
from slm_toolkit.strategy.strategy import find_strategy


@dataclass(frozen=True)
class Measured:
    """One run, from its first launch to its last step. Seconds are wall time."""

    save_steps: int
    kills_per_hour: float
    num_kills: int
    wall_seconds: float
    steps_kept: float
    steps_done_again: float
    saving: float
    other: float

    @property
    def starting(self) -> float:
        return self.wall_seconds - self.steps_kept - self.steps_done_again - self.saving - self.other

    @property
    def checkpoint_overhead(self) -> float:
        return self.saving / (self.steps_kept + self.steps_done_again)


def start(folder: Path, save_steps: int, args: argparse.Namespace) -> subprocess.Popen:
    yaml = find_strategy(args.strategy).path
    words = ("--model", args.model, "--seq_len", str(args.seq_len), "--max_steps", str(args.max_steps))
    words += ("--save_steps", str(save_steps), "--async_save", str(args.async_save).lower())
    words += ("--save_final_model", "false", "--resume_from_checkpoint", "auto")
    words += ("--output_dir", str(folder), "--run_name", "run")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(yaml)]
    launch += ["--num_processes", "2", "--main_process_port", "0", "-m", "slm_toolkit.train", *words]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(launch, stdout=log, stderr=log)


def killed(process: subprocess.Popen, folder: Path, after_seconds: float, chance: random.Random) -> bool:
    """Wait for the run to end, but kill one of its processes after that time; True if the kill ended it."""
    try:
        process.wait(after_seconds)
    except subprocess.TimeoutExpired:
        victim = chance.choice(ranks_of(folder) or [psutil.Process(process.pid)])
        with suppress(psutil.NoSuchProcess):
            victim.kill()
        process.wait()
        while ranks_of(folder):  # the launcher may be gone before its ranks
            time.sleep(0.1)
        return process.returncode != 0
    return False


def measure(folder: Path, save_steps: int, kills_per_hour: float, args: argparse.Namespace) -> Measured:
    """Launch a run until it reaches its last step. Raises RuntimeError if it fails without a kill."""
    chance = random.Random(args.seed)
    num_kills, began = 0, time.monotonic()
    while True:
        process = start(folder, save_steps, args)
        wait_seconds = chance.expovariate(kills_per_hour / 3600) if kills_per_hour else 10**6
        if not killed(process, folder, wait_seconds, chance):
            break
        num_kills += 1
        print(f"kill {num_kills} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    wall_seconds = time.monotonic() - began
    if process.returncode != 0:
        raise RuntimeError((folder / "log.txt").read_text()[-2000:])
    times = time_shares(read_record(folder / "run" / "record.json").launches)
    assert record_of(folder)["first_step"] + len(record_of(folder)["losses"]) == args.max_steps
    return Measured(
        save_steps=save_steps,
        kills_per_hour=kills_per_hour,
        num_kills=num_kills,
        wall_seconds=wall_seconds,
        steps_kept=times.kept_seconds,
        steps_done_again=times.lost_seconds,
        saving=times.saving_seconds,
        other=times.other_seconds,
    )


def table_of(rows: list[Measured], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("save every", "kills per hour", "kills", "wall seconds", "goodput: steps kept"):
        table.add_column(name, justify="right")
    for name in ("steps done again", "saving", "starting", "other", "checkpoint overhead"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = (row.steps_kept, row.steps_done_again, row.saving, row.starting, row.other)
        table.add_row(
            *(f"{row.save_steps} steps", f"{row.kills_per_hour:g}", str(row.num_kills)),
            f"{row.wall_seconds:,.0f}",
            *(f"{part / row.wall_seconds:.1%}" for part in parts),
            f"{row.checkpoint_overhead:.1%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save_steps", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--kills_per_hour", type=float, nargs="+", default=[0, 120])
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--model", default="slm-1m")
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--max_steps", type=int, default=600)
    parser.add_argument("--async_save", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="goodput-") as scratch:
        for save_steps in args.save_steps:
            for kills_per_hour in args.kills_per_hour:
                folder = Path(scratch) / f"{save_steps}-{kills_per_hour:g}"
                rows.append(measure(folder, save_steps, kills_per_hour, args))
    title = (
        f"{args.strategy}, {args.model}, sequence {args.seq_len}, {args.max_steps} steps, two CPU processes"
    )
    title += ", --async_save" if args.async_save else ""
    Console(width=150).print(table_of(rows, title))


if __name__ == "__main__":
    main()
