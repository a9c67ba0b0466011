"""Kill training runs at random moments, go on, and see that nothing was lost.

    python bench/kill_test.py --kills 50 --seed 0

Of each strategy a run of two CPU processes is killed (SIGKILL, of one rank, of all processes or of the
launcher alone; while it starts or resumes, while it trains, or while it saves its model), started again with
--resume_from_checkpoint auto, killed again, ..., until one comes to its end. Then its losses must be, bit by
bit, those of a run that nobody disturbed, and its model whole. After each kill no process may be left, and
every folder called step_<k> must be a whole checkpoint. Checkpoints are written every 2 steps, half of the
runs' while training goes on. Exits with 1 where something was lost.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slm_toolkit.record.saved_files import beside_model, finished, model_damage
from slm_toolkit.run.checkpoint.files import damage, read_manifest

ROOT = Path(__file__).parent.parent
STRATEGIES = ("ddp", "fsdp_full_shard", "ds_zero3")
NUM_STEPS, SAVE_STEPS = 30, 2
ORPHAN_SECONDS = 60
"the launcher ends the others after a rank, by force after 30 s"
MOMENTS = {"starting": 0.3, "training": 0.5, "saving_model": 0.2}
"shares of the kills, by what the run is doing"
START_SECONDS = 3.0
"after the ranks began, in which a launcher is killed while they import torch"
VICTIMS = ("rank", "all", "launcher")


@dataclass
class Count:
    """Of one strategy."""

    kills: int = 0
    starting: int = 0
    training: int = 0
    saving_model: int = 0
    of_launcher: int = 0
    resumes: int = 0
    runs_to_the_end: int = 0
    orphans: int = 0
    half_checkpoints: int = 0
    half_models: int = 0
    other_losses: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Pace:
    """How long a run takes, as far as is known."""

    start_seconds: float = 0.0
    "to its first checkpoint"
    training_seconds: float = 0.0
    "from there to its end"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    counts = {strategy: Count() for strategy in STRATEGIES}
    with tempfile.TemporaryDirectory(prefix="kill-test-") as folder:
        for index, strategy in enumerate(STRATEGIES):
            share = args.kills // len(STRATEGIES) + (index < args.kills % len(STRATEGIES))
            kill_runs(strategy, share, chance, Path(folder) / strategy, counts[strategy])
    if args.json:
        print(json.dumps({strategy: vars(count) for strategy, count in counts.items()}))
    else:
        show(counts)
    raise SystemExit(any(count.problems for count in counts.values()))


def show(counts: dict[str, Count]) -> None:
    titles = [name for name in vars(Count()) if name != "problems"]
    print("strategy".ljust(18) + "".join(title.replace("_", " ").rjust(18) for title in titles))
    for strategy, count in counts.items():
        print(strategy.ljust(18) + "".join(str(getattr(count, title)).rjust(18) for title in titles))
    for strategy, count in counts.items():
        for problem in count.problems:
            print(f"{strategy}: {problem}")


def kill_runs(strategy: str, kills: int, chance: random.Random, folder: Path, count: Count) -> None:
    """Kill runs of one strategy `kills` times, in chains that each end with a run that comes to its end."""
    pace = Pace()
    expected = undisturbed(strategy, folder / "undisturbed", pace)
    number = 0
    while count.kills < kills:
        number += 1
        run = folder / f"chain{number}"
        while not to_the_end(strategy, run, chance, count, pace, may_kill=count.kills < kills):
            pass
        losses = record_of(run)["losses"]
        first = record_of(run)["first_step"]
        count.resumes += first > 0
        if losses != expected[first:]:
            count.other_losses += 1
            count.problems.append(
                f"{run.name}: other losses after step {first}: {losses}, {expected[first:]}"
            )
        if lacks := model_damage(run / "run" / "model"):
            count.half_models += 1
            count.problems.append(f"{run.name}: {lacks}")


def to_the_end(
    strategy: str,
    run: Path,
    chance: random.Random,
    count: Count,
    pace: Pace,
    *,
    may_kill: bool,
) -> bool:
    """Start or go on, and kill it at a random moment; whether it came to its end before."""
    process = start(strategy, run, cold=may_kill)
    if may_kill:
        (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
        victim_is = chance.choice(VICTIMS)
        wait_for(moment, process, run, victim_is, pace, chance)
    if may_kill and process.poll() is None:
        launcher, ranks = psutil.Process(process.pid), ranks_of(run)
        of_one = [chance.choice(ranks or [launcher])]
        for victim in {"rank": of_one, "all": processes_of(run), "launcher": [launcher]}[victim_is]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        count.kills += 1
        setattr(count, moment, getattr(count, moment) + 1)
        count.of_launcher += victim_is == "launcher"
        print(f"{strategy}: kill {count.kills}", file=sys.stderr, flush=True)
    _, err = process.communicate()
    look_around(run, count)
    if process.returncode == 0:
        if may_kill:  # it was faster than we
            pace.training_seconds /= 2
        count.runs_to_the_end += 1
        return True
    if not may_kill:
        raise RuntimeError(f"{strategy}: a run that nobody killed failed: {err[-2000:]}")
    return False


def look_around(run: Path, count: Count) -> None:
    """Nobody may be left, and what is called a checkpoint must be one."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        count.orphans += len(left)
        count.problems.append(f"{run.name}: left over: {[process.pid for process in left]}")
        for process in left:
            process.kill()
    for checkpoint in finished(run / "run" / "checkpoints"):
        try:
            problem = damage(checkpoint, read_manifest(checkpoint).files)
        except ValueError as error:
            problem = str(error)
        if problem:
            count.half_checkpoints += 1
            count.problems.append(f"{run.name}: {problem}")


def undisturbed(strategy: str, folder: Path, pace: Pace) -> list[float]:
    """The losses of a run that nobody kills; how long it took is noted."""
    began = time.monotonic()
    process = start(strategy, folder, cold=False)
    wait_for_training(process, folder)
    trains = time.monotonic()
    _, err = process.communicate()
    pace.start_seconds, pace.training_seconds = trains - began, time.monotonic() - trains
    if process.returncode != 0:
        raise RuntimeError(f"{strategy}: {err[-2000:]}")
    return record_of(folder)["losses"]


def start(strategy: str, folder: Path, *, cold: bool) -> subprocess.Popen:
    """Launch a run. `cold`: as a user's, whose processes import for themselves, even in a test."""
    words = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", str(NUM_STEPS))
    words += ("--save_steps", str(SAVE_STEPS))
    words += ("--output_dir", str(folder), "--run_name", "run", "--resume_from_checkpoint", "auto")
    words += ("--save_final_model", "true")
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--main_process_port", "0"]
    config = ["--config_file", str(ROOT / "accel_configs" / f"{strategy}.yaml")]
    return subprocess.Popen(
        [*launch, *config, "-m", "slm_toolkit.train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({"SLM_WARM_SOCKET": ""} if cold else {})},
    )


def wait_for(
    moment: str,
    process: subprocess.Popen,
    run: Path,
    victim: str,
    pace: Pace,
    chance: random.Random,
) -> None:
    """Until a random time of a moment of a run; returns at once where the run has ended."""
    if moment == "starting" and victim == "launcher":
        while process.poll() is None and not ranks_of(run):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, START_SECONDS))
    elif moment == "starting":
        time.sleep(chance.uniform(0, pace.start_seconds))
    elif moment == "training":
        wait_for_training(process, run)
        time.sleep(chance.uniform(0, pace.training_seconds))
    else:
        unfinished = beside_model(run / "run" / "model", "unfinished")
        while process.poll() is None and not unfinished.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))


def wait_for_training(process: subprocess.Popen, run: Path) -> None:
    """Until its first checkpoint, or the next one, is being written."""
    folder = run / "run" / "checkpoints"
    before = {path.name for path in folder.glob("*")}
    while process.poll() is None and {path.name for path in folder.glob("*")} <= before:
        time.sleep(0.01)


def processes_of(run: Path) -> list[psutil.Process]:
    """Launcher and ranks: those that have the run's folder in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(run) in (process.info["cmdline"] or [])]


def ranks_of(run: Path) -> list[psutil.Process]:
    return [process for process in processes_of(run) if "launch" not in process.info["cmdline"]]


def record_of(run: Path) -> dict:
    return json.loads((run / "run" / "record.json").read_text())


if __name__ == "__main__":
    main()
