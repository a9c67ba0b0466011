"""The machines of a launch meet in a store of torch's; a machine that does not come in time is named.

The first writes what must be equal on all machines. Each other compares, and writes an entry, with a beat, as
long as it waits. Ranks meet again by the same functions, in the store of torch's launcher.
"""

import json
import os
import select
import socket
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from slm_toolkit.base.errors import shown

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_VARIABLE = "SLM_PATIENCE_SECONDS"
PATIENCE_SECONDS = 300.0
_SAY_SECONDS = 30.0
"between two lines that say the same"
_NEWS_SECONDS = 2.0
"between two lines that don't"


@dataclass(frozen=True)
class Patience:
    """With machines that are not there."""

    seconds: float
    silent_seconds: float
    "at first, when nobody is late yet"
    hint: str
    "what to do about those that did not come"


def patience_seconds() -> float:
    """How long a machine may be missing. Raises ValueError for a variable that is no time."""
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(text or PATIENCE_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise ValueError(f"{PATIENCE_VARIABLE} is {text!r}\nhint: seconds to wait for a machine, 1 or more")
    return seconds


class Waiting:
    """The time that is left, and now and then a line about it on stderr."""

    def __init__(self, who: str, patience: Patience) -> None:
        self._who, self._seconds = who, patience.seconds
        self._began = time.monotonic()
        self._next = self._soonest = self._began + patience.silent_seconds
        self._last = ""

    @property
    def seconds_left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def say(self, line: str) -> None:
        """Print it where it is news, or has not been said for a while."""
        now = time.monotonic()
        if now >= self._next or (line != self._last and now >= self._soonest):
            self._next, self._soonest, self._last = now + _SAY_SECONDS, now + _NEWS_SECONDS, line
            self.note(f"{line}, {now - self._began:.0f} of {self._seconds:g} s")

    def go_on(self, line: str) -> None:
        """Print good news for whoever was told to wait."""
        if self._last:
            self.note(line)

    def note(self, line: str) -> None:
        print(f"{self._who}: {shown(line)}", file=sys.stderr, flush=True)


_POLL_SECONDS = 0.25
"between two looks into the store, and two beats of a machine that waits"
_GONE_SECONDS = 3.0
"without a beat: the machine has gone away"
_READ_SECONDS = 15.0
"for all machines to read the answer, those that come late too"
_ANSWER_SECONDS = 5.0
"for machine 0 to give up before those that wait for it do, and for another program to answer torch"
_CONNECT_SECONDS = 10.0
_MOST_DIFFERENCES = 10
_ALIKE = "the same command on every machine but for --machine_rank, with the same files and versions"
_OWN_RANK = "every machine has a --machine_rank of its own"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True)
class Machine:
    """One machine of a launch as it presents itself."""

    rank: int
    num_machines: int
    said: dict[str, Any]
    "what must be equal on all machines, as JSON"
    problem: str | None = None
    "why this machine can't start: machine 0 and all others end, too"


@dataclass(frozen=True)
class Peer:
    """Another machine, as the first one sees it."""

    rank: int
    address: str
    port: int
    "of its end of the connection"
    reached_at: str
    "machine 0's address, as this machine sees it"


def listen(address: str, port: int) -> socket.socket:
    """A socket on `port` (0: any that is free) of all interfaces, for addresses of `address`'s kind.

    Raises ValueError for a name that nobody knows and for a port that is taken.
    """
    family, _ = _resolve(address, port)
    try:
        return socket.create_server(("", port), family=family)
    except OSError as error:
        raise ValueError(
            f"can't listen on port {port} of this machine: {os.strerror(error.errno)}{_held_by(port)}\n"
            "hint: another launch? --main_process_port names a free one, the same on every machine"
        ) from None


def is_answered(port: int) -> bool:
    """Whether a program of this machine listens on `port`: what accelerate sees, and takes another."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("localhost", port)) == 0


def is_own_address(address: str) -> bool:
    """Whether `address` is one of this machine's. Raises ValueError for a name that nobody knows."""
    family, place = _resolve(address, 0)
    with socket.socket(family) as attempt:
        try:
            attempt.bind(place)
        except OSError:
            return False
    return True


def own_addresses() -> str:
    """Where others may find this machine: `10.0.0.1 (eth0), ...`."""
    found = [
        f"{entry.address} ({name})"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    return ", ".join(found) or "none"


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has this address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if address in [entry.address for entry in found]), None)


def open_store(address: str, port: int) -> "Store":
    """The first machine's store, on all its interfaces, as long as it is referred to. Raises as `listen`."""
    listen(address, port).close()  # a port that is taken is named before the seconds of the import
    _torch_distributed()
    listener = listen(address, port)  # not before: who finds it must find a store
    port = listener.getsockname()[1]
    return _store(address, port, is_master=True, master_listen_fd=listener.detach())


def host(me: Machine, store: "Store", *, at: str, patience: Patience) -> list[Peer]:
    """Wait on the first machine, found `at`, for all others; returns them in order of rank.

    Raises ValueError, on all machines, where one does not come or can't start, or where they differ.
    """
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    store.set("said", json.dumps([me.num_machines, me.said]))
    seen: dict[int, tuple[bytes, float]] = {}  # by rank, the last entry and when it was new
    peers: dict[int, Peer] = {}
    problem, num_readers = None, me.num_machines - 1
    while problem is None and (missing := [rank for rank in range(1, me.num_machines) if rank not in peers]):
        who = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        waiting.say(f"waiting at {at} for {who}")
        time.sleep(_POLL_SECONDS)
        for rank in range(1, me.num_machines):
            entry = store.get(f"machine {rank}") if store.check([f"machine {rank}"]) else b""
            if entry != seen.get(rank, (b"", 0.0))[0]:
                seen[rank] = (entry, time.monotonic())
        fresh = {
            rank: entry for rank, (entry, since) in seen.items() if time.monotonic() < since + _GONE_SECONDS
        }
        for rank in peers.keys() - fresh.keys():
            waiting.note(f"machine {rank} ({peers[rank].address}) went away again")
        came = fresh.keys() - peers.keys()
        peers = {rank: Peer(rank, *json.loads(entry)[:3]) for rank, entry in sorted(fresh.items())}
        for rank in came:
            waiting.go_on(f"machine {rank} is here ({peers[rank].address})")
        if store.check(["answer"]):
            problem = json.loads(store.get("answer"))
        elif waiting.seconds_left <= 0 and len(peers) < num_readers:
            num_readers = len(peers)
            problem = (
                f"{len(peers) + 1} of {me.num_machines} machines came within {patience.seconds:g} s: "
                f"nobody came to {at} as {who}\nhint: {patience.hint}"
            )
    store.set("answer", json.dumps(problem))
    until = time.monotonic() + _READ_SECONDS
    while store.add("num_readers", 0) < num_readers and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # the store ends with this process
    if problem is not None:
        raise ValueError(problem)
    return list(peers.values())


def attend(
    me: Machine, address: str, port: int, *, patience: Patience, store: "Store | None" = None
) -> socket.socket:
    """Find the first machine, and wait until all are there; returns a connection to it.

    Raises ValueError as `host` does.
    store: of ranks, which have one already; otherwise it is at `port`, too.
    """
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    where = f"{address}:{port}"
    waiting.say(f"looking for machine 0 at {where}")
    _torch_distributed()  # takes seconds, too
    visit = _Visit(me, address, port, store)
    visit.start()
    while not wait([visit.answer], _POLL_SECONDS).done:
        if visit.is_met:
            waiting.say("machine 0 is there and waits for others")
        else:
            waiting.say(f"looking for machine 0 at {where}{visit.why}")
        if waiting.seconds_left <= (-_ANSWER_SECONDS if visit.is_met else 0):  # machine 0 gives up first
            raise ValueError(
                f"machine {me.rank} of {me.num_machines} did not meet machine 0 at {where} within "
                f"{patience.seconds:g} s{visit.why}\nhint: {patience.hint}"
            )
    return visit.answer.result()


class _Visit(threading.Thread):
    """Looks for machine 0, and ends with a connection to it once all are there, or with a ValueError.

    In a thread of its own, since torch waits without end for a program, or a network, that is silent.
    """

    def __init__(self, me: Machine, address: str, port: int, store: "Store | None") -> None:
        super().__init__(daemon=True)
        self._me, self._place, self._store = me, (address, port), store
        self.answer: Future[socket.socket] = Future()
        self.is_met = False
        self.why = ""
        "it is not met"

    def run(self) -> None:
        while not self.answer.done():
            # torch writes pages about a port where nobody listens, and does not tell when the other side ends
            try:
                connection = socket.create_connection(self._place, _CONNECT_SECONDS)
                connection.settimeout(None)
            except OSError as error:  # also of a name that nobody knows yet
                self.why = f" ({error.strerror or str(error) or 'no answer'})"
                time.sleep(_POLL_SECONDS)
                continue
            self.why = " (no slm launch answers there: another program?)"
            try:
                self._wait_for_others(connection)
                self.answer.set_result(connection)
            except (ConnectionError, RuntimeError):  # torch.distributed's are RuntimeErrors
                self.is_met = False
                connection.close()
                time.sleep(_POLL_SECONDS)
            except Exception as error:
                self.answer.set_exception(error)

    def _wait_for_others(self, connection: socket.socket) -> None:
        place, key = connection.getsockname()[:2], f"machine {self._me.rank}"
        store = self._store or _store(*self._place, is_master=False)
        while not store.check(["said"]):  # never where `accelerate launch` has its store
            _sleep(connection)
        self.is_met, self.why = True, " (it was there, and does not answer any more)"
        _check(self._me, store, place[0])
        entry = b""
        while not store.check(["answer"]):
            if entry and (other := store.get(key)) != entry:
                taken = f"--machine_rank {self._me.rank} of {place[0]} is taken by {json.loads(other)[0]}"
                raise ValueError(f"{taken}\nhint: {_OWN_RANK}")
            entry = json.dumps([*place, connection.getpeername()[0], time.monotonic()]).encode()
            store.set(key, entry)
            _sleep(connection)
        problem = json.loads(store.get("answer"))
        store.add("num_readers", 1)
        if problem is not None:
            raise ValueError(problem)


def _sleep(connection: socket.socket) -> None:
    """Raises ConnectionError as soon as the other side has ended."""
    if select.select([connection], [], [], _POLL_SECONDS)[0]:
        raise ConnectionError


def _torch_distributed() -> Any:
    """The module, which prints no pages of C++ frames about lost connections where it is imported here."""
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    import torch.distributed as dist

    if not is_set:
        del os.environ[_LOG_LEVEL]  # the launch that follows prints all
    return dist


def _store(address: str, port: int, **options: Any) -> "Store":
    dist = _torch_distributed()
    timeout = timedelta(seconds=_ANSWER_SECONDS)
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout, **options)
    return dist.PrefixStore("slm_toolkit/meeting", store)


def _check(me: Machine, store: "Store", address: str) -> None:
    """Raises ValueError, on all machines, where this one can't start, or with what is not as on machine 0."""
    num_machines, said = json.loads(store.get("said"))
    if not 0 < me.rank < num_machines:
        wrong = f"--machine_rank {me.rank} of {address}: {num_machines} machines have 0 to {num_machines - 1}"
        raise ValueError(f"{wrong}\nhint: {_OWN_RANK}")
    who = f"machine {me.rank} ({address})"
    theirs, mine = _flat(said), _flat(me.said)
    found = [
        f"{name}: {theirs.get(name, 'not said')} on machine 0, {mine.get(name, 'not said')} on {who}"
        for name in dict.fromkeys([*theirs, *mine])
        if theirs.get(name) != mine.get(name)
    ]
    more = [f"and {len(found) - _MOST_DIFFERENCES} more"] if len(found) > _MOST_DIFFERENCES else []
    differences = "\n".join([*found[:_MOST_DIFFERENCES], *more, f"hint: {_ALIKE}"])
    if me.problem or found:
        store.set("answer", json.dumps(f"{who}: {me.problem}" if me.problem else differences))
        store.add("num_readers", 1)
        raise ValueError(me.problem or differences)


def _flat(value: dict[str, Any], before: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}`: {"a b": "1"}."""
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found |= _flat(inner, f"{before}{name} ")
        elif inner is not None:
            found[f"{before}{name}"] = json.dumps(inner)
    return found


def _held_by(port: int) -> str:
    """Which process has `port`, where this user may know, and the system: of one that listens, or talks."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f", by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def _resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"no such machine: {address} ({reason})\nhint: --main_process_ip is an address of machine 0"
        ) from None
    return family, place
