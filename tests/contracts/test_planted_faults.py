"""Three faults of bench/fault_list.py, planted in real trainings: `slm compare --parity` turns red."""

import json
import sys
from pathlib import Path

from conftest import run


def test_three_planted_faults_are_caught(tmp_path: Path) -> None:
    done = run(sys.executable, "bench/planted_faults.py", "--sample", "--out", str(tmp_path), timeout=900)
    assert done.code == 0, done.err[-2000:]
    results = [json.loads(line) for line in (tmp_path / "sample.jsonl").read_text().splitlines()]
    assert len(results) == 3
    assert [result["fault"] for result in results if not result["parity"]] == []
    # caught by what they compute, not since a run fell over
    assert [result["said"] for result in results if " failed: " in result["said"]] == []
