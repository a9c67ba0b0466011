"""How far launches of one run differ here, and what `--baseline` makes of that and of a slow-down put in.

    python bench/baseline_noise.py --launches 6 --strategy ddp ds_zero2

Launches each strategy 3 N times for real: N as it is, N with every training step made a quarter longer, which
is 20 % fewer tokens per second, and N while another program keeps one core busy. Then every launch is held
against every other as if it were the baseline.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import permutations, product
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import row_of
from slm_toolkit.report.stats import throughput
from slm_toolkit.report.tables.baseline import changes

SLOW_DOWN = """
import importlib.abc, importlib.util, sys, time

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "slm_toolkit.run.observe.watch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_slow_down(module):
            from contextlib import contextmanager
            load(module)
            step = module.StepClock.step

            @contextmanager
            def longer(clock):
                with step(clock):
                    began = time.perf_counter()
                    yield
                    time.sleep((time.perf_counter() - began) / 4)

            module.StepClock.step = longer

        spec.loader.exec_module = load_and_slow_down
        return spec

if "LOCAL_RANK" in __import__("os").environ:
    sys.meta_path.insert(0, Patch())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--launches", type=int, default=6, metavar="N")
    parser.add_argument("--strategy", nargs="+", default=["ddp", "ds_zero2"])
    parser.add_argument("--model", default="slm-10m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(SLOW_DOWN)
        as_is = launches(args, folder / "as_is", {})
        slowed = launches(args, folder / "slowed", {"PYTHONPATH": name})
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            disturbed = launches(args, folder / "disturbed", {})
        finally:
            other.kill()
    table = Table(
        *("strategy", "largest deviation\nfrom the median", "same build:\ntie", "20 % slower:\nfound"),
        *("median rate\nslowed / as it is", "a core taken:\ntie", "median rate\ndisturbed / as it is"),
    )
    for strategy in args.strategy:
        rates = [throughput([record]).tokens_per_second for record in as_is[strategy]]
        slow_rates = [throughput([record]).tokens_per_second for record in slowed[strategy]]
        deviation = max(abs(rate / median(rates) - 1) for rate in rates)
        ties = [verdict(now, then) == "tie" for now, then in permutations(as_is[strategy], 2)]
        found = [verdict(now, then) == "slower" for now, then in product(slowed[strategy], as_is[strategy])]
        both_ways = [
            *product(disturbed[strategy], as_is[strategy]),
            *product(as_is[strategy], disturbed[strategy]),
        ]
        disturbed_ties = [verdict(now, then) == "tie" for now, then in both_ways]
        disturbed_rates = [throughput([record]).tokens_per_second for record in disturbed[strategy]]
        table.add_row(
            *(strategy, f"{deviation:.1%}", f"{sum(ties)} of {len(ties)}", f"{sum(found)} of {len(found)}"),
            *(f"{median(slow_rates) / median(rates):.3f}", f"{sum(disturbed_ties)} of {len(disturbed_ties)}"),
            *(f"{median(disturbed_rates) / median(rates):.3f}",),
        )
    Console(width=140).print(table)


def launches(
    args: argparse.Namespace, folder: Path, environment: dict[str, str]
) -> dict[str, list[RunRecord]]:
    """The records of `slm compare --repeats N`, by strategy."""
    command = [str(Path(sys.executable).with_name("slm")), "compare", "--model", args.model]
    command += ["--strategy", *args.strategy, "--repeats", str(args.launches), "--output_dir", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    records: dict[str, list[RunRecord]] = {}
    for _, record in find_records([folder])[0]:
        records.setdefault(record.strategy, []).append(record)
    return records


def verdict(now: RunRecord, then: RunRecord) -> str:
    (change,), _ = changes([row_of([(Path("now"), now)])], [row_of([(Path("then"), then)])])
    return change.speed


if __name__ == "__main__":
    main()
