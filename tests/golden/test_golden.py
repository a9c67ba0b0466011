"""Golden cases: commands with stored answers, so that an answer changes on purpose only.

`cases.txt` has each command after `$`, then what it prints, `! ` before each line of stderr, and the exit
code if it is not 0. After `|` stand the keys of --json rows that count, or `head N` lines. A command that
writes a file into FOLDER prints the file.

    python tests/golden/test_golden.py     write all answers anew; the commit says why they changed
"""

import json
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import ROOT, slm_here

HERE = Path(__file__).parent
CASES = HERE / "cases.txt"
_HASH = re.compile(r"(?<=-)[0-9a-f]{12}\b")  # of a run's identity


def answer(command: str) -> str:
    """Run a command in this process; return what it answers, with numbers of five digits."""
    words, _, filters = command.partition(" | ")
    with TemporaryDirectory() as folder:
        done = slm_here(*shlex.split(words.replace("FOLDER", folder)), cwd=HERE / "inputs")
        written = [path.read_text() for path in Path(folder).iterdir()]
    printed = (written[0] if written else done.out).splitlines()
    if filters.startswith("head "):
        printed = printed[: int(filters.removeprefix("head "))]
    elif filters and done.out:
        rows = json.loads(done.out)
        keys = filters.split()
        rows = rows if isinstance(rows, list) else [rows]
        printed = [" ".join(f"{key}={json.dumps(_rounded(row[key]))}" for key in keys) for row in rows]
    lines = [*printed, *(f"! {line}".rstrip() for line in done.err.splitlines())]
    lines += [f"exit {done.code}"] * (done.code != 0)
    return _HASH.sub("HASH", "\n".join(lines).replace(str(ROOT), "ROOT").replace(folder, "FOLDER")).strip()


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def stored() -> dict[str, str]:
    """Return the stored answers by command; comments and headings are left out."""
    found = {}
    for case in re.split(r"^\$ ", CASES.read_text(), flags=re.MULTILINE)[1:]:
        command, *lines = case.splitlines()
        found[command] = "\n".join(takewhile(lambda line: not line.startswith("=== "), lines)).strip()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("command", stored())
def test_a_command_gives_the_stored_answer(command: str) -> None:
    assert answer(command) == stored()[command]


if __name__ == "__main__":
    headings = [line for line in CASES.read_text().splitlines() if line.startswith(("$ ", "=== "))]
    CASES.write_text(
        "".join(
            f"{line}\n{answer(line[2:])}\n\n" if line.startswith("$ ") else f"{line}\n\n" for line in headings
        )
    )
    print(f"{CASES.relative_to(ROOT)}: {len(stored())} answers", file=sys.stderr)
