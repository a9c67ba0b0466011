"""Asks the warm process of these tests to run what this Python was started for, and ends as it ends.

Read by each Python that the tests start with this folder on PYTHONPATH. Where the warm process can't do the
same (another environment, a variable that libraries read when they are imported), Python goes on as always.
"""

import os
import sys

SOCKET = os.environ.get("SLM_WARM_SOCKET")
MODULES = (
    *("slm_toolkit.train", "slm_toolkit.run_script"),
    *("slm_toolkit.launch.launcher", "accelerate.commands.launch"),
)
WHILE_RUNNING = (  # read by torch, accelerate, this project and its recipes, gloo and Python as they run
    *("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("PARALLELISM_CONFIG_", "SLM_", "PWD", "OLDPWD", "COLUMNS", "PYTEST_", "PYTHONPATH", "PYTHONSAFEPATH"),
    *("PYTHONUNBUFFERED", "TORCH_NCCL_", "NCCL_", "GLOO_", "TOKENIZERS_PARALLELISM", "TORCH_EXTENSIONS_DIR"),
    *("KMP_", "SHLVL", "LINES", "_", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "NO_COLOR", "TERM", "CUDA_HOME"),
    *(
        "TEST_",
        "TRY",
        "SLURM",
        "SRUN_",
        "ENVIRONMENT",
        "DATASET",
        "NODE",
        "GPUS_PER_NODE",
        "PORT",
        "HEAD_NODE",
    ),
)


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """The variables that may matter while libraries are imported."""
    return {name: value for name, value in environment.items() if not name.startswith(WHILE_RUNNING)}


def program(words: list[str]) -> list[str] | None:
    """`-m MODULE ARGUMENTS`, `.../accelerate ARGUMENTS` or `FILE.py ARGUMENTS` of a Python's command line.

    None for all else.
    """
    words = [word for word in words[1:] if word not in ("-u", "-P")] if words[1:2] != ["-c"] else []
    if words[:1] == ["-m"] and words[1:2] and words[1] in MODULES:
        return words
    if not words or (os.path.basename(words[0]) != "accelerate" and not _is_our_file(words[0])):
        return None
    return words


def _is_our_file(word: str) -> bool:
    """False for the workers of Inductor, which lie in the environment."""
    return word.endswith(".py") and not word.startswith(sys.prefix)


def run_there(words: list[str]) -> None:
    """Ends this process as that one ends; comes back where that one does not run it."""
    import contextlib
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as warm:
        try:
            warm.connect(SOCKET)
        except OSError:  # it is not there yet, or no more
            return
        asked = {
            "words": words,
            "command": sys.orig_argv,
            "folder": os.getcwd(),
            "path": sys.path,
            "environment": dict(os.environ),
            "prefix": sys.prefix,
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        socket.send_fds(warm, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
        answers = warm.makefile()
        pid = int(answers.readline() or 0)
        if not pid:
            return

        def pass_on(number: int, _: object) -> None:
            """An exception here would end this file, and Python would then run the program a second time."""
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is under way
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_on)
        code = os.waitstatus_to_exitcode(int(answers.readline() or 9))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL's action can't be set; an exception would run it twice
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_site() -> None:
    """What a test plants in its processes, be they warm or cold: the file that SLM_WARM_SITE names."""
    if site := os.environ.get("SLM_WARM_SITE"):
        import runpy

        runpy.run_path(site)


if SOCKET and (words := program(sys.orig_argv)) is not None:
    run_there(words)
run_site()
