"""The environment of the Python processes that we start: no module of the working folder is imported."""

import os
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
