"""Inputs guided by coverage, by atheris: what reaches new lines of a reader is kept and changed further.

    python bench/fuzz.py --atheris 60 --readers strategy_yaml

atheris has wheels for Linux and CPython 3.11 to 3.13. Ends with 1 at the first find, which is written to
tests/corpus/<reader>/.
"""

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slm_toolkit"]):
    from fuzz import ENVIRONMENT, keep, verdict
    from fuzz_readers import READERS


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    os.environ.update(ENVIRONMENT)
    reader = next(reader for reader in READERS if reader.name == name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        corpus, folder = Path(scratch) / "corpus", Path(scratch) / "work"
        corpus.mkdir()
        seeds = reader.seeds()
        for number, seed in enumerate(seeds):
            (corpus / str(number)).write_bytes(seed)
        with atheris.instrument_imports(include=["slm_toolkit"]):
            print(
                f"{name}: {verdict(reader, seeds[0], folder, seconds=0)}", file=sys.stderr
            )  # imports the rest

        def one(data: bytes) -> None:
            said = verdict(reader, data, folder, seconds=0)  # libFuzzer has an alarm of its own
            if said not in ("accepted", "refused"):
                print(f"FIND {name}: {said}\n     {keep(reader, data)}", file=sys.stderr, flush=True)
                os._exit(1)

        limits = (f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=20000")
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
