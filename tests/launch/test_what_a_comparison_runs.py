"""How much of the package a comparison of two steps runs: who wants to understand it must read that much."""

import json
import sys
from pathlib import Path

from conftest import ENV, ROOT, planted, run

LINES, FILES, LINES_OF_FILES = 7_300, 92, 18_700

TRACE = """
import atexit, json, os, sys, threading

seen = set()
end = os._exit

def note(frame, event, _):
    if event == "call":
        seen.add(frame.f_code)

def write(code=None):
    sys.setprofile(None)
    functions = [each for each in list(seen) if each.co_flags & 1 and "/slm_toolkit/" in each.co_filename]
    spans = [
        (each.co_filename, each.co_firstlineno, max(line for *_, line in each.co_lines() if line))
        for each in functions
    ]
    with open(f"FOLDER/{os.getpid()}.json", "w") as file:
        json.dump(spans, file)
    if code is not None:
        end(code)

os._exit = write
atexit.register(write)
threading.setprofile(note)
sys.setprofile(note)
"""
"the functions, without class bodies and modules, that each process entered, and their lines"


def test_a_comparison_runs_few_lines(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    cold = {**planted(tmp_path, TRACE.replace("FOLDER", str(traces))), "SLM_WARM_SOCKET": ""}
    command = (str(Path(sys.executable).with_name("slm")), "compare", "--strategy", "ddp")
    done = run(
        *(*command, "--model", "slm-1m", "--max_steps", "2", "--output_dir", str(tmp_path / "runs")),
        env={**ENV, **cold},
    )
    assert done.code == 0, done.err
    lines: dict[str, set[int]] = {}
    for file in traces.iterdir():
        for name, first, last in json.loads(file.read_text()):
            lines.setdefault(name, set()).update(range(first, last + 1))
    entered = {Path(name).relative_to(ROOT): numbers for name, numbers in lines.items()}
    assert Path("slm_toolkit/train.py") in entered
    assert Path("slm_toolkit/report/rows.py") in entered
    in_all = sum(len((ROOT / name).read_text().splitlines()) for name in entered)
    found = (sum(map(len, entered.values())), len(entered), in_all)
    assert all(now <= most for now, most in zip(found, (LINES, FILES, LINES_OF_FILES), strict=True)), found
