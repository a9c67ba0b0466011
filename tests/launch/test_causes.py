"""A full disk, a taken port, a kernel short of RAM, a run that would not fit: each has a name in its row."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run, slm

from slm_toolkit.compare.outcome import crash, killed_process, telling_lines
from slm_toolkit.hardware.machine import RamState, look_at_host_ram, who_killed

GIB = 2**30
LAUNCHERS_ERROR = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/accelerate/commands/launch.py", line 1423, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"""


def on_a_disk_of_its_own(words: tuple[str, ...], folder: Path, options: str) -> Iterator[Path]:
    """The folder of the first run of a comparison, mounted as a tmpfs."""
    command = shlex.split(
        slm("compare", "--dry_run", *words, "--output_dir", str(folder)).out.splitlines()[0]
    )
    run_dir = folder / command[command.index("--run_name") + 1]
    run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(run_dir)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield run_dir
    subprocess.run(["umount", str(run_dir)], check=True)


TWO_SEEDS = (*("--strategy", "single", "--model", "slm-1m", "--max_steps", "1"), *("--seed", "0", "1"))


# a disk of 8 KiB has room for YAML and log, one of 4 KiB for the YAML
@pytest.fixture(params=["size=8k", "size=4k", "size=64k,ro"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    reason = "Read-only file system: " if request.param.endswith("ro") else "no room on the disk"
    for folder in on_a_disk_of_its_own(TWO_SEEDS, tmp_path, request.param):
        yield folder, reason


def test_a_disk_that_takes_no_file_is_a_row_that_says_so_and_the_next_run_finishes(
    disk: tuple[Path, str],
) -> None:
    folder, reason = disk
    finished = slm("compare", "--json", *TWO_SEEDS, "--output_dir", str(folder.parent))
    assert finished.code == 1, finished.err
    failed, ok = sorted(json.loads(finished.out), key=lambda row: row["status"])
    assert (failed["status"], ok["status"]) == ("failed", "ok")
    assert failed["reason"].startswith(reason)
    assert "Traceback" not in finished.err
    assert [path.name for path in folder.iterdir() if path.name.startswith((".record", "progress"))] == []


@pytest.mark.quick
def test_the_kernels_count_tells_who_sent_a_sigkill() -> None:
    before, after = RamState(8 * GIB, 16 * GIB, 3), RamState(8 * GIB, 16 * GIB, 4)
    assert who_killed(before, after, least_available_bytes=GIB).startswith(
        "by the kernel, because host RAM ran out"
    )
    said = who_killed(before, before, least_available_bytes=8 * GIB)
    assert said.startswith("likely not because host RAM ran out: the kernel counted no oom_kill")
    silent = RamState(8 * GIB, 16 * GIB, None)
    assert "likely by the kernel" in who_killed(silent, silent, least_available_bytes=GIB // 4)
    assert "or by hand" in who_killed(silent, silent, least_available_bytes=8 * GIB)
    assert 0 < look_at_host_ram().available_bytes <= look_at_host_ram().total_bytes


@pytest.mark.parametrize("verb", ["compare", "train"])
def test_a_run_that_the_kernel_kills_for_ram_says_so(verb: str, tmp_path: Path) -> None:
    limit = {"compare": "450M", "train": "1100M"}[verb]  # of `train` the launcher must live, and speak
    cgroup = Path("/sys/fs/cgroup/memory") / f"slm-test-{os.getpid()}"  # version 1
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(limit)
    except OSError:
        pytest.skip("no memory cgroup can be made here")
    try:
        enter = f"echo $$ > {cgroup}/cgroup.procs"
        large = ("single", "--per_device_train_batch_size", "256", "--seq_len", "512")
        words = (verb, "--max_steps", "3", "--output_dir", str(tmp_path), "--strategy")
        words += ("ddp",) if verb == "compare" else large
        command = f"{enter} && exec {shlex.join([str(Path(sys.executable).with_name('slm')), *words])}"
        done = run("sh", "-c", f"{command} --json" if verb == "compare" else command)
    finally:
        cgroup.rmdir()
    killed = "by the kernel, because host RAM ran out: its oom_kill count rose (its cgroup may use "
    if verb == "compare":
        (row,) = json.loads(done.out)
        assert row["status"] == "failed"
        assert f" was killed by signal 9: {killed}0.4 GiB)" in row["reason"]
    else:
        assert done.code == 128 + 9
        assert f" was ended by SIGKILL: {killed}1.1 GiB)" in done.err


SUMMARY = "Root Cause:\n[0]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : {} (pid: 7)"
OTHER = "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 6)\n"
ONE_PROCESS = (
    LAUNCHERS_ERROR.rpartition("torch.")[0] + "subprocess.CalledProcessError: Command '[]' died with "
)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("log", "code", "killed", "crashed"),
    [
        (LAUNCHERS_ERROR + SUMMARY.format(-9), 1, "rank 3", None),
        (LAUNCHERS_ERROR + SUMMARY.format(1), 1, None, None),
        (SUMMARY.format(-9) + LAUNCHERS_ERROR, 1, None, None),  # a script printed it
        ("", 137, "the launcher", None),
        # the first crash, not how the launcher ended the others
        (LAUNCHERS_ERROR + OTHER + SUMMARY.format(-6), 1, None, "SIGABRT"),
        (LAUNCHERS_ERROR + OTHER + SUMMARY.format(-35), 1, None, "signal 35"),  # it has no name
        (f"{ONE_PROCESS}<Signals.SIGSEGV: 11>.", 1, None, "SIGSEGV"),
        (f"{ONE_PROCESS}unknown signal 35.", 1, None, "signal 35"),
    ],
)
def test_a_launchers_summary_names_who_was_killed_or_crashed(
    log: str, code: int, killed: str | None, crashed: str | None
) -> None:
    assert killed_process(log, code) == killed
    if killed is None:
        assert crash(log) == crashed


@pytest.mark.quick
def test_a_log_is_quoted_up_to_the_reason_else_without_the_launchers_summary(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    summary = "E1120 18:00:00.123000 99 torch/distributed/elastic/multiprocessing/api.py:988] failed"
    log.write_text(f'step 1\n  raise Bad("x y")\nBad: x y\n\nclosed by peer\n{summary}\nmore\n')
    assert telling_lines(log, 2, reason="x y") == ['  raise Bad("x y")', "Bad: x y"]
    assert telling_lines(log, 2, reason="stopped") == ["Bad: x y", "closed by peer"]
    assert telling_lines(tmp_path / "none.txt", 2, reason=None) == []
