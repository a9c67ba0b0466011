"""`bench/gpu/measure.py` and what it needs on a GPU machine; --smoke runs its arms tiny, on a CPU."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import ENV, ROOT, left_over, run

sys.path.insert(0, str(ROOT / "bench" / "gpu"))
import measure

from slm_toolkit.config.flags import training_config

MEASURE = str(ROOT / "bench" / "gpu" / "measure.py")
PRETEND = str(ROOT / "bench" / "gpu" / "pretend.py")
SIZE = ["--model", "slm-500m", "--seq_len", "1024", "--per_device_train_batch_size", "16"]
HANG = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(child, start_new_session=True)
print("waiting", flush=True)
time.sleep(600)
"""


def arms_file(folder: Path, *arms: dict[str, Any]) -> Path:
    path = folder / "arms.json"
    path.write_text(json.dumps([{"part": "flash", **arm} for arm in arms]))
    return path


def script(folder: Path, name: str, program: str, **more: Any) -> dict[str, Any]:
    path = folder / f"{name}.py"
    path.write_text(program)
    words = [str(path), str(folder)]
    return {"name": name, "words": words, "seconds": 1.0, **more}


def trained(name: str, *flags: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "words": [*SIZE, *flags], **more}


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in map(json.loads, (out / "arms.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_arms_that_fail_crash_or_hang_are_lines_and_the_others_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    full = "raise MemoryError('CUDA out of memory. Tried to allocate 4.00 GiB')"
    arms = arms_file(
        tmp_path,
        script(tmp_path, "full", f"print('at work')\n{full}\n"),
        script(tmp_path, "crash", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"),
        script(tmp_path, "hang", HANG, limit_seconds=3.0),
        script(tmp_path, "no JSON", "print('tokens: many')\n"),
        trained("trained"),
        trained("bad", "--attn_implementation", "flash_attention_2", strategy="ddp"),
    )
    done = run(sys.executable, MEASURE, "--smoke", "--out", str(out), "--arms", str(arms))
    assert done.code == 0, done.err
    found = lines_of(out)
    assert {name: line["status"] for name, line in found.items()} == {
        "full": "failed",
        "crash": "failed",
        "hang": "timeout",
        "no JSON": "failed",
        "trained": "ok",
        "bad": "failed",
    }
    assert found["full"]["reason"].startswith("MemoryError: CUDA out of memory")
    assert found["crash"]["reason"].startswith("ended by SIGSEGV")
    assert found["hang"]["reason"].startswith("killed after 3 s; last line of ")
    assert found["hang"]["reason"].endswith(": waiting")
    assert found["no JSON"]["reason"].endswith("tokens: many")
    assert found["bad"]["reason"].startswith("--attn_implementation flash_attention_2")
    assert found["trained"]["result"]["tokens_per_second"] > 0
    assert found["trained"]["result"]["estimated_step_seconds"] > 0
    assert left_over(tmp_path) == []
    with tarfile.open(out / "cpu.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"about.json", "arms.jsonl", "records/flash/trained/record.json", "logs/flash/crash.txt"} <= names
    assert "hang" in done.out
    assert "archive:" in done.out


@pytest.mark.slow
def test_a_call_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arms = arms_file(tmp_path, trained("first"), script(tmp_path, "hang", HANG), trained("last"))
    command = [sys.executable, MEASURE, "--smoke", "--no_fork", "--out", str(out), "--arms", str(arms)]
    call = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = out / "logs" / "flash" / "hang.txt"
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
    assert lines_of(out).keys() == {"first"}
    (out / "arms.jsonl").open("a").write('{"part": "flash", "na')  # killed while it wrote
    (tmp_path / "hang.py").write_text("print('{\"found\": 3}')\n")
    done = run(*command)
    assert done.code == 0, done.err
    found = lines_of(out)
    assert {name: line["status"] for name, line in found.items()} == dict.fromkeys(found, "ok")
    assert found["hang"]["result"] == {"found": 3}
    assert [json.loads(line)["name"] for line in (out / "arms.jsonl").read_text().splitlines()] == [
        "first",
        "hang",
        "last",
    ]
    commands = json.loads((out / "about.json").read_text())["commands"]
    assert len(commands) == 2


@pytest.mark.slow
def test_forked_arms_train_as_launched_ones_do(tmp_path: Path) -> None:
    both = [trained("ddp", strategy="ddp"), trained("ds_zero2", strategy="ds_zero2")]
    found, commands = {}, {}
    for flag in ("--smoke", "--no_fork"):
        out = tmp_path / flag
        arms = arms_file(tmp_path, *both)
        done = run(sys.executable, MEASURE, "--smoke", flag, "--out", str(out), "--arms", str(arms))
        assert done.code == 0, done.err
        found[flag] = lines_of(out)
        for line in found[flag].values():
            assert line["forked"] is (flag == "--smoke")
            command = json.loads((out / line["record"]).read_text())["command"]
            commands[flag, line["name"]] = command.split(" --main_process_port")[0]
    for name, engine in (("ddp", "ddp"), ("ds_zero2", "deepspeed")):
        forked, launched = (found[flag][name]["result"] for flag in found)
        assert forked["engine"] == launched["engine"] == engine
        assert forked["losses"] == launched["losses"]
        assert commands["--smoke", name] == commands["--no_fork", name]


def test_what_the_budget_has_no_time_for_is_named(tmp_path: Path) -> None:
    arms = arms_file(tmp_path, trained("late"))
    command = (sys.executable, MEASURE, "--smoke", "--no_fork", "--arms", str(arms))
    done = run(*command, "--out", str(tmp_path / "late"), "--budget_minutes", "0")
    assert done.code == 0, done.err
    assert "takes about 1 s, 0 s of the budget were left" in done.out
    assert lines_of(tmp_path / "late")["late"]["status"] == "not run"


@pytest.mark.quick
def test_the_plan_has_each_arm_once_and_every_flag_of_it_exists() -> None:
    arms = list(measure.plan())
    assert len({(arm.part, arm.name) for arm in arms}) == len(arms)
    for arm in arms:
        if not arm.is_script:
            training_config([*arm.words, "--output_dir", "x"])


@pytest.mark.slow
def test_micro_benchmarks_are_timed_once_each(tmp_path: Path) -> None:
    out = tmp_path / "micro.jsonl"
    command = (sys.executable, PRETEND, str(ROOT / "bench/gpu/micro.py"), "--smoke", "--out", str(out))
    assert run(*command).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {"matmul", "attention", "elementwise", "adamw", "cross_entropy", "copy"}
    assert {row["kind"] for row in rows} == kinds
    assert all(row["seconds"] > 0 and row["num_samples"] >= 9 for row in rows)
    # the paper's width of 100M comes first
    first = {"kind": "matmul", "rows": 32, "inner": 64, "width": 2332, "pass": "forward", "dtype": "bfloat16"}
    assert first.items() <= rows[0].items()
    again = run(*command)
    assert json.loads(again.out)["num_timed"] == 0
    assert len(out.read_text().splitlines()) == len(rows)


@pytest.mark.slow
def test_the_packed_folder_is_all_that_a_bare_machine_needs(tmp_path: Path) -> None:
    """Wheels from pack.sh beside torch, transformers and accelerate alone train all strategies, pretended."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels, bare, site = tmp_path / "whl", tmp_path / "bare", tmp_path / "site"
    packed = run("bash", "bench/gpu/pack.sh", "--python_version", python, "--out", str(wheels), timeout=900)
    assert packed.code == 0, packed.err

    subprocess.run((sys.executable, "-m", "venv", str(bare)), check=True)
    pip = (str(bare / "bin" / "python"), "-m", "pip", "install", "-q")
    there = (f"torch=={version('torch').partition('+')[0]}", "transformers==5.17.0", "accelerate==1.15.0")
    subprocess.run((*pip, *there), check=True)
    carried = map(str, wheels.glob("*.whl"))
    subprocess.run((*pip, "--no-index", "--no-deps", "--target", str(site), *carried), check=True)

    env = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HOME": str(tmp_path)}
    command = (pip[0], PRETEND, MEASURE, "--smoke", "--only", "canary", "--budget_minutes", "15")
    done = run(*command, "--out", str(tmp_path / "measured"), env=env, timeout=1100)
    assert done.code == 0, done.err
    lines = lines_of(tmp_path / "measured")
    failed = {name: line["reason"] for name, line in lines.items() if line["status"] != "ok"}
    assert failed.keys() <= {"Triton"}, failed  # no GPU, no Triton
    assert json.loads((tmp_path / "measured" / "about.json").read_text())["pretended"] is True
