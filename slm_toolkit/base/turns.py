"""Turns of runs on one machine: one run computes for a few steps while the others wait.

A run requests a turn over a socket and waits for the answer, a number of steps. Its next request ends the
turn. In each cycle every run gets one turn, of equally many steps. So runs of equally many steps end
together, and no run is alone while it is timed. A run keeps its last turn until its processes have ended,
because saving, writing the record and ending take CPU time, too.
"""

import json
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from statistics import median

TURNS_VARIABLE = "SLM_TURNS"
"environment variable of a run that takes turns: a JSON list of the socket's path and the run's name"
TURN_SECONDS = 0.12
"a turn takes about this long: if the machine is slow for a second, that then slows down all runs"
MOST_SECONDS = 60.0
"a run that keeps its turn for longer, because it saves a checkpoint or hangs, no longer stops the others"
_NO_MORE_TURNS = 10**9
"steps of the last turn: those that a run does after the comparison has ended"
_LONGEST_PATH = 100
"the kernel allows a socket's path 107 characters"


class Turns:
    """Gives runs their turns."""

    def __init__(self, names: Iterable[str]) -> None:
        self._not_ready = set(names)
        "runs that are starting. Nobody gets a turn until all have started or ended: starting takes CPU time"
        self._names: dict[socket.socket, str] = {}
        self._ended: set[str] = set()
        self._step_seconds: dict[socket.socket, float | None] = {}
        "of the runs that have requested a turn, until they end; None before a run's first step"
        self._waiting: list[socket.socket] = []
        "in the order of their requests"
        self._cycle: deque[socket.socket] = deque()
        "the runs that still get a turn in this cycle"
        self._num_steps = 1
        "of each turn in this cycle"
        self._holder: socket.socket | None = None
        self._late: set[socket.socket] = set()
        "runs that have kept their turn for MOST_SECONDS; a cycle begins without them"
        self._given_at = 0.0
        self._path = ""

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a run that is about to start, perhaps again."""
        self._not_ready.add(name)
        self._ended.discard(name)
        return {TURNS_VARIABLE: json.dumps([self._path, name])}

    def ended(self, name: str) -> None:
        """Note that a run's processes have ended, or that it starts none."""
        self._not_ready.discard(name)
        self._ended.add(name)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give turns, in a thread."""
        folder = tempfile.mkdtemp(prefix="slm-turns-")  # only this user can open it
        if len(folder) > _LONGEST_PATH:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="slm-turns-", dir="/tmp")
        self._path, stop = os.path.join(folder, "turns"), threading.Event()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self._path)
                listener.listen()
                thread = threading.Thread(target=self._give, args=(listener, stop), daemon=True)
                thread.start()
                try:
                    yield
                finally:
                    stop.set()
                    thread.join()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _give(self, listener: socket.socket, stop: threading.Event) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while not stop.is_set():
                    for key, _ in selector.select(0.1):
                        if key.fileobj is listener:
                            selector.register(listener.accept()[0], selectors.EVENT_READ)
                        elif not self._read(key.fileobj):
                            selector.unregister(key.fileobj)
                            key.fileobj.close()
                    self._give_next()
            finally:  # runs that still wait then go on without turns
                for key in list(selector.get_map().values()):
                    key.fileobj.close()

    def _give_next(self) -> None:
        """Give the next turn if the machine is free."""
        if self._names.get(self._holder) in self._ended | self._not_ready:  # not ready: it is launched again
            self._holder = None
        if self._holder is not None and time.monotonic() > self._given_at + MOST_SECONDS:
            self._late.add(self._holder)
            self._holder = None
        if self._holder is not None or self._not_ready:
            return
        if not self._cycle and self._waiting and self._step_seconds.keys() <= {*self._waiting, *self._late}:
            self._cycle = deque(self._waiting)
            known = [seconds for seconds in self._step_seconds.values() if seconds]
            self._num_steps = max(1, round(TURN_SECONDS / median(known))) if known else 1
        if self._cycle:
            self._holder, self._given_at = self._cycle.popleft(), time.monotonic()
            self._waiting.remove(self._holder)
            with suppress(OSError):  # the run has just ended; the next read finds that
                self._holder.sendall(f"{self._num_steps}".encode())

    def _read(self, run: socket.socket) -> bool:
        """Read a run's request. Return False if its connection has ended."""
        try:
            request = run.recv(4096)
        except OSError:
            request = b""
        self._late.discard(run)
        if request:
            if self._holder is run:
                self._holder = None
            self._names[run], self._step_seconds[run] = json.loads(request)
            self._not_ready.discard(self._names[run])
            self._waiting.append(run)
            return True
        self._step_seconds.pop(run, None)
        self._waiting = [other for other in self._waiting if other is not run]
        self._cycle = deque(other for other in self._cycle if other is not run)
        return False


class OwnTurns:
    """The turns of this process's run."""

    def __init__(self, path: str, name: str) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def wait(self, step_seconds: float | None) -> int:
        """End this run's turn and wait for the next one. Return the number of its steps.

        `step_seconds`: of the last step; None before the first. If the comparison has ended, return at once.
        """
        with suppress(OSError):
            self._socket.sendall(json.dumps([self._name, step_seconds]).encode())
            return int(self._socket.recv(16) or _NO_MORE_TURNS)
        return _NO_MORE_TURNS


def own_turns() -> OwnTurns | None:
    """Return the turns of this process's run; None if it takes none, or if the comparison has ended."""
    if TURNS_VARIABLE not in os.environ:
        return None
    path, name = json.loads(os.environ[TURNS_VARIABLE])
    with suppress(OSError):
        return OwnTurns(path, name)
    return None
