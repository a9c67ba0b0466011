"""The locks of compilers that were killed: torch would wait for them without end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENV, launch, record_under

from slm_toolkit.torch_extensions import QUIET_SECONDS, CompilerNews, extensions_folder, wait_for_compilers

LONG_AGO = 2 * QUIET_SECONDS
HOLDS = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
baton.release()
"""


def locked(folder: Path, *, age_seconds: float) -> Path:
    """An extension's folder as a compiler leaves it that was killed so long ago."""
    folder.mkdir(parents=True)
    lock = folder / "lock"
    for path in (folder / "build.ninja", lock):
        path.touch()
        os.utime(path, 2 * (time.time() - age_seconds,))
    return lock


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_lock_of_a_killed_compiler_is_removed_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, versioned = (
        locked(tmp_path / "a", age_seconds=LONG_AGO),
        locked(tmp_path / "py311_cpu" / "b", age_seconds=LONG_AGO),
    )
    wait_for_compilers(speaks=True, folder=tmp_path)
    assert not plain.exists()
    assert not versioned.exists()
    err = capsys.readouterr().err
    assert f"note: removed {plain}: a compile of a was interrupted" in err
    assert f"note: removed {versioned}: a compile of b was interrupted" in err


def test_a_folder_where_something_changes_is_waited_for_until_it_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = locked(tmp_path / "a", age_seconds=LONG_AGO)
    (tmp_path / "a" / "new.o").touch()
    begun = time.time()
    wait_for_compilers(speaks=True, folder=tmp_path, quiet_seconds=2)
    assert not lock.exists()
    assert time.time() - begun > 1.5
    err = capsys.readouterr().err
    assert err.count("says that a is being compiled, by no process of this machine") == 1


def test_a_compiler_that_lives_is_waited_for_however_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    lock = tmp_path / "a" / "lock"
    command = ["setsid", "--fork", sys.executable, "-c", HOLDS, str(lock), "4"]  # of another parent
    subprocess.run(command, env=ENV, stdout=subprocess.DEVNULL, check=True)
    wait_for(lock)
    for path in (lock, tmp_path / "a"):
        os.utime(path, 2 * (time.time() - LONG_AGO,))
    wait_for_compilers(speaks=True, folder=tmp_path)
    assert not lock.exists()
    err = capsys.readouterr().err
    assert "compiles a; this run waits for it" in err
    assert "removed" not in err


def test_a_compile_that_takes_long_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, short = locked(tmp_path / "a", age_seconds=10), locked(tmp_path / "b", age_seconds=0)
    locked(tmp_path / "c", age_seconds=10)  # of a compiler that was killed
    news = CompilerNews()
    with open(long), open(short):
        news.look(tmp_path)
        news.look(tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        "note: a is compiled for DeepSpeed, once on this machine: up to some minutes"
    ]


def test_a_rank_beside_this_one_is_left_to_torch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lock = tmp_path / "a" / "lock"
    script = (
        "from pathlib import Path; from slm_toolkit.torch_extensions import wait_for_compilers;"
        f" wait_for_compilers(speaks=True, folder=Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(lock), "60"], env=ENV) as holder:
        wait_for(lock)
        done = subprocess.run(
            [sys.executable, "-c", script], env=ENV, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr, lock.exists()) == (0, "", True)
        holder.kill()


def test_a_run_goes_on_past_the_lock_of_an_interrupted_compile(tmp_path: Path) -> None:
    name = "deepspeed_shm_comm"  # which every DeepSpeed run on CPU processes loads
    for built in list(extensions_folder().glob(f"**/{name}/{name}.so"))[:1]:  # spares the compile
        (tmp_path / name).symlink_to(built.parent)
    lock = locked(tmp_path / "cpu_adam", age_seconds=LONG_AGO)
    env = {**ENV, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = launch(
        *("--model", "slm-1m", "--max_steps", "2", "--output_dir", str(tmp_path / "runs")),
        config="accel_configs/ds_zero1.yaml",
        env=env,
    )
    assert done.code == 0, done.err
    assert done.err.count(f"note: removed {lock}") == 1
    assert record_under(tmp_path / "runs")["status"] == "ok"
