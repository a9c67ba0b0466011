"""What the Python processes that we start have in common: a safe import path, an end with their launcher."""

import ctypes
import os
import signal
import socket
import sys
import sysconfig
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"


def safe_environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """`env`, or this process's environment, under which a folder's `yaml.py` shadows no installed package.

    This package is found where it lies, in a checkout that is not installed too. A script's own folder is
    left out as well, so this is for our own modules, not for a user's script.
    """
    env = dict(os.environ if env is None else env)
    root = Path(__file__).parents[2]
    # an empty entry stands for the working folder
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
    """Import nothing from the working folder where `safe_environment` was asked for: accelerate's launcher of
    DeepSpeed adds the folder to PYTHONPATH."""
    here = os.getcwd()
    if SAFE_PATH not in os.environ or here == str(Path(__file__).parents[2]):
        return
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in paths if path and os.path.abspath(path) != here
    )


# A rank's launcher: whether this process has one, and the kernel's help in ending with it.

_PR_SET_PDEATHSIG = 1
"of Linux's prctl"
_ONLY_LAUNCHERS_SET = "ACCELERATE_DYNAMO_MODE"
"accelerate's launcher does for every script that it starts without torch's launcher"
_LAUNCHERS = ("accelerate", "accelerate.commands.launch", "slm_toolkit.launch.launcher")
_STORE_SECONDS = 5.0
"for torch's launcher to take a connection, which it does in milliseconds"


def launcher_pid() -> int | None:
    """The process that started this one as a rank; None without a launcher."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    return parent if _is_launcher(parent) else None  # one process: accelerate starts it without torch's


def end_with_launcher(*, how: bool = True) -> None:
    """From now on the kernel kills this process when its launcher ends, in native code too; or no longer.

    For the seconds of importing torch, in which no thread of ours can look. A launcher that has ended by now
    ends this process, too. Linux only.
    """
    launcher = launcher_pid()
    if launcher is not None and (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if how else 0)
    if how and (launcher not in (None, os.getppid()) or _has_lost_its_launcher()):
        sys.exit("error: the launcher ended while this process started")


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends. Linux only."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_lost_its_launcher() -> bool:
    """Whether a launcher started this process and had ended by its first line, so that its parent is another.

    torch's launcher holds a store, which then refuses connections. accelerate alone would stand in the
    parent's command line, or, of a script that it started, in the parent's environment.
    """
    if _is_launcher(os.getppid()) or not Path("/proc/self/environ").exists():
        return False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _refuses(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        )
    if _ONLY_LAUNCHERS_SET not in os.environ:
        return False
    of_parent = _read_of(os.getppid(), "environ")
    return not any(entry.startswith(_ONLY_LAUNCHERS_SET.encode()) for entry in of_parent)


def _is_launcher(pid: int) -> bool:
    words = [os.fsdecode(word) for word in _read_of(pid, "cmdline")]
    return any(word in _LAUNCHERS or Path(word).name == "accelerate" for word in words)


def _refuses(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), _STORE_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # a network's trouble is told where the ranks meet
        return False


def _read_of(pid: int, name: str) -> list[bytes]:
    """The parts of /proc/`pid`/`name`; none where it is not for us."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []
