"""DeepSpeed compiles in a folder of this environment, and a lock file that nobody holds stops no run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENV, ROOT, launch, record_under, slm

from slm_toolkit.launch.torch_extensions import (
    CompilerNews,
    extensions_folder,
    locks_by_existence,
    use_extensions_folder,
)

# as torch.utils.cpp_extension compiles, under the torch that is installed; it has the lock when it prints
HOLDS = """
import sys, time
from torch.utils import cpp_extension
if hasattr(cpp_extension, "FileLock"):
    with cpp_extension.FileLock(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
else:
    assert cpp_extension.FileBaton(sys.argv[1]).try_acquire()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This environment's, where it compiles in these tests."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    extensions_folder().mkdir(parents=True)
    return extensions_folder()


def left_lock(of: Path) -> Path:
    """The lock that a compiler leaves which was killed just now."""
    of.mkdir(parents=True)
    (of / "lock").touch()
    return of / "lock"


def test_a_lock_that_a_compiler_holds_stays_and_is_named_once_until_the_compiler_is_killed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, news = folder / "a" / "lock", CompilerNews()
    lock.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock)], env=ENV, stdout=subprocess.PIPE, text=True
    ) as compiler:
        assert compiler.stdout.readline() == "held\n"
        long_ago = time.time() - 1000
        os.utime(lock, (long_ago, long_ago))
        for _ in range(6):
            news.look()
        assert lock.exists()
        line = f"waiting: a is being compiled (pid {compiler.pid}): takes a few minutes, once"
        assert capsys.readouterr().err.splitlines() == [line]
        compiler.kill()
        compiler.wait()
    news.look()
    assert lock.exists() != locks_by_existence()


@pytest.mark.quick
def test_each_environment_has_a_folder_of_its_own_below_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert extensions_folder() != folder
    use_extensions_folder()
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
    assert done.err.count(f"note: removed {lock}") == locks_by_existence()
    assert record_under(tmp_path / "runs")["status"] == "ok"
    lock = left_lock(folder / "py311_cpu" / "mine")
    script = ("compare", "--script", str(ROOT / "tests" / "scripts" / "loop.py"), "--strategy", "ds_zero1")
    env = {"TORCH_EXTENSIONS_DIR": str(folder)}
    done = slm(*script, "--output_dir", str(tmp_path / "script"), env=env)
    assert done.code == 0, done.err
    assert lock.exists() != locks_by_existence()
