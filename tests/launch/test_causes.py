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

from slm_toolkit.compare.outcome import crash, killed_process
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


@pytest.fixture(params=[8, 4])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a single-process run on a disk of 8 KiB (YAML and log fit) or 4 KiB (the YAML does)."""
    words = ("--strategy", "single", "--model", "slm-1m", "--max_steps", "3")
    yield from on_a_disk_of_its_own(words, tmp_path, f"size={request.param}k")


TWO_SEEDS = (
    "--strategy",
    "single",
    "--model",
    "slm-1m",
    "--seq_len",
    "32",
    "--max_steps",
    "1",
    "--seed",
    "0",
    "1",
)


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    yield from on_a_disk_of_its_own(TWO_SEEDS, tmp_path, "size=64k,ro")


def test_a_folder_that_cannot_be_written_is_a_row_and_the_next_run_finishes(read_only_folder: Path) -> None:
    finished = slm("compare", "--json", *TWO_SEEDS, "--output_dir", str(read_only_folder.parent))
    assert finished.code == 1, finished.err
    rows = json.loads(finished.out)
    assert sorted(row["status"] for row in rows) == ["failed", "ok"]
    (failed,) = (row for row in rows if row["status"] == "failed")
    assert failed["reason"] == f"Read-only file system: {read_only_folder}/launch"
    assert "Traceback" not in finished.err


def test_a_full_disk_is_a_row_that_says_so_and_the_next_run_finishes(full_disk: Path) -> None:
    words = ("--strategy", "single", "ddp", "--model", "slm-1m", "--max_steps", "3")
    finished = slm("compare", "--json", *words, "--output_dir", str(full_disk.parent))
    rows = {row["strategy"]: row for row in json.loads(finished.out)}
    assert finished.code == 1
    assert (rows["single"]["status"], rows["ddp"]["status"]) == ("failed", "ok")
    assert rows["single"]["reason"].startswith("no room on the disk")
    assert [path.name for path in full_disk.iterdir() if path.name.startswith((".record", "progress"))] == []


@pytest.mark.quick
def test_the_kernels_count_tells_who_sent_a_sigkill() -> None:
    before, after = RamState(8 * GIB, 16 * GIB, 3), RamState(8 * GIB, 16 * GIB, 4)
    assert who_killed(before, after, least_available_bytes=GIB).startswith(
        "by the kernel, because host RAM ran out"
    )
    said = who_killed(before, before, least_available_bytes=8 * GIB)
    assert said == "likely not because host RAM ran out: 8.0 of 16.0 GiB were free at the lowest"
    silent = RamState(8 * GIB, 16 * GIB, None)
    assert "likely by the kernel" in who_killed(silent, silent, least_available_bytes=GIB // 4)
    assert "likely not because" in who_killed(silent, silent, least_available_bytes=8 * GIB)
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


@pytest.mark.quick
def test_a_killed_process_is_told_from_one_that_ended() -> None:
    summary = "Root Cause:\n[0]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 7)"
    assert killed_process(LAUNCHERS_ERROR + summary, 1) == "rank 3"
    assert killed_process(LAUNCHERS_ERROR + summary.replace("-9", "1"), 1) is None
    assert killed_process(summary + LAUNCHERS_ERROR, 1) is None  # a script printed it
    assert killed_process("", 137) == "the launcher"
    assert killed_process("", 1) is None


@pytest.mark.quick
def test_the_crash_that_is_named_is_the_first_not_how_the_launcher_ended_the_others() -> None:
    other = "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 6)\n"
    root = "Root Cause (first observed failure):\n[0]:\n  rank      : 1\n  exitcode  : -6 (pid: 7)"
    assert crash(LAUNCHERS_ERROR + other + root) == "SIGABRT"
    assert crash(LAUNCHERS_ERROR + other + root.replace("-6", "1")) is None
    assert crash(LAUNCHERS_ERROR + other + root.replace("-6", "-35")) == "signal 35"  # it has no name
    one_process = LAUNCHERS_ERROR.rpartition("torch.")[0]
    one_process += "subprocess.CalledProcessError: Command '[]' died with "
    assert crash(f"{one_process}<Signals.SIGSEGV: 11>.") == "SIGSEGV"
    assert crash(f"{one_process}unknown signal 35.") == "signal 35"
    assert crash("no summary") is None
