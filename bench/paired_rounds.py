"""How often paired rounds find a slow-down of 5 %, and how often they find one that is not there.

    python bench/paired_rounds.py --take_turns --max_steps 123   # 35 minutes on two cores
    python bench/paired_rounds.py

Runs `slm compare --repeats` on copies of one run that differ only in their seed. The last copy's training
steps are made 5 % longer. Each five rounds that follow each other are one comparison of every two copies:
20 rounds give 20 comparisons with the slow copy, and 40 without, which share copies.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median, stdev

from slm_toolkit.record.files import find_records
from slm_toolkit.report.rows import rows_of
from slm_toolkit.report.stats import MOST_ROUNDS, paired_lead, rounds_to_find

COPIES = 6
ROUNDS = 5
SLOW_DOWN = """
import importlib.util, sys, time

def longer(step):
    from contextlib import contextmanager

    @contextmanager
    def slowed(clock):
        with step(clock):
            began = time.perf_counter()
            yield
            time.sleep((time.perf_counter() - began) * 0.05)
    return slowed

class Patch:
    def find_spec(self, name, path, target=None):
        if name == "slm_toolkit.run.observe.watch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_slow_down(module):
                load(module)
                module.StepClock.step = longer(module.StepClock.step)

            spec.loader.exec_module = load_and_slow_down
            return spec

words = sys.orig_argv
if "--seed" in words and words[words.index("--seed") + 1] == "{seed}":
    sys.meta_path.insert(0, Patch())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--model", default="slm-1m")
    parser.add_argument("--max_steps", type=int, metavar="N", help="default: as slm compare")
    parser.add_argument("--take_turns", action="store_true")
    args = parser.parse_args()
    if args.rounds < ROUNDS:
        parser.error(f"--rounds must be at least {ROUNDS}")
    with tempfile.TemporaryDirectory() as name:
        rates = rates_by_seed(args, Path(name))
    windows = [range(first, first + ROUNDS) for first in range(1, args.rounds - ROUNDS + 2, ROUNDS)]
    leads = {
        pair: [lead(rates, pair, window) for window in windows] for pair in combinations(range(COPIES), 2)
    }
    slowed = [found for pair, of_pair in leads.items() if pair[1] == COPIES - 1 for found in of_pair]
    equal = [found for pair, of_pair in leads.items() if pair[1] != COPIES - 1 for found in of_pair]
    ratios = [rates[0][number] / rates[COPIES - 1][number] - 1 for number in rates[0]]
    how = " taking turns" * args.take_turns
    print(f"{args.rounds} rounds of {COPIES} copies of {args.model} under ddp{how}, {ROUNDS} a comparison")
    print(f"slow-down as measured, mean over all rounds: {sum(ratios) / len(ratios):.1%}")
    print(f"found where there is one: {sum(low > 1 for low, _ in slowed)} of {len(slowed)}")
    print(f"found where there is none: {sum(low > 1 or high < 1 for low, high in equal)} of {len(equal)}")
    halves = sorted((high - low) / 2 for low, high in (*slowed, *equal))
    print(f"half width of the intervals: median {halves[len(halves) // 2]:.1%}, largest {halves[-1]:.1%}")
    pairs = [pair for pair in leads if pair[1] != COPIES - 1]
    logs = [[log(rates[a][number] / rates[b][number]) for number in rates[a]] for a, b in pairs]
    print(f"equal launches of one round differ by (standard deviation): {median(map(stdev, logs)):.1%}")
    needed = sorted(rounds_to_find(0.05, rates[a], rates[b]) for a, b in pairs)
    shown = [f"over {MOST_ROUNDS}" if count > MOST_ROUNDS else str(count) for count in needed]
    print(f"rounds that find 5 % on this machine: median {shown[len(shown) // 2]}, largest {shown[-1]}")


def rates_by_seed(args: argparse.Namespace, folder: Path) -> dict[int, dict[int, float]]:
    """Return each copy's rate in each round."""
    (folder / "sitecustomize.py").write_text(SLOW_DOWN.replace("{seed}", str(COPIES - 1)))
    command = [str(Path(sys.executable).with_name("slm")), "compare", "--model", args.model]
    command += ["--strategy", "ddp", "--seed", *map(str, range(COPIES)), "--repeats", str(args.rounds)]
    command += ["--output_dir", str(folder / "runs"), *["--take_turns"] * args.take_turns]
    if args.max_steps is not None:
        command += ["--max_steps", str(args.max_steps)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = rows_of(find_records([folder / "runs"])[0])
    return {row.seed: row.tokens_per_second_by_round for row in rows}


def lead(rates: dict[int, dict[int, float]], pair: tuple[int, int], window: range) -> tuple[float, float]:
    """Return the interval of the first copy's rate relative to the second's, over some rounds."""
    first, second = ({number: rates[seed][number] for number in window} for seed in pair)
    return paired_lead(first, second)


if __name__ == "__main__":
    main()
