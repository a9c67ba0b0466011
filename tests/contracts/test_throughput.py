"""`bench/throughput.py` runs from one command; its arms train on the same work, and it says so if not."""

import json
import sys
from pathlib import Path

from conftest import ROOT, run

SMALL = ("--models", "slm-1m", "--seq_len", "64", "--batch_size", "2", "--steps", "6", "--warmup", "3")
SMALL += ("--core", "-1")  # no core of its own: the tests that run beside it use all
FASTER = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
work = json.loads(path.read_text())
work["learning_rates"] = [10 * rate for rate in work["learning_rates"]]
path.write_text(json.dumps(work))
"""


def test_losses_that_differ_end_it_with_exit_code_1_and_missing_arms_are_told(tmp_path: Path) -> None:
    # torchtitan is not installed beside us; a learning rate of its own makes another run of `bare`
    python = tmp_path / "python"
    (tmp_path / "faster.py").write_text(FASTER)
    exe = sys.executable
    python.write_text(f'#!/bin/sh\n{exe} {tmp_path}/faster.py "$3"\nexec {exe} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "rows.json"
    arms = ("--arms", "trainer", "ours", "bare", "torchtitan", "--rounds", "1", "--numerics", "fp32")
    arms += ("--python", f"bare={python}", "--out", str(out))
    done = run(exe, str(ROOT / "bench/throughput.py"), *SMALL, *arms, warm=True)
    assert done.code == 1
    assert "losses differ by more than rounding: bare" in done.out  # ours not
    assert "left out: torchtitan" in done.err
    (found,) = json.loads(out.read_text())
    trainer, ours, bare = found["rows"]
    assert ours["against"]["trainer"]["loss_difference"] < 1e-4
