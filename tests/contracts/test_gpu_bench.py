"""`bench/gpu/measure.py` with --smoke, which runs its arms tiny, on a CPU."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, left_over, run

sys.path.insert(0, str(ROOT / "bench" / "gpu"))
import measure

from slm_toolkit.config.flags import training_config

SIZE = ["--model", "slm-500m", "--seq_len", "1024", "--per_device_train_batch_size", "16"]
HANG = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(child, start_new_session=True)
print("waiting", flush=True)
time.sleep(600)
"""


def script(folder: Path, name: str, program: str, **more: Any) -> dict[str, Any]:
    path = folder / f"{name}.py"
    path.write_text(program)
    return {"name": name, "words": [str(path), str(folder)], "seconds": 1.0, **more}


@pytest.mark.slow
def test_arms_that_fail_crash_or_hang_are_lines_and_the_others_complete(tmp_path: Path) -> None:
    full = "raise MemoryError('CUDA out of memory. Tried to allocate 4.00 GiB')"
    flash = ["--attn_implementation", "flash_attention_2"]
    arms = [
        script(tmp_path, "full", f"print('at work')\n{full}\n"),
        script(tmp_path, "crash", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"),
        script(tmp_path, "hang", HANG, limit_seconds=3.0),
        script(tmp_path, "no JSON", "print('tokens: many')\n"),
        {"name": "trained", "words": SIZE},
        {"name": "bad", "words": SIZE + flash, "strategy": "ddp"},
    ]
    out, path = tmp_path / "out", tmp_path / "arms.json"
    path.write_text(json.dumps([{"part": "flash", **arm} for arm in arms]))
    program = str(ROOT / "bench" / "gpu" / "measure.py")
    done = run(sys.executable, program, "--smoke", "--out", str(out), "--arms", str(path))
    assert done.code == 0, done.err
    lines = map(json.loads, (out / "arms.jsonl").read_text().splitlines())
    found = {line["name"]: line for line in lines}
    for name, status, reason in (
        ("full", "failed", "MemoryError: CUDA out of memory"),
        ("crash", "failed", "ended by SIGSEGV"),
        ("hang", "timeout", "killed after 3 s; last line of "),
        ("no JSON", "failed", ""),
        ("bad", "failed", "--attn_implementation flash_attention_2"),
    ):
        assert found[name]["status"] == status
        assert found[name]["reason"].startswith(reason)
    assert found["trained"]["result"]["tokens_per_second"] > 0
    assert left_over(tmp_path) == []
    with tarfile.open(out / "cpu.tar.gz") as archive:
        assert "records/flash/trained/record.json" in archive.getnames()


def test_the_plan_has_each_arm_once_and_every_flag_of_it_exists() -> None:
    arms = list(measure.plan())
    assert len({(arm.part, arm.name) for arm in arms}) == len(arms)
    for arm in arms:
        if not arm.is_script:
            training_config([*arm.words, "--output_dir", "x"])
