"""Is a user's loop, recorded from outside, as fast as our trainer on the same training?

    python bench/same_work.py --rounds 6

Both train slm-1m under DDP on two ranks, with the same weights, batches and learning rates; the launches
alternate. Printed: the largest difference of their losses, and the interval of the ratio of their rates.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rivals.work import write_work

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.report.stats import MIN_ROUNDS, paired_lead

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "same_work.py"
SLM = Path(sys.executable).with_name("slm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help=f"at least {MIN_ROUNDS}")
    parser.add_argument("--steps", type=int, default=63, metavar="N", help="of each launch")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds must be at least {MIN_ROUNDS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RunConfig(
            model="slm-1m", seq_len=128, max_steps=args.steps, numerics="fp32", max_grad_norm=1.0
        )
        write_work(folder / "work", config, num_processes=2)
        flags = (
            f"--model {config.model} --seq_len 128 --max_steps {args.steps} --numerics fp32 --max_grad_norm 1"
        )
        words = {
            "our trainer": flags.split(),
            "user's loop": ["--script", str(SCRIPT), "--", "--work", str(folder / "work" / "work.json")],
        }
        rows = []
        for number in range(args.rounds):
            order = sorted(words, reverse=number % 2 == 1)
            rows.append({who: launched(folder / f"{number}-{who}", words[who]) for who in order})
    ours, theirs = ([row[who] for row in rows] for who in words)
    pairs = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    print(f"largest difference of {args.steps} losses: {max(abs(a - b) for a, b in pairs):.1e}")
    for who, launches in zip(words, (ours, theirs), strict=True):
        rates = sorted(row["tokens_per_second"] for row in launches)
        print(f"{who}: {rates[0]:,.0f} to {rates[-1]:,.0f} tokens/s in {args.rounds} launches")
    rates = [dict(enumerate(row["tokens_per_second"] for row in launches)) for launches in (theirs, ours)]
    low, high = paired_lead(*rates)
    print(f"the user's loop runs at {low:.1%} to {high:.1%} of our trainer's rate (99 % interval)")


def launched(folder: Path, words: list[str]) -> dict:
    command = [SLM, "compare", "--strategy", "ddp", "--num_processes", "2", "--json"]
    command += ["--output_dir", str(folder), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (row,) = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
