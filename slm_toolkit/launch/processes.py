"""What the Python processes that we start do at their start and end: a safe import path, no orphans."""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from slm_toolkit.base.errors import EXIT_CODE_VARIABLE

SAFE_PATH = "PYTHONSAFEPATH"


def safe_environment() -> dict[str, str]:
    """Return this process's environment, changed so that no file of the working folder can be imported.

    Otherwise a file `yaml.py` there would shadow the installed package. Python still finds this package, even
    in a checkout that is not installed. A script's own folder is excluded, too, so use this for our modules
    only, not for a user's script.
    """
    env = dict(os.environ)
    root = Path(__file__).parents[2]
    # an empty entry means the working folder
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in map(Path, (*paths, sysconfig.get_path("purelib"))):
        paths.append(str(root))
    env[SAFE_PATH] = "1"
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        env.pop("PYTHONPATH", None)
    return env


def leave_out_working_folder() -> None:
    """Remove the working folder from the import path if this process was started with `safe_environment`.

    accelerate's DeepSpeed launcher adds the folder to PYTHONPATH.
    """
    here = os.getcwd()
    if SAFE_PATH not in os.environ or here == str(Path(__file__).parents[2]):
        return
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in paths if path and os.path.abspath(path) != here
    )


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; `signal 35` for a signal without a name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# A rank's start.


def begin(name: str) -> Callable[[], None]:
    """Prepare the process if `name` is "__main__", and check its command line: --help and typos end it here.

    Call it before all other imports, and what it returns after them. Between the two calls no garbage is
    collected: imported objects are never garbage, yet collecting them took a third of a rank's CPU time
    before its first step (4.6 s, and 3.0 s without; one process, slm-1m, 2026-11-22).
    """
    was_collecting = gc.isenabled()
    gc.disable()
    if name == "__main__":
        _prepare_script()

    def imported() -> None:
        gc.freeze()
        if was_collecting:
            gc.enable()

    return imported


def _prepare_script() -> None:
    from slm_toolkit.base.errors import end_at_once

    end_with_launcher()
    leave_out_working_folder()  # before an import that the folder could shadow

    from slm_toolkit.config.flags import training_config

    # torch.cuda.is_available() would open CUDA here otherwise, and no forked child could use a GPU
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    end_at_once()  # importing torch and building the model take seconds
    training_config(sys.argv[1:])

    from slm_toolkit.hardware.machine import use_huge_pages
    from slm_toolkit.launch.command_line import check_command_line

    use_huge_pages()
    check_command_line(sys.argv[1:])


# A rank's launcher: find it, and make the kernel end this process with it.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"options of Linux's prctl"
_ONLY_LAUNCHERS_SET = "ACCELERATE_DYNAMO_MODE"
"accelerate's launcher sets this variable for every script that it starts without torch's launcher"
_LAUNCHERS = ("accelerate", "accelerate.commands.launch", "slm_toolkit.launch.launcher")
_STORE_SECONDS = 5.0
"time limit for torch's launcher to accept a connection; normally it takes milliseconds"


def launcher_pid() -> int | None:
    """Return the pid of the launcher that started this process as a rank; None without a launcher."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    # accelerate starts a single process without torch's launcher
    return parent if _is_launcher(parent) else None


def end_with_launcher(*, how: bool = True) -> None:
    """Make the kernel kill this process when its launcher ends; `how` False turns that off. Linux only.

    Works while torch is imported, which takes seconds and blocks our threads. If the launcher has already
    ended, this process exits.
    """
    launcher = launcher_pid()
    if launcher is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if how else 0)
    if how and (launcher not in (None, os.getppid()) or _has_lost_its_launcher()):
        sys.exit("error: the launcher ended while this process started")


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; end at once if that has ended. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of processes below it whose own parent ends. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(option, value)


def _has_lost_its_launcher() -> bool:
    """Return True if a launcher started this process but has ended, so that the parent is another process.

    torch's launcher serves a store, which refuses connections once the launcher has ended. Otherwise, if
    accelerate started this process or its parent, the parent's command line or environment shows it.
    """
    if _is_launcher(os.getppid()) or not Path("/proc/self/environ").exists():
        return False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _is_store_gone()
    entries = _read_proc(os.getppid(), "environ")
    return _ONLY_LAUNCHERS_SET in os.environ and _ONLY_LAUNCHERS_SET not in {
        entry.partition("=")[0] for entry in entries
    }


def _is_launcher(pid: int) -> bool:
    words = _read_proc(pid, "cmdline")
    return any(word in _LAUNCHERS or Path(word).name == "accelerate" for word in words)


def _is_store_gone() -> bool:
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(place, _STORE_SECONDS).close()
    except OSError as error:  # other network errors are reported later, when the ranks connect
        return isinstance(error, ConnectionRefusedError)
    return False


def _read_proc(pid: int, name: str) -> list[str]:
    """Return the null-separated parts of /proc/`pid`/`name`; empty if it can't be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes()).split("\0")
    except OSError:
        return []


def leave(exit_code: Any) -> NoReturn:
    """End a rank whose work is done, without shutting the Python interpreter down.

    If a gloo thread frees a tensor while the interpreter shuts down, C++ aborts (SIGABRT: "terminate called
    without an active exception") and the launcher reports a failed run. DeepSpeed keeps its process groups,
    and so these threads, until the end.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code and (path := os.environ.get(EXIT_CODE_VARIABLE)):
        Path(path).write_text(str(exit_code))
    os._exit(exit_code)
