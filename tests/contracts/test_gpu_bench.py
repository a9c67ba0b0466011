"""`bench/gpu/measure.py`, the plan for a GPU: on a CPU its smoke run shows that every part works."""

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

MEASURE = str(ROOT / "bench" / "gpu" / "measure.py")
TINY = ["--model", "slm-1m", "--seq_len", "32", "--per_device_train_batch_size", "2", "--max_steps", "3"]
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
    return {"name": name, "kind": "script", "words": words, "seconds": 1.0, **more}


def trained(name: str, *flags: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "words": [*TINY, *flags], "timed_seconds": 0.0, **more}


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
        trained("left out", needs="no_such_package"),
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
        "left out": "not run",
        "bad": "failed",
    }
    assert found["full"]["reason"].startswith("MemoryError: CUDA out of memory")
    assert found["crash"]["reason"].startswith("ended by SIGSEGV")
    assert found["hang"]["reason"] == "killed after 3 s\nwaiting"
    assert found["no JSON"]["reason"] == "tokens: many"
    assert found["bad"]["reason"].startswith("error: --attn_implementation flash_attention_2")
    assert found["left out"]["reason"] == "no_such_package is not installed"
    assert found["trained"]["result"]["tokens_per_second"] > 0
    assert found["trained"]["result"]["estimated_step_seconds"] > 0
    tries = [json.loads(line)["name"] for line in (out / "arms.jsonl").read_text().splitlines()]
    assert tries.count("crash") == 2  # at last what failed, again
    assert tries.count("trained") == 1
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
    while left_over(tmp_path):  # the keeper reads the end of its stdin
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
    out = tmp_path / "out"
    both = [trained("ddp", strategy="ddp"), trained("ds_zero2", strategy="ds_zero2")]
    fresh = trained("ds_zero2 fresh", strategy="ds_zero2", fresh=True)
    arms = arms_file(tmp_path, *both, fresh)
    done = run(sys.executable, MEASURE, "--smoke", "--out", str(out), "--arms", str(arms))
    assert done.code == 0, done.err
    found = lines_of(out)
    assert [line["status"] for line in found.values()] == ["ok"] * 3, done.out
    assert [line["forked"] for line in found.values()] == [True, True, False]
    engines = [line["result"]["engine"] for line in found.values()]
    assert engines == ["ddp", "deepspeed", "deepspeed"]
    assert found["ds_zero2"]["result"]["losses"] == found["ds_zero2 fresh"]["result"]["losses"]
    commands = [
        json.loads((out / line["record"]).read_text())["command"].split(" --output_dir")[0]
        for line in list(found.values())[1:]
    ]
    assert commands[0].split(" --main_process_port")[0] == commands[1].split(" --main_process_port")[0]


def test_what_the_budget_has_no_time_for_is_named_and_imports_that_fail_end_the_call(tmp_path: Path) -> None:
    arms = arms_file(tmp_path, trained("late"))
    command = (sys.executable, MEASURE, "--smoke", "--no_fork", "--arms", str(arms))
    done = run(*command, "--out", str(tmp_path / "late"), "--budget_minutes", "0")
    assert done.code == 0, done.err
    assert "late: takes about 1 s, 0 s of the budget were left" in done.out
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec here')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = run(sys.executable, MEASURE, "--smoke", "--out", str(tmp_path / "broken"), env=env)
    assert done.code == 1
    assert (
        "error: can't import slm_toolkit.train: ImportError: no msgspec here\nhint: bench/gpu/pack.sh"
        in done.err
    )
    assert lines_of(tmp_path / "broken")["imports"]["status"] == "failed"


@pytest.mark.quick
def test_the_last_words_are_the_error_not_the_launchers() -> None:
    of_rank = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    step()\n'
    torch_error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    banner = (
        "E1123 15:00:00.1 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)\n"
        'Traceback (most recent call last):\n  File "run.py", line 9, in run\n    elastic_launch()\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\ntrain.py FAILED\n"
        "Failures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-11-23\n  host      : here\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : 1 (pid: 9)\n  error_file: <N/A>\n"
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
        "============================================================\n"
    )
    assert measure.last_words(f"step 1\n{of_rank}{torch_error}\n{banner}", 1) == torch_error
    ours = "error: no such model: x\nhint: slm-1m"
    assert measure.last_words(f"a note\n{ours}\n{banner}", 1) == ours
    assert measure.last_words("", -9) == "ended by SIGKILL"
    assert measure.last_words("", 3) == "exit code 3, nothing was written"


@pytest.mark.quick
def test_an_arm_out_of_memory_comes_again_at_half_its_batch() -> None:
    arm = measure.Arm("ladder", "slm-2b eager", ("--per_device_train_batch_size", "8", "--torch_compile"))
    half = measure._halved(arm)
    assert half.name == "slm-2b eager at batch 4"
    assert half.words == ("--per_device_train_batch_size", "4", "--torch_compile")
    assert measure._halved(measure.Arm("ladder", "x", ("--per_device_train_batch_size", "1"))) is None


@pytest.mark.quick
def test_the_plan_is_three_calls_that_hold_each_part_once() -> None:
    assert sorted(name for names in measure.PARTS.values() for name in names) == sorted(measure.PLAN)
    for smoke in (True, False):
        arms = [arm for part in measure.PLAN.values() for arm in part(smoke)]
        assert len({arm.key for arm in arms}) == len(arms)
    of_ladder = list(measure.ladder(False))
    assert len(of_ladder) == 4 * 4  # models with and without aligned widths, Triton's kernels, padding
    assert {arm.batch for arm in of_ladder} == {16, 32, 64}
    of_memory = [(arm.strategy, arm.num_ranks) for arm in measure.memory(False)]
    assert set(of_memory) == {(strategy, n) for strategy in measure.STRATEGIES for n in (1, 8)}


@pytest.mark.slow
def test_micro_benchmarks_are_timed_once_each(tmp_path: Path) -> None:
    out = tmp_path / "micro.jsonl"
    command = (sys.executable, str(ROOT / "bench/gpu/micro.py"), "--smoke", "--out", str(out))
    assert run(*command).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {"matmul", "attention", "elementwise", "launch", "adamw", "cross_entropy", "copy", "norm"}
    assert {row["kind"] for row in rows} == kinds
    assert all(row["seconds"] > 0 and row["num_samples"] >= 3 and row["spread"] >= 0 for row in rows)
    # the paper's width of 100M comes first
    first = {"kind": "matmul", "rows": 32, "inner": 64, "width": 2332, "pass": "forward", "dtype": "bfloat16"}
    assert first.items() <= rows[0].items()
    again = run(*command)
    assert json.loads(again.out) == {"num_timed": 0, "num_left_out": 0, "failed": []}
    assert len(out.read_text().splitlines()) == len(rows)


@pytest.mark.slow
def test_the_packed_folder_is_all_that_a_bare_machine_needs(tmp_path: Path) -> None:
    """Wheels from pack.sh beside torch, transformers and accelerate alone train all strategies, pretended."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels, bare, site = tmp_path / "whl", tmp_path / "bare", tmp_path / "site"
    packed = run("bash", "bench/gpu/pack.sh", "--python_version", python, "--out", str(wheels), timeout=900)
    assert packed.code == 0, packed.err
    for part in (1, 2, 3):
        assert f"measure.py --part {part} --budget_minutes 9" in packed.out

    subprocess.run((sys.executable, "-m", "venv", str(bare)), check=True)
    pip = (str(bare / "bin" / "python"), "-m", "pip", "install", "-q")
    there = (f"torch=={version('torch').partition('+')[0]}", "transformers==5.17.0", "accelerate==1.15.0")
    subprocess.run((*pip, *there), check=True)
    carried = map(str, wheels.glob("*.whl"))
    subprocess.run((*pip, "--no-index", "--no-deps", "--target", str(site), *carried), check=True)

    env = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HOME": str(tmp_path)}
    command = (pip[0], MEASURE, "--pretend", "--only", "canary", "--budget_minutes", "15")
    done = run(*command, "--out", str(tmp_path / "measured"), env=env, timeout=1100)
    assert done.code == 0, done.err
    lines = lines_of(tmp_path / "measured")
    assert {name: line["reason"] for name, line in lines.items() if line["status"] != "ok"} == {}
    assert json.loads((tmp_path / "measured" / "about.json").read_text())["pretended"] is True
    assert (tmp_path / "measured" / "nvidia-h200.tar.gz").stat().st_size < 16 * 2**20
