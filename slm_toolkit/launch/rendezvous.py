"""Lets the machines of a launch meet in a torch store, and names a machine that does not come in time.

Machine 0 writes the facts that must be equal on all machines. Every other machine compares them with its own
and keeps updating its entry while it waits. Later the ranks use the same functions to meet in the store of
torch's launcher.
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
"shortest time between two equal lines"
_NEWS_SECONDS = 2.0
"shortest time between two different lines"


@dataclass(frozen=True)
class Patience:
    """How long to wait for machines that have not come yet."""

    seconds: float
    silent_seconds: float
    "print nothing in these first seconds"
    hint: str
    "what a user can do if a machine does not come"


def patience_seconds() -> float:
    """Return the seconds to wait for a missing machine. Raises ValueError if the variable is not a time."""
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(text or PATIENCE_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise ValueError(
            f"{PATIENCE_VARIABLE} is {text!r}\nhint: seconds to wait for a missing machine, 1 or more"
        )
    return seconds


class Waiting:
    """Counts the time that is left and prints lines about it on stderr, but not too often."""

    def __init__(self, who: str, patience: Patience) -> None:
        self._who, self._seconds = who, patience.seconds
        self._began = time.monotonic()
        self._next = self._soonest = self._began + patience.silent_seconds
        self._last = ""

    @property
    def seconds_left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def say(self, line: str) -> None:
        """Print `line` if it is new, or was not printed for a while."""
        now = time.monotonic()
        if now >= self._next or (line != self._last and now >= self._soonest):
            self._next, self._soonest, self._last = now + _SAY_SECONDS, now + _NEWS_SECONDS, line
            self.note(f"{line}, {now - self._began:.0f} of {self._seconds:g} s")

    def go_on(self, line: str) -> None:
        """Print good news, if a line about waiting was printed before."""
        if self._last:
            self.note(line)

    def note(self, line: str) -> None:
        print(f"{self._who}: {shown(line)}", file=sys.stderr, flush=True)


_POLL_SECONDS = 0.25
"time between two reads of the store, and between two updates by a waiting machine"
_GONE_SECONDS = 3.0
"a machine without an update for this long has gone away"
_READ_SECONDS = 15.0
"time for all machines to read the answer, including late ones"
_ANSWER_SECONDS = 5.0
"machine 0 gives up this much earlier than machines that wait for it; also the limit to connect to a store"
_CONNECT_SECONDS = 10.0
_MOST_DIFFERENCES = 10
_SAME_COMMAND = "use the same files, versions and command on every machine; only --machine_rank differs"
_OWN_RANK = "every machine needs its own --machine_rank"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True)
class Machine:
    """This machine's part in a launch."""

    rank: int
    num_machines: int
    facts: dict[str, Any]
    "JSON values that must be equal on all machines"
    problem: str | None = None
    "the reason why this machine can't start; then all other machines end, too"


@dataclass(frozen=True)
class Peer:
    """Another machine, as machine 0 sees it."""

    rank: int
    address: str
    port: int
    "the port at the other machine's end of the connection"
    reached_at: str
    "the address at which the other machine reached machine 0"


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of all interfaces, in the family (IPv4 or IPv6) of `address`.

    With `port` 0, the system chooses a free port.
    Raises ValueError if the name is unknown or the port is taken.
    """
    family, _ = _resolve(address, port)
    try:
        return socket.create_server(("", port), family=family)
    except OSError as error:
        raise ValueError(
            f"can't listen on port {port} of this machine: {os.strerror(error.errno)}{_user_of(port)}\n"
            "hint: another launch may use it; give a free --main_process_port, the same on every machine"
        ) from None


def is_answered(port: int) -> bool:
    """Return True if a program of this machine listens on `port`; accelerate then chooses another port."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("localhost", port)) == 0


def is_own_address(address: str) -> bool:
    """Return True if `address` belongs to this machine. Raises ValueError if the name is unknown."""
    family, place = _resolve(address, 0)
    with socket.socket(family) as attempt:
        try:
            attempt.bind(place)
        except OSError:
            return False
    return True


def own_addresses() -> str:
    """Return this machine's addresses as `10.0.0.1 (eth0), ...`."""
    addresses = [
        f"{entry.address} ({name})"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    return ", ".join(addresses) or "none"


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            return name
    return None


def open_store(address: str, port: int) -> "Store":
    """Serve machine 0's store on all interfaces until it is garbage-collected. Raises like `listen`."""
    listen(address, port).close()  # report a taken port before the import, which takes seconds
    _torch_distributed()
    listener = listen(address, port)  # only now: other machines expect a store once the port is open
    port = listener.getsockname()[1]
    return _store(address, port, is_master=True, master_listen_fd=listener.detach())


def host(me: Machine, store: "Store", *, at: str, patience: Patience) -> list[Peer]:
    """Wait on machine 0, at the address `at`, for all others. Return them in order of rank.

    Raises ValueError on all machines if a machine does not come, can't start, or has different facts.
    """
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    store.set("said", json.dumps([me.num_machines, me.facts]))
    seen: dict[int, tuple[bytes, float]] = {}  # by rank: the last entry and the time of its arrival
    peers: dict[int, Peer] = {}
    problem, num_readers = None, me.num_machines - 1
    while problem is None and (missing := [rank for rank in range(1, me.num_machines) if rank not in peers]):
        missing_machines = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        waiting.say(f"waiting at {at} for {missing_machines}")
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
        new_ranks = fresh.keys() - peers.keys()
        peers = {rank: Peer(rank, *json.loads(entry)[:3]) for rank, entry in sorted(fresh.items())}
        for rank in new_ranks:
            waiting.go_on(f"machine {rank} is here ({peers[rank].address})")
        if store.check(["answer"]):
            problem = json.loads(store.get("answer"))
        elif waiting.seconds_left <= 0 and len(peers) < num_readers:
            num_readers = len(peers)
            problem = (
                f"{len(peers) + 1} of {me.num_machines} machines came within {patience.seconds:g} s: "
                f"{missing_machines} did not connect to {at}\nhint: {patience.hint}"
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
    """Find machine 0 and wait until all machines have come. Return a connection to machine 0.

    Raises ValueError like `host`.
    store: given by ranks, which already have one; None: connect to the store at `port`.
    """
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    place = f"{address}:{port}"
    waiting.say(f"looking for machine 0 at {place}")
    _torch_distributed()  # importing it takes seconds
    visit = _Visit(me, address, port, store)
    visit.start()
    while not wait([visit.answer], _POLL_SECONDS).done:
        if visit.is_met:
            waiting.say("machine 0 is there and waits for others")
        else:
            waiting.say(f"looking for machine 0 at {place}{visit.reason}")
        if waiting.seconds_left <= (-_ANSWER_SECONDS if visit.is_met else 0):  # machine 0 gives up first
            raise ValueError(
                f"machine {me.rank} of {me.num_machines} did not meet machine 0 at {place} within "
                f"{patience.seconds:g} s{visit.reason}\nhint: {patience.hint}"
            )
    return visit.answer.result()


def wait_until_closed(connection: socket.socket) -> None:
    """Wait until machine 0 has closed the store of this meeting, which it does once all have the answer.

    A launcher that started before would take that store for the one of machine 0's launcher, which has the
    same port, and be cut off.
    """
    select.select([connection], [], [], _READ_SECONDS + _ANSWER_SECONDS)


class _Visit(threading.Thread):
    """Looks for machine 0; its answer is a connection to it once all machines have come, or a ValueError.

    Runs in its own thread, because torch waits forever for a program or network that does not answer.
    """

    def __init__(self, me: Machine, address: str, port: int, store: "Store | None") -> None:
        super().__init__(daemon=True)
        self._me, self._place, self._store = me, (address, port), store
        self.answer: Future[socket.socket] = Future()
        self.is_met = False
        self.reason = ""
        "why machine 0 was not met yet"

    def run(self) -> None:
        while not self.answer.done():
            # a plain socket, because torch prints pages about a closed port and does not report a lost peer
            try:
                connection = socket.create_connection(self._place, _CONNECT_SECONDS)
                connection.settimeout(None)
            except OSError as error:  # also for a name that is not known yet
                self.reason = f" ({error.strerror or str(error) or 'no answer'})"
                time.sleep(_POLL_SECONDS)
                continue
            self.reason = " (no slm launch answers there: another program?)"
            try:
                self._wait_for_others(connection)
                self.answer.set_result(connection)
            except (ConnectionError, RuntimeError):  # torch.distributed raises RuntimeErrors
                self.is_met = False
                connection.close()
                time.sleep(_POLL_SECONDS)
            except Exception as error:
                self.answer.set_exception(error)

    def _wait_for_others(self, connection: socket.socket) -> None:
        place, key = connection.getsockname()[:2], f"machine {self._me.rank}"
        store = self._store or _store(*self._place, is_master=False)
        while not store.check(["said"]):  # a store of `accelerate launch` never has this key
            _sleep(connection)
        self.is_met, self.reason = True, " (it was there, but stopped answering)"
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
    """Sleep; raise ConnectionError as soon as the other side has ended."""
    if select.select([connection], [], [], _POLL_SECONDS)[0]:
        raise ConnectionError


def _torch_distributed() -> Any:
    """Import the module so that it prints no pages of C++ frames about lost connections."""
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    import torch.distributed as dist

    if not is_set:
        del os.environ[_LOG_LEVEL]  # the launch itself must print everything
    return dist


def _store(address: str, port: int, **options: Any) -> "Store":
    dist = _torch_distributed()
    timeout = timedelta(seconds=_ANSWER_SECONDS)
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout, **options)
    return dist.PrefixStore("slm_toolkit/meeting", store)


def _check(me: Machine, store: "Store", address: str) -> None:
    """Raise ValueError on all machines if this machine can't start, or its facts differ from machine 0's."""
    num_machines, facts = json.loads(store.get("said"))
    if not 0 < me.rank < num_machines:
        problem = (
            f"--machine_rank {me.rank} of {address}: ranks of {num_machines} machines are 0 to "
            f"{num_machines - 1}"
        )
        raise ValueError(f"{problem}\nhint: {_OWN_RANK}")
    machine = f"machine {me.rank} ({address})"
    theirs, mine = _flat(facts), _flat(me.facts)
    differences = [
        f"{name}: {theirs.get(name, 'not given')} on machine 0, {mine.get(name, 'not given')} on {machine}"
        for name in dict.fromkeys([*theirs, *mine])
        if theirs.get(name) != mine.get(name)
    ]
    num_more = len(differences) - _MOST_DIFFERENCES
    more = [f"and {num_more} more"] if num_more > 0 else []
    message = "\n".join([*differences[:_MOST_DIFFERENCES], *more, f"hint: {_SAME_COMMAND}"])
    if me.problem or differences:
        store.set("answer", json.dumps(f"{machine}: {me.problem}" if me.problem else message))
        store.add("num_readers", 1)
        raise ValueError(me.problem or message)


def _flat(value: dict[str, Any], before: str = "") -> dict[str, str]:
    """Flatten `{"a": {"b": 1}}` to {"a b": "1"}; leaves out None."""
    flat: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{before}{name} ")
        elif inner is not None:
            flat[f"{before}{name}"] = json.dumps(inner)
    return flat


def _user_of(port: int) -> str:
    """Return which process uses `port`, as the end of a message; empty if the system does not show it."""
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
            f"no such machine: {address} ({reason})\nhint: --main_process_ip must be an address of machine 0"
        ) from None
    return family, place
