"""The machines of a launch meet where the first one listens; who does not come in time is named.

Every other machine sends the first a line of JSON, its number and what all must say alike, and gets a line
back once all are there: that all is well, or what is wrong. The connection is the caller's from then on.
"""

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from slm_toolkit.base.user_files import json_of

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

    @property
    def seconds_until_next(self) -> float:
        """Until there is something to say, or until the end; never 0, which would mean not to wait."""
        return max(0.01, min(self._next - time.monotonic(), self.seconds_left))

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
        print(f"{self._who}: {line}", file=sys.stderr, flush=True)


_RETRY_SECONDS = 0.5
_HELLO_SECONDS = 5.0
"for the line of somebody who has connected"
_LONGEST_LINE = 2**20
_MOST_DIFFERENCES = 10
_ALIKE = "the same command on every machine but for --machine_rank, with the same files and versions"


@dataclass(frozen=True)
class Machine:
    """One machine of a launch as it presents itself."""

    rank: int
    num_machines: int
    said: dict[str, Any]
    "what all of them must say alike, as JSON"


@dataclass(frozen=True)
class Link:
    """An open connection to another machine."""

    rank: int
    address: str
    socket: socket.socket

    @property
    def interface(self) -> str | None:
        """The network interface of this machine that it goes through."""
        own = self.socket.getsockname()[0]
        named = psutil.net_if_addrs().items()
        return next((name for name, found in named if own in [entry.address for entry in found]), None)


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


def host(me: Machine, listener: socket.socket, *, at: str, patience: Patience) -> list[Link]:
    """Wait on the first machine, found `at`, for all others; their links in order of rank.

    Raises ValueError, which the others are told too, where one does not come, or where they differ.
    """
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    guests: dict[int, _Guest] = {}
    try:
        with selectors.DefaultSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            while missing := [rank for rank in range(1, me.num_machines) if rank not in guests]:
                who = _machines(missing)
                waiting.say(f"waiting at {at} for {who}")
                if waiting.seconds_left <= 0:
                    came = f"{len(guests) + 1} of {me.num_machines} machines came"
                    raise ValueError(
                        f"{came} within {patience.seconds:g} s: nobody came to {at} as {who}"
                        f"\nhint: {patience.hint}"
                    )
                for key, _ in ready.select(waiting.seconds_until_next):
                    if key.fileobj is not listener:  # who has said all: the end of the connection
                        ready.unregister(key.fileobj)
                        gone = guests.pop(key.data.link.rank).link
                        gone.socket.close()
                        waiting.note(f"machine {gone.rank} ({gone.address}) went away again")
                    elif (guest := _welcome(me, listener, guests, waiting)) is not None:
                        guests[guest.link.rank] = guest
                        ready.register(guest.link.socket, selectors.EVENT_READ, guest)
        _check_alike(me, [guests[rank] for rank in sorted(guests)])
    except ValueError as error:
        _answer(guests.values(), str(error))
        raise
    _answer(guests.values(), None)
    return [guests[rank].link for rank in sorted(guests)]


def attend(me: Machine, address: str, port: int, *, patience: Patience) -> Link:
    """Find the first machine, and wait there until all are there. Raises ValueError as `host` does."""
    waiting = Waiting(f"machine {me.rank} of {me.num_machines}", patience)
    where, why = f"{address}:{port}", ""
    while waiting.seconds_left > 0:
        waiting.say(f"looking for machine 0 at {where}{why}")
        try:
            return _present(me, address, port, waiting)
        except OSError as error:  # also of a name that nobody knows yet
            why = f" ({error.strerror or str(error) or 'no answer'})"
        time.sleep(min(_RETRY_SECONDS, max(waiting.seconds_left, 0)))
    raise ValueError(
        f"machine {me.rank} of {me.num_machines} did not meet machine 0 at {where} within "
        f"{patience.seconds:g} s{why}\nhint: {patience.hint}"
    )


@dataclass(frozen=True)
class _Guest:
    link: Link
    said: dict[str, Any]


def _welcome(
    me: Machine, listener: socket.socket, guests: dict[int, _Guest], waiting: Waiting
) -> _Guest | None:
    """Who has just connected; None, after a line about it, for what can't be another machine of ours."""
    connection, (address, *_) = listener.accept()
    connection.settimeout(_HELLO_SECONDS)
    try:
        rank, said = hello_of(_line_from(connection))
        guest = _Guest(Link(rank, address, connection), said)
    except (OSError, ValueError):
        connection.close()
        waiting.note(f"somebody at {address} connected who is no machine of an `slm launch`")
        return None
    connection.settimeout(None)
    rank = guest.link.rank
    taken = me if rank == me.rank else guests.get(rank)
    if taken is None and 0 < rank < me.num_machines:
        waiting.go_on(f"machine {rank} is here ({address})")
        return guest
    problem = (
        f"--machine_rank {rank} of {address}: {me.num_machines} machines have 0 to {me.num_machines - 1}"
    )
    if taken is not None:
        by = "this machine" if taken is me else taken.link.address
        problem = f"--machine_rank {rank} of {address} is taken by {by}"
    waiting.note(f"{problem}; it was sent away")
    _answer([guest], f"{problem}\nhint: every machine has a --machine_rank of its own")
    connection.close()
    return None


def _answer(guests: Iterable[_Guest], problem: str | None) -> None:
    for guest in guests:
        try:
            guest.link.socket.sendall(json.dumps({"problem": problem}).encode() + b"\n")
        except OSError:  # it has ended, and will be missed
            continue


def _present(me: Machine, address: str, port: int, waiting: Waiting) -> Link:
    """One attempt: connect, say who we are, and wait for what the first machine says once all are there.

    Raises OSError where nobody is there, ValueError with what it finds wrong.
    """
    connection = socket.create_connection((address, port), timeout=waiting.seconds_until_next)
    try:
        connection.sendall(json.dumps({"machine_rank": me.rank, "said": me.said}).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            waiting.say("machine 0 is there and waits for others")
            if waiting.seconds_left < -_HELLO_SECONDS:  # it should have lost its patience first, and said so
                raise TimeoutError("machine 0 says nothing")
            connection.settimeout(max(1.0, waiting.seconds_until_next))
            try:
                part = connection.recv(_LONGEST_LINE)
            except TimeoutError:
                continue
            if not part:
                raise ConnectionError("who answers there ends the connection: another program?")
            said += part
            if len(said) > _LONGEST_LINE:
                raise ConnectionError("who answers there says too much: another program?")
        connection.settimeout(None)
        if (problem := answer_of(said)) is not None:
            raise ValueError(problem)
    except (OSError, ValueError):
        connection.close()
        raise
    return Link(0, connection.getpeername()[0], connection)


def hello_of(line: bytes) -> tuple[int, dict[str, Any]]:
    """What a machine says as it comes: its rank, and what all must say alike. ValueError for a stranger's."""
    hello = _object(line)
    rank, said = hello.get("machine_rank"), hello.get("said")
    if type(rank) is not int or not isinstance(said, dict):
        raise ValueError(f"no machine_rank, or nothing said\nhint: {_STRANGER}")
    return rank, said


def answer_of(line: bytes) -> str | None:
    """What the first machine says once all are there: a problem, or None. ValueError for a stranger's."""
    problem = _object(line).get("problem", ())
    if not isinstance(problem, str | None):
        raise ValueError(f"machine 0 answers something else\nhint: {_STRANGER}")
    return problem


def _object(line: bytes) -> dict[str, Any]:
    content = json_of(line.decode(errors="replace"), "what another machine says", hint=_STRANGER)
    if not isinstance(content, dict):
        raise ValueError(f"what another machine says is no object\nhint: {_STRANGER}")
    return content


_STRANGER = "is another program at that port?"


def _line_from(connection: socket.socket) -> bytes:
    """Up to the end of a line; what comes in no time, or never ends, is none."""
    said = b""
    while not said.endswith(b"\n"):
        part = connection.recv(_LONGEST_LINE)
        if not part or len(said) > _LONGEST_LINE:
            raise ValueError("no line")
        said += part
    return said


def _check_alike(me: Machine, guests: list[_Guest]) -> None:
    """Raises ValueError with what the machines don't say alike."""
    mine = _flat(me.said)
    found = []
    for guest in guests:
        theirs = _flat(guest.said)
        found += [
            f"{name}: {mine.get(name, 'not said')} on machine 0, "
            f"{theirs.get(name, 'not said')} on machine {guest.link.rank} ({guest.link.address})"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]
    if found:
        more = [f"and {len(found) - _MOST_DIFFERENCES} more"] if len(found) > _MOST_DIFFERENCES else []
        raise ValueError("\n".join([*found[:_MOST_DIFFERENCES], *more]) + f"\nhint: {_ALIKE}")


def _flat(value: dict[str, Any], before: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}`: {"a b": "1"}."""
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found |= _flat(inner, f"{before}{name} ")
        elif inner is not None:
            found[f"{before}{name}"] = json.dumps(inner)
    return found


def _machines(ranks: list[int]) -> str:
    return f"machine{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
