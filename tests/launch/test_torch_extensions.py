"""DeepSpeed compiles in a folder of this environment, and a lock file that nobody holds stops no run."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ENV, ROOT, launch, record_under, slm

from slm_toolkit.launch import torch_extensions
from slm_toolkit.launch.torch_extensions import CompilerNews, extensions_folder, remove_stale_locks

# as torch.utils.cpp_extension compiles, under the torch that is installed; it has the lock when it prints
HOLDS = """
import sys, time
from torch.utils import cpp_extension
path, seconds = sys.argv[1], float(sys.argv[2])
if hasattr(cpp_extension, "FileLock"):
    with cpp_extension.FileLock(path):
        print("held", flush=True)
        time.sleep(seconds)
else:
    baton = cpp_extension.FileBaton(path)
    assert baton.try_acquire()
    print("held", flush=True)
    time.sleep(seconds)
    baton.release()
"""
needs_locks_by_existence = pytest.mark.skipif(
    not torch_extensions.locks_by_existence(), reason="from torch 2.15 on a lock ends with its process"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This environment's, where it compiles in these tests."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    extensions_folder().mkdir(parents=True)
    return extensions_folder()


def left_lock(of: Path) -> Path:
    """The lock that a compiler leaves which was killed just now."""
    of.mkdir(parents=True)
    (of / "build.ninja").touch()
    (of / "lock").touch()
    return of / "lock"


@contextmanager
def compiler(lock: Path, *, seconds: float, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    words = (*launcher, sys.executable, "-c", HOLDS, str(lock), str(seconds))
    with subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.quick
@needs_locks_by_existence
def test_a_lock_that_nobody_holds_is_removed_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, versioned = left_lock(folder / "a"), left_lock(folder / "py311_cpu" / "b")
    remove_stale_locks()
    assert not plain.exists()
    assert not versioned.exists()
    err = capsys.readouterr().err
    assert f"note: removed {plain}: an interrupted compile of a left it behind" in err
    assert f"note: removed {versioned}: an interrupted compile of b" in err


@needs_locks_by_existence
def test_several_ranks_remove_a_lock_once_and_all_go_on(folder: Path) -> None:
    lock = left_lock(folder / "a")
    script = "from slm_toolkit.launch.torch_extensions import remove_stale_locks; remove_stale_locks()"
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert not lock.exists()
    assert "".join(errors).count("note: removed") == 1


def test_a_lock_that_a_compiler_holds_stays_however_old(folder: Path) -> None:
    lock = folder / "a" / "lock"
    with compiler(lock, seconds=60):
        long_ago = time.time() - 1000
        for path in (lock, lock.parent):
            os.utime(path, (long_ago, long_ago))
        remove_stale_locks()
        assert lock.exists()


def test_a_compiler_of_another_run_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_extensions, "_LONG_SECONDS", 0.2)
    news = CompilerNews()
    with compiler(folder / "a" / "lock", seconds=60) as other:
        for _ in range(3):
            news.look()
            time.sleep(0.3)
    line = f"waiting: another run (pid {other.pid}) is compiling a; this run may need it"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_lock_file_that_a_finished_compile_left_is_not_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_extensions, "_LONG_SECONDS", 0.0)
    with compiler(folder / "a" / "lock", seconds=0) as done:  # the file stays from torch 2.15 on
        done.wait(timeout=60)
    news = CompilerNews()
    for _ in range(2):
        news.look()
    assert capsys.readouterr().err == ""


def test_a_compile_that_takes_long_is_named_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_extensions, "_LONG_SECONDS", 0.5)
    monkeypatch.setattr(os, "getppid", os.getpid)  # the compiler's parent is this process, as a launcher is
    news = CompilerNews()
    with compiler(folder / "a" / "lock", seconds=60):
        for _ in range(4):
            news.look()
            time.sleep(0.4)
    assert capsys.readouterr().err.splitlines() == [
        "waiting: compiling a, once on this machine: takes a few minutes"
    ]


@needs_locks_by_existence
def test_the_lock_of_a_compiler_that_is_killed_while_a_run_waits_is_removed(folder: Path) -> None:
    with compiler(folder / "a" / "lock", seconds=60) as killed:
        killed.kill()
    CompilerNews().look()
    assert not (folder / "a" / "lock").exists()


@pytest.mark.quick
def test_each_environment_has_a_folder_of_its_own_below_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert extensions_folder() != folder
    torch_extensions.use_extensions_folder()
    assert extensions_folder() == Path(os.environ["TORCH_EXTENSIONS_DIR"])  # a child's is no deeper


def test_a_run_goes_on_past_the_lock_of_a_killed_compiler(folder: Path, tmp_path: Path) -> None:
    name = "deepspeed_shm_comm"  # which every DeepSpeed run on CPU processes loads
    usual = Path(ENV.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
    for built in list(usual.glob(f"{folder.name}/**/{name}.so"))[:1]:
        (folder / name).symlink_to(built.parent)  # spares the compile
    lock = left_lock(folder / "cpu_adam")
    done = launch(
        *("--model", "slm-1m", "--max_steps", "2", "--output_dir", str(tmp_path / "runs")),
        config="accel_configs/ds_zero1.yaml",
        env={"TORCH_EXTENSIONS_DIR": str(folder)},
    )
    assert done.code == 0, done.err
    assert done.err.count(f"note: removed {lock}") == torch_extensions.locks_by_existence()
    assert record_under(tmp_path / "runs")["status"] == "ok"
    lock = left_lock(folder / "mine")
    script = ("compare", "--script", str(ROOT / "tests" / "scripts" / "loop.py"), "--strategy", "ds_zero1")
    done = slm(
        *(*script, "--output_dir", str(tmp_path / "script")), env={"TORCH_EXTENSIONS_DIR": str(folder)}
    )
    assert done.code == 0, done.err
    assert lock.exists() != torch_extensions.locks_by_existence()
