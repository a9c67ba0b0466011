"""A process with torch, transformers, accelerate and DeepSpeed imported, forked for each launch and rank.

    python tests/warm/server.py SOCKET

Nearly all of the seconds that a small launch takes go into imports, in the launcher and in each rank. This
process has one thread besides pyarrow's, which Arrow starts again in a fork. So a fork is a whole process.
It ends when its stdin does. Who asks is `sitecustomize.py`.
"""

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import setproctitle

from slm_toolkit.launch import processes as launcher_gone

sys.path.insert(0, str(Path(__file__).parent))
from sitecustomize import MODULES, fixed, run_site

_POLL_SECONDS = 0.01
_ended_with: int | None = None  # of a fork whose program has ended
_C = ctypes.CDLL(None, use_errno=True)
WHEN_RUNNING = (  # modules that a launcher or rank imports after it has started
    *("transformers.models.llama.modeling_llama", "transformers.models.byt5.tokenization_byt5"),
    *("torch.distributed.run", "torch.utils.cpp_extension", "datasets"),
    "deepspeed.runtime.zero.muon.original_muon",  # two seconds: it imports the compiler
)


class Server:
    """Forks, and tells each client how its process ended; `serve` returns when stdin ends."""

    def __init__(self, path: str, before: dict[str, str]) -> None:
        """before: this process's environment before libraries added to it."""
        self._environment = fixed(before)
        self._added = os.environ.keys() - before.keys()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._clients: dict[int, socket.socket] = {}  # by the process that works for each

    def serve(self) -> None:
        while True:
            pid_of = {client.fileno(): pid for pid, client in self._clients.items()}
            wait = _POLL_SECONDS if pid_of else None
            ready, _, _ = select.select([0, self._listener.fileno(), *pid_of], [], [], wait)
            for number in ready:
                if number == 0:
                    for pid in self._clients:
                        os.kill(pid, 9)
                    return
                if number in pid_of:  # the client was killed: it has nothing to say
                    os.kill(pid_of[number], 9)
                else:
                    self._accept(self._listener.accept()[0])
            for pid in list(self._clients):
                self._look_after(pid)

    def _look_after(self, pid: int) -> None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with self._clients.pop(pid) as client:
                _say(client, status)

    def _accept(self, client: socket.socket) -> None:
        """Fork for it, or close the connection where a fork would not be what it was started as."""
        asked, files = _read(client)
        theirs = {
            name: value for name, value in asked.get("environment", {}).items() if name not in self._added
        }
        if asked and asked["prefix"] == sys.prefix and fixed(theirs) == self._environment:
            pid = os.fork()
            if pid == 0:
                self._become(asked, files, client)
            self._clients[pid] = client
            _say(client, pid)
        else:
            client.close()
        for file in files:
            os.close(file)

    def _become(self, asked: dict[str, Any], files: list[int], client: socket.socket) -> NoReturn:
        """The client's program, to its end: this fork serves nobody."""
        for each in (self._listener, client, *self._clients.values()):
            each.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _go_where(asked["pid"])
        added = {name: os.environ[name] for name in self._added if name in os.environ}
        os.environ.clear()
        os.environ.update({**added, **asked["environment"]})
        global _ended_with
        _ended_with = _exit_code_of(run, asked)
        sys.exit()


def run(asked: dict[str, Any]) -> None:
    """The program, in a process that looks to it like the client: its folder, command line and parents."""
    os.chdir(asked["folder"])
    setproctitle.setproctitle(" ".join(asked["command"]))
    parents = psutil.Process.parents
    psutil.Process.parents = lambda process: parents(
        psutil.Process(asked["pid"]) if process.pid == os.getpid() else process
    )
    me, parent = os.getpid(), os.getppid
    os.getppid = lambda: asked["parent"] if os.getpid() == me else parent()  # not in what this one forks
    launcher_gone.end_with_launcher = lambda **_: None  # this process ends with its client
    for module in ("random", "numpy.random", "torch"):  # each process begins with random numbers of its own
        sys.modules[module].seed()
    importlib.reload(sys.modules["slm_toolkit.run.peers.failure"])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in asked["command"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=at_once)
    option, *words = asked["words"]
    of_module = option == "-m"
    first = asked["folder"] if of_module else str(Path(option).parent)
    sys.path[:] = [*([] if os.environ.get("PYTHONSAFEPATH") else [first]), *asked["path"]]
    sys.orig_argv = asked["command"]
    run_site()
    sys.argv = words if of_module else asked["words"]
    if of_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(option, run_name="__main__")


def _exit_code_of(program: Callable[..., None], *arguments: Any) -> int:
    """Run it, and return what Python would end with."""
    try:
        program(*arguments)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave() -> None:
    """The last of a fork's exit handlers: to free all that was imported would take half a second."""
    if _ended_with is None:  # the server itself
        return
    logging.shutdown()  # its own handler was registered before this one
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    if _ended_with < 0:
        signal.signal(-_ended_with, signal.SIG_DFL)
        os.kill(os.getpid(), -_ended_with)
    os._exit(_ended_with & 0xFF)


def _go_where(pid: int) -> None:
    """Into that process's network, host name and mounts, where a test gave it some of its own."""
    kinds = [kind for kind in ("net", "uts", "mnt") if _namespace(pid, kind) != _namespace("self", kind)]
    files = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]  # mounts last: they hide /proc
    for file in files:
        if _C.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns to {kinds} of {pid}")
        os.close(file)


def _namespace(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _read(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What it asks, and its standard streams; nothing of one that ended meanwhile."""
    data, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while not data.endswith(b"\n"):
        more = client.recv(1 << 16)
        if not more:
            return {}, files
        data += more
    return json.loads(data), files


def _say(client: socket.socket, number: int) -> None:
    try:
        client.sendall(f"{number}\n".encode())
    except OSError:  # it ended meanwhile
        return


if __name__ == "__main__":
    atexit.register(_leave)  # before any other, as the last registered comes first
    found = dict(os.environ)
    setproctitle.setproctitle("the warm process of these tests")  # takes its room while it can

    for name in (*MODULES, "deepspeed", *WHEN_RUNNING):
        importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name)  # runpy warns of what it finds there
    assert psutil.Process().num_threads() <= 2, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy all of it
    Server(sys.argv[1], found).serve()
