"""A process that runs the arms of measure.py, one after the other, each forked with its imports done.

    python bench/gpu/keeper.py [--fork]        # requests on stdin, answers on stdout, a line of JSON each

Importing torch, transformers, accelerate and DeepSpeed takes a process about 10 s; a fork of one that has
imported them takes none. Without --fork nothing is imported, and every arm is a fresh process. Each arm is a
session of its own. All that an arm has started is killed when the arm ends or its time is over, and when
stdin ends, because measure.py was killed: orphans become this process's children (Linux's child subreaper),
and so none is missed, whatever session it has opened.

This process never initialises CUDA, which no fork would survive; it says whether some import did.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil

MODULES = ("torch", "transformers", "accelerate", "deepspeed", "slm_toolkit.train", "torch.distributed.run")
ALSO = ("accelerate.commands.launch", "transformers.models.llama.modeling_llama", "torch._dynamo")
VERSIONS = ("torch", "triton", "transformers", "accelerate", "deepspeed", "numpy", "nvidia-ml-py", "msgspec")
OPTIONAL = ("torchao", "flash_attn", "litgpt")
TRAIN, LAUNCHER = "slm_toolkit.train", "slm_toolkit.launch.launcher"
NO_FORK = 97
"exit code of a fork that could not become the arm: measure.py starts a fresh process instead"
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CUDA_ERROR_NOT_INITIALIZED = 3


def imported(*, fork: bool) -> dict[str, Any]:
    """What this machine has: versions, which optional packages, and the error of each import that failed."""
    began, failed = time.monotonic(), {}
    sys.modules["torchao"] = None  # transformers would import it, and it initialises CUDA
    for name in (*MODULES, *ALSO) if fork else ():
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever: it is what is to be shown
            failed[name] = f"{type(error).__name__}: {error}"
    del sys.modules["torchao"]
    return {
        "failed_imports": failed,
        "import_seconds": time.monotonic() - began,
        "cuda_initialized": _cuda_is_initialized(),
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
        "optional": [name for name in OPTIONAL if importlib.util.find_spec(name) is not None],
    }


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _cuda_is_initialized() -> bool:
    """Whether this process has called cuInit. Asks the driver, which answers NOT_INITIALIZED before that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED


def serve(requests: int, answer: Callable[[dict[str, Any]], None], *, fork: bool) -> None:
    """Run what is asked, until nobody can ask any more."""
    unread = b""
    while True:
        while b"\n" not in unread:
            read = os.read(requests, 1 << 16)
            if not read:
                return
            unread += read
        line, unread = unread.split(b"\n", 1)
        answer(run(json.loads(line), requests, fork=fork))


def run(asked: dict[str, Any], requests: int, *, fork: bool) -> dict[str, Any]:
    """One arm, to its end or to the end of its time: its exit code, and whether time ended it."""
    began = time.monotonic()
    command, log = asked["command"], asked["log"]
    forked = fork and command[1] != "-c" and not asked["fresh"]
    pid = os.fork()
    if pid == 0:
        _become(command, log, weights_on_gpu=asked["weights_on_gpu"], forked=forked)
    code, timed_out = None, False
    while code is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        elif timed_out := time.monotonic() - began > asked["limit_seconds"]:
            break
        elif select.select([requests], [], [], _POLL_SECONDS)[0] and not _is_open(requests):
            kill_all()
            sys.exit()
    kill_all()
    seconds = time.monotonic() - began
    return {"code": code, "timed_out": timed_out, "seconds": seconds, "forked": forked}


def _is_open(requests: int) -> bool:
    """measure.py sends the next request after the answer to the last: input before that is its end."""
    return os.read(requests, 1) != b""


def kill_all() -> None:
    """Kill this process's children and theirs until there are none; each one killed hands on its own."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def _become(command: list[str], log: str, *, weights_on_gpu: bool, forked: bool) -> NoReturn:
    """The arm, in a session of its own, its output in `log`; this fork serves nobody."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        file = os.open(log if number else os.devnull, flags | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if not forked:
        os.execvp(command[0], command)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    try:
        code = _of_exit(_run_here, command, weights_on_gpu)
    except BaseException:  # as Python ends with a traceback and 1
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_exit(work: Callable[..., None], *arguments: Any) -> int:
    try:
        work(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _run_here(command: list[str], weights_on_gpu: bool) -> None:
    """Python's `[-m MODULE | FILE] ARGUMENTS`, as if this process had been started with it."""
    importlib.reload(sys.modules["slm_toolkit.run.peers.failure"])
    sys.orig_argv = command
    if command[1] != "-m":
        sys.argv = command[1:]
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")
        return
    words = command[3:]
    if command[2] == LAUNCHER:
        at = words.index("-m")
        launch_environment(words)
        launcher = _Launcher(command, os.getcwd())
        psutil.Process.parents = lambda _: [launcher]  # where the trainer looks for its strategy
        words = words[at + 2 :]
    elif command[2] != TRAIN:
        sys.exit(NO_FORK)
    train = sys.modules[TRAIN]
    sys.argv = [train.__file__, *words]
    if weights_on_gpu:
        draw_weights_on_gpu()
    train.main(words)


@dataclass(frozen=True)
class _Launcher:
    """As much of a psutil.Process as the trainer asks of its launcher."""

    command: list[str]
    folder: str

    def cmdline(self) -> list[str]:
        return self.command

    def cwd(self) -> str:
        return self.folder


def launch_environment(words: list[str]) -> None:
    """Give this process the environment that `accelerate launch` with these words gives its only rank."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    started: list[dict[str, str]] = []

    def by_torch(_: Any) -> None:
        started.append({**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
        started[0] |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        started[0] |= {"MASTER_PORT": words[words.index("--main_process_port") + 1]}

    class Popen:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.append(env)

        def wait(self) -> int:
            return 0

    with patch("torch.distributed.run.run", by_torch), patch.object(subprocess, "Popen", Popen):
        launch_command(launch_command_parser().parse_args(words))
    if len(started) != 1:
        sys.exit(NO_FORK)
    os.environ.update(started[0])


def draw_weights_on_gpu() -> None:
    """Draw the model's weights on the GPU, where 2B of them take no 10 s; other numbers, the same speed.

    Memory that building took is handed back, so that peaks count what training takes.
    """
    import torch

    from slm_toolkit.run import setup as job
    from slm_toolkit.run.model import model

    build, draw = job.build_model, model.drawn_model

    def drawn(*arguments: Any) -> torch.nn.Module:
        with torch.device("cuda"):
            return draw(*arguments)

    def built(*arguments: Any, **options: Any) -> torch.nn.Module:
        whole = build(*arguments, **options)
        torch.cuda.empty_cache()
        return whole

    if torch.cuda.is_available():
        model.drawn_model, job.build_model = drawn, built


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fork", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends measure.py, and so this
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    answers = os.dup(1)
    os.dup2(2, 1)  # imports may print
    os.set_inheritable(answers, False)

    def answer(row: dict[str, Any]) -> None:
        os.write(answers, json.dumps(row).encode() + b"\n")

    answer(imported(fork=args.fork))
    serve(0, answer, fork=args.fork)
    kill_all()


if __name__ == "__main__":
    main()
