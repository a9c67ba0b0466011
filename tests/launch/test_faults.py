"""An OOM, a crash, a kill and a timeout are rows with their reason, never the end of the comparison."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENV, ROOT, WARM, Comparison, compare, left_over, slm
from training_faults import SITE, struck

from slm_toolkit.compare.local import last_step_of
from slm_toolkit.run.faults.watchdog import explain, status_of

SLM = str(Path(sys.executable).with_name("slm"))


def faulty_comparison(kind: str, folder: Path, *more: str) -> Comparison:
    """DDP struck on rank 1 in its third step, then FSDP untouched."""
    env = struck(folder, kind, rank=1, step=3, spares="ACCELERATE_USE_FSDP")
    arguments = ("--model", "slm-1m", "--max_steps", "6", "--strategy", "ddp", "fsdp_full_shard")
    finished = slm("compare", "--json", *arguments, "--output_dir", str(folder / "runs"), *more, env=env)
    rows = {row["strategy"]: row for row in json.loads(finished.out)}
    return Comparison(finished, rows, folder / "runs")


@pytest.mark.parametrize(
    ("kind", "status", "reason", "code"),
    [
        ("out of memory", "oom", r"CUDA out of memory\. Tried to allocate 2\.00 GiB", 0),
        pytest.param("raise", "failed", "the sky is falling", 1, marks=pytest.mark.slow),
        # told by the launcher, or by the other rank if that notices first
        ("kill", "failed", r"rank 1 (\(pid \d+\) )?was killed (by signal 9: |or crashed at step 3)", 1),
    ],
)
def test_a_fault_on_one_rank_is_a_row_and_the_next_run_goes_on(
    kind: str, status: str, reason: str, code: int, tmp_path: Path
) -> None:
    comparison = faulty_comparison(kind, tmp_path)
    ddp, fsdp = comparison.rows["ddp"], comparison.rows["fsdp_full_shard"]
    assert (ddp["status"], fsdp["status"], comparison.finished.code) == (status, "ok", code)
    assert re.search(reason, ddp["reason"])
    assert ddp["tokens_per_second"] is None
    assert comparison.finished.err.count("  log: ") == (status == "failed")
    if status == "oom":  # without the fault: an OOM is an answer and is kept, a failure would be tried again
        again = compare("--max_steps", "6", "--strategy", "ddp", "fsdp_full_shard", folder=comparison.folder)
        assert (again.rows["ddp"]["status"], again.finished.err.count("kept from ")) == ("oom", 2)


def test_a_rank_that_hangs_is_named_with_its_line_and_the_next_run_goes_on(tmp_path: Path) -> None:
    comparison = faulty_comparison("sleep", tmp_path, "--timeout", "45")
    ddp, fsdp = comparison.rows["ddp"], comparison.rows["fsdp_full_shard"]
    assert (ddp["status"], fsdp["status"], comparison.finished.code) == ("timeout", "ok", 1)
    line = SITE.splitlines().index("            time.sleep(1e6)") + 1
    assert ddp["reason"].startswith("stopped after 45 s, ")
    assert f") hung in site/sitecustomize.py:{line} in strike, called from " in ddp["reason"]
    assert ddp["reason"].endswith(", while rank 0 waited")
    assert left_over(tmp_path) == []


def test_a_terminated_comparison_takes_its_ranks_along_and_shows_what_is_done(tmp_path: Path) -> None:
    command = [SLM, "compare", "--strategy", "ddp", "--model", "slm-1m"]
    process = subprocess.Popen(
        [*command, "--kernels", "fused", "--max_steps", "100000", "--output_dir", str(tmp_path)],
        cwd=ROOT,
        env=WARM.env(),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(last_step_of(folder) for folder in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped after 0 of 1 runs" in err
    assert left_over(tmp_path) == []


def test_ctrl_c_while_a_module_in_c_is_imported_ends_without_a_crash(tmp_path: Path) -> None:
    """A KeyboardInterrupt while a module in C is imported would end in its traceback, or in a crash."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Strike:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if 'msgspec' in sys.modules and not name.startswith('msgspec'):\n"
        "            print('struck', file=sys.stderr, flush=True)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Strike())\n"
    )
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [ENV.get("PYTHONPATH")])])}
    command = ["env", "--default-signal=INT", SLM, "report", "results/cpu"]  # background jobs ignore it
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "struck\n")


LONG = "n" * 300
"longer than a name may be on any file system of Linux: `Path.exists` raises for it"


@pytest.mark.parametrize(
    "command",
    [
        f"recommend --model slm-100m --gpu h100-80gb:8 --tokens 1e9 --write {LONG}",
        f"convert fsdp_full_shard --to accelerate_deepspeed --output {LONG}",
        f"report {ROOT}/results --export {LONG}.csv",
        f"compare --strategy ddp --output_dir {LONG}",
        f"train --strategy single --model slm-1m --save_steps 5 --resume_from_checkpoint {LONG}",
        "configs --copy /etc/passwd",
    ],
)
def test_a_path_that_can_not_be_used_is_one_line(command: str, tmp_path: Path) -> None:
    done = slm(*command.split(), cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    error, hint = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert error.startswith("error: can't ")
    assert hint.startswith("hint: ")


def test_an_output_without_room_is_one_line_and_letters_that_it_lacks_are_question_marks() -> None:
    command = [SLM, "report", str(ROOT / "results")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
    assert done.returncode == 2
    assert done.stderr.startswith("error: can't use the output: No space left on device\nhint: ")
    done = subprocess.run(command, capture_output=True, env={**ENV, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_a_run_whose_place_is_taken_is_a_row_and_the_grid_goes_on(tmp_path: Path) -> None:
    command = [SLM, "compare", "--json", "--model", "slm-1m", "--strategy", "single", "--output_dir", "."]
    command += ["--seq_len", "16", "17", "18", "19"]  # none of them gets as far as a launch
    asked = subprocess.run([*command, "--dry_run"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    folders = [tmp_path / line.split("--run_name ")[1].split()[0] for line in json.loads(asked.stdout)]
    folders[0].write_text("a file")
    for folder, name in zip(folders[1:], ("record.json/kept", "log.txt/kept", "launch"), strict=True):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    rows = json.loads(done.stdout)
    assert [row["status"] for row in rows] == ["failed"] * 4
    assert [row["reason"].split(": ")[0] for row in rows] == [
        *("Not a directory", "Directory not empty", "Directory not empty", "File exists")
    ]
    assert (folders[1] / "record.json" / "kept").exists()


def test_an_ended_a_stopped_and_a_running_process_are_told_apart() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    states = ("has ended", "is stopped (SIGSTOP, a debugger?)", "is stuck in native code that holds the GIL")
    try:
        sleepers[0].kill()
        sleepers[1].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while [status_of(each.pid) for each in sleepers] != [None, "stopped", "sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for process, state in zip(sleepers, states, strict=True):
            assert state in explain({}, {5: process.pid})
    finally:
        for process in sleepers:
            process.kill()
            process.wait()
