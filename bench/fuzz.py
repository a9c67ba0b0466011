"""Fuzzed inputs over every reader of what a user gives: each is read, or refused by a ValueError with a hint.

    python bench/fuzz.py --inputs 100000 --seed 1
    python bench/fuzz.py --readers record prices --inputs 5000 --seed 2
    python bench/fuzz.py --atheris 60 --readers strategy_yaml      guided by coverage: `pip install atheris`

Inputs are real files and commands, changed as text and as values: the same for the same seed. All else than
a value or such a ValueError is a find: another exception, more than SECONDS, more than MEMORY_BYTES, the end
of the process. A find is made small and written to tests/corpus/<reader>/, which
tests/contracts/test_fuzz.py replays. Exits with 1 on a find.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
)

from fuzz_readers import READERS, ROOT, Reader

from slm_toolkit.run.data.bad_data import BadData

ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},  # a name is asked of nobody
    **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
}
SECONDS = 20.0
"that one input may take: a hundred times what the slowest need on an idle machine"
MEMORY_BYTES = 2**31
"that one reader may take beyond what it has after its first input"
CORPUS = ROOT / "tests" / "corpus"
_TRIES = 300  # of making a find smaller
_AT_ONCE = 200  # inputs between two reports of a worker


class TooLongError(BaseException):
    """Of an input: no `except Exception` on the way may take it for something else."""


@dataclass
class Outcome:
    """What became of one reader's inputs."""

    accepted: int = 0
    refused: int = 0
    finds: dict[str, int] = field(default_factory=dict)
    "index of the first input, by what happened"
    num_finds: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused + sum(self.num_finds.values())


def input_of(reader: Reader, seeds: list[bytes], seed: int, index: int) -> bytes:
    return reader.make(seeds, random.Random(f"{seed} {reader.name} {index}"))


def verdict(reader: Reader, data: bytes, folder: Path, *, seconds: float = SECONDS) -> str:
    """ "accepted", "refused", or what happened instead: the exception, and where in the project."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(folder)
    previous = signal.signal(signal.SIGALRM, _too_long) if seconds else None
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        reader.read(data, folder)
    except ValueError as error:
        if type(error) in (ValueError, BadData) and "hint: " in str(error):
            return "refused"
        return _happened(error)
    except (Exception, SystemExit, TooLongError) as error:
        return _happened(error)
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        os.chdir(before)
    return "accepted"


def _too_long(number: int, frame: Any) -> None:
    raise TooLongError


def _happened(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "slm_toolkit" in frame.filename] or list(frames)
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else ""
    said = str(error).splitlines()[0][:160] if str(error) else ""
    return f"{type(error).__name__} at {where}: {said}"


def _key(happened: str) -> str:
    """The same for the same fault, whatever the values in its message."""
    return happened.partition(": ")[0]


def _work(reader: Reader, seed: int, first: int, last: int, at: Any, results: Any, folder: Path) -> None:
    """In a process of its own: tells its outcome after every _AT_ONCE inputs."""
    seeds = reader.seeds()
    for warm_up in seeds[:3]:
        verdict(reader, warm_up, folder, seconds=0)  # imports
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    for begin in range(first, last, _AT_ONCE):
        outcome, firsts = Outcome(), {}
        for index in range(begin, min(last, begin + _AT_ONCE)):
            at.value = index
            data = input_of(reader, seeds, seed, index)
            started = time.perf_counter()
            said = verdict(reader, data, folder)
            took = time.perf_counter() - started
            outcome.seconds += took
            outcome.slowest_seconds = max(outcome.slowest_seconds, took)
            if said in ("accepted", "refused"):
                setattr(outcome, said, getattr(outcome, said) + 1)
            else:
                outcome.num_finds[_key(said)] += 1
                firsts.setdefault(_key(said), (index, said))
        outcome.finds = firsts
        outcome.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        results.put(outcome)
    results.put(None)


def fuzz(reader: Reader, num_inputs: int, seed: int, folder: Path) -> Outcome:
    """All inputs of one reader, in a process that is started again where an input ends it."""
    context = multiprocessing.get_context("fork")
    whole, first = Outcome(), 0
    while first < num_inputs:
        at, results = context.Value("q", first), context.SimpleQueue()
        worker = context.Process(target=_work, args=(reader, seed, first, num_inputs, at, results, folder))
        worker.start()
        done = first
        while True:
            while results.empty() and worker.is_alive():
                time.sleep(0.02)
            outcome = None if results.empty() else results.get()
            if outcome is None:
                break
            done += outcome.inputs
            _add(whole, outcome)
        worker.join()
        if worker.exitcode == 0 and done >= num_inputs:
            break
        happened = f"the process ended with {worker.exitcode}"
        whole.num_finds[happened] += 1
        whole.finds.setdefault(happened, (at.value, happened))
        whole.refused += (
            at.value - done
        )  # of the batch that it died in: read without a find, not counted apart
        first = at.value + 1
    return whole


def _add(whole: Outcome, more: Outcome) -> None:
    whole.accepted += more.accepted
    whole.refused += more.refused
    whole.num_finds += more.num_finds
    for key, found in more.finds.items():
        whole.finds.setdefault(key, found)
    whole.seconds += more.seconds
    whole.slowest_seconds = max(whole.slowest_seconds, more.slowest_seconds)
    whole.peak_bytes = max(whole.peak_bytes, more.peak_bytes)


def minimised(reader: Reader, data: bytes, key: str, folder: Path) -> bytes:
    """A smaller input of the same fault: ever smaller pieces left out, as long as it stays."""
    size, tries = max(1, len(data) // 2), 0
    while size and tries < _TRIES:
        start, shrank = 0, False
        while start < len(data) and tries < _TRIES:
            tries += 1
            smaller = data[:start] + data[start + size :]
            if _key(verdict(reader, smaller, folder)) == key:
                data, shrank = smaller, True
            else:
                start += size
        size = size if shrank and size < len(data) else size // 2
    return data


def keep(reader: Reader, data: bytes) -> Path:
    path = CORPUS / reader.name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def shares(readers: list[Reader], num_inputs: int) -> dict[str, int]:
    """Inputs of each reader; the first has what rounding leaves."""
    total = sum(reader.share for reader in readers)
    found = {reader.name: num_inputs * reader.share // total for reader in readers}
    found[readers[0].name] += num_inputs - sum(found.values())
    return found


def _show(names: list[str], outcomes: dict[str, Outcome]) -> None:
    head = f"{'reader':16} {'inputs':>7} {'accepted':>8} {'refused':>8} {'finds':>6}"
    print(f"{head} {'s':>7} {'slowest ms':>10} {'peak MiB':>8}")
    for name in [*names, "all"]:
        of = [outcomes[name]] if name in outcomes else list(outcomes.values())
        num_finds = sum(sum(o.num_finds.values()) for o in of)
        sums = [sum(o.inputs for o in of), sum(o.accepted for o in of), sum(o.refused for o in of)]
        most = max(o.slowest_seconds for o in of) * 1e3, max(o.peak_bytes for o in of) / 2**20
        line = f"{name:16} {sums[0]:7,} {sums[1]:8,} {sums[2]:8,} {num_finds:6,}"
        print(f"{line} {sum(o.seconds for o in of):7.1f} {most[0]:10,.0f} {most[1]:8,.0f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [reader.name for reader in READERS]
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--readers", nargs="+", choices=names, default=names, metavar="NAME", help="default: all"
    )
    parser.add_argument(
        "--atheris", type=int, metavar="SECONDS", help="for so long on the first of --readers"
    )
    parser.add_argument("--draft", action="store_true", help="only print finds: no smaller input, no corpus")
    parser.add_argument("--json", action="store_true", help="print the counts as one object")
    args = parser.parse_args(argv)
    chosen = [reader for reader in READERS if reader.name in args.readers]
    if args.atheris is not None:
        script = str(Path(__file__).with_name("fuzz_guided.py"))
        return subprocess.run([sys.executable, script, chosen[0].name, str(args.atheris)]).returncode
    os.environ.update(ENVIRONMENT)
    started = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fuzz-") as scratch:
        folder = Path(scratch) / "work"
        os.environ["HF_DATASETS_CACHE"] = f"{scratch}/cache"
        os.environ["HOME"] = scratch  # `~` is as empty on every machine
        for reader, count in zip(chosen, shares(chosen, args.inputs).values(), strict=True):
            outcome = outcomes[reader.name] = fuzz(reader, count, args.seed, folder)
            for key, (index, said) in outcome.finds.items():
                print(
                    f"FIND {reader.name} x {outcome.num_finds[key]}, first {index}: {said}", file=sys.stderr
                )
                if args.draft:
                    continue
                data = input_of(reader, reader.seeds(), args.seed, index)
                if not key.startswith(("the process", "TooLong", "MemoryError")):
                    data = minimised(reader, data, key, folder)
                print(f"     {keep(reader, data)}", file=sys.stderr)
    if args.json:
        print(
            json.dumps(
                {
                    name: {"inputs": o.inputs, "finds": sum(o.num_finds.values())}
                    for name, o in outcomes.items()
                }
            )
        )
    else:
        _show([reader.name for reader in chosen], outcomes)
        print(f"seed {args.seed}, {time.perf_counter() - started:.0f} s")
    return 1 if any(outcome.finds for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
