"""`bench/gpu/measure.py` with --smoke, which runs its arms tiny, on a CPU."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ENV, ROOT, left_over, run

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


def command(folder: Path, *arms: dict[str, Any], flag: str = "--smoke") -> tuple[str, ...]:
    """The call that runs these arms into `folder`/out."""
    path = folder / "arms.json"
    path.write_text(json.dumps([{"part": "flash", **arm} for arm in arms]))
    program = str(ROOT / "bench" / "gpu" / "measure.py")
    return (sys.executable, program, "--smoke", flag, "--out", str(folder / "out"), "--arms", str(path))


def script(folder: Path, name: str, program: str, **more: Any) -> dict[str, Any]:
    path = folder / f"{name}.py"
    path.write_text(program)
    return {"name": name, "words": [str(path), str(folder)], "seconds": 1.0, **more}


def trained(name: str, *flags: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "words": [*SIZE, *flags], **more}


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "out" / "arms.jsonl").read_text().splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.slow
def test_arms_that_fail_crash_or_hang_are_lines_and_the_others_complete(tmp_path: Path) -> None:
    full = "raise MemoryError('CUDA out of memory. Tried to allocate 4.00 GiB')"
    done = run(
        *command(
            tmp_path,
            script(tmp_path, "full", f"print('at work')\n{full}\n"),
            script(tmp_path, "crash", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"),
            script(tmp_path, "hang", HANG, limit_seconds=3.0),
            script(tmp_path, "no JSON", "print('tokens: many')\n"),
            trained("trained"),
            trained("bad", "--attn_implementation", "flash_attention_2", strategy="ddp"),
        )
    )
    assert done.code == 0, done.err
    found = lines_of(tmp_path)
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
    assert found["trained"]["result"]["estimated_step_seconds"] > 0
    assert left_over(tmp_path) == []
    with tarfile.open(tmp_path / "out" / "cpu.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"about.json", "arms.jsonl", "records/flash/trained/record.json", "logs/flash/crash.txt"} <= names


@pytest.mark.slow
def test_a_call_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    words = command(
        tmp_path, trained("first"), script(tmp_path, "hang", HANG), trained("last"), flag="--no_fork"
    )
    call = subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "out" / "logs" / "flash" / "hang.txt"
    until = time.monotonic() + 120
    while not (log.exists() and "waiting" in log.read_text()):
        assert call.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    call.send_signal(signal.SIGKILL)
    call.wait()
    while left_over(tmp_path):  # measure.py's child kills them
        assert time.monotonic() < until
        time.sleep(0.1)
    assert lines_of(tmp_path).keys() == {"first"}
    (tmp_path / "out" / "arms.jsonl").open("a").write('{"part": "flash", "na')  # killed while it wrote
    (tmp_path / "hang.py").write_text("print('{\"found\": 3}')\n")
    done = run(*words)
    assert done.code == 0, done.err
    found = lines_of(tmp_path)
    assert [(name, line["status"]) for name, line in found.items()] == [
        *(("first", "ok"), ("hang", "ok"), ("last", "ok"))
    ]
    assert found["hang"]["result"] == {"found": 3}


def test_the_plan_has_each_arm_once_and_every_flag_of_it_exists() -> None:
    arms = list(measure.plan())
    assert len({(arm.part, arm.name) for arm in arms}) == len(arms)
    for arm in arms:
        if not arm.is_script:
            training_config([*arm.words, "--output_dir", "x"])


@pytest.mark.slow
def test_micro_benchmarks_are_timed_once_each(tmp_path: Path) -> None:
    out = tmp_path / "micro.jsonl"
    programs = (str(ROOT / "bench" / "gpu" / name) for name in ("pretend.py", "micro.py"))
    words = (sys.executable, *programs, "--smoke", "--out", str(out))
    assert run(*words).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {"matmul", "attention", "elementwise", "adamw", "cross_entropy", "copy"}
    assert {row["kind"] for row in rows} == kinds
    assert all(row["seconds"] > 0 and row["num_samples"] >= 9 for row in rows)
    assert json.loads(run(*words).out)["num_timed"] == 0
