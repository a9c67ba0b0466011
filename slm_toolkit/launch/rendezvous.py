"""The meeting of a launch's machines: all come to machine 0, which names those missing or different.

Launchers meet before they start ranks, and later the first ranks of all machines. Machine 0 calls `host`,
every other machine `join`; both raise ValueError with the same message on all machines.
"""

import json
import os
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from slm_toolkit.base.errors import shown

PATIENCE_VARIABLE = "SLM_PATIENCE_SECONDS"
PATIENCE_SECONDS = 300.0
_SILENT_SECONDS, _SAY_SECONDS = 10.0, 30.0
"time before the first line about waiting, because other machines import torch, and between two lines"
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 10.0
"time limit for machine 0 to accept a connection and to answer; a stranger may keep it for _HELLO_SECONDS"
_HELLO_SECONDS = 2.0
_IMPORT_SECONDS = 120.0
_MOST_BYTES = 2**20
_WELCOME = b"slm launch\n"
"machine 0's answer to an entry; a second line follows when all have come: a JSON string, empty or a problem"
_MOST_DIFFERENCES = 10
_UNSET = "not given"


def patience_seconds() -> float:
    """Return the seconds to wait for a missing machine. Raises ValueError if the variable is not a time."""
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_SECONDS))
    with suppress(ValueError):
        if 1 <= float(text) < float("inf"):
            return float(text)
    raise ValueError(
        f"{PATIENCE_VARIABLE} is {text!r}\nhint: seconds to wait for a missing machine, 1 or more"
    )


@dataclass(frozen=True)
class Entry:
    """What a machine writes to machine 0."""

    rank: int
    facts: dict[str, Any]
    "JSON values that must be equal on all machines"


class Wait:
    """The time that a machine waits for others. `hint`: what a user can do at its end."""

    def __init__(self, rank: int, num_machines: int, *, hint: str) -> None:
        self.num_machines, self._who, self._hint = num_machines, f"machine {rank} of {num_machines}", hint
        self._seconds = patience_seconds()
        self._began, self._say_after = time.monotonic(), _SILENT_SECONDS

    def seconds_left(self, whom: str) -> float:
        """Print now and then whom this machine waits for. Raises ValueError when the time is over."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            raise ValueError(f"{self._who} waited {self._seconds:g} s for {whom}\nhint: {self._hint}")
        if waited >= self._say_after:
            self._say_after = waited + _SAY_SECONDS
            line = shown(f"{self._who}: waiting for {whom}")
            print(f"{line}, {waited:.0f} of {self._seconds:g} s", file=sys.stderr, flush=True)
        return self._seconds - waited


def host(
    listener: socket.socket, address: str, facts: dict[str, Any], wait: Wait
) -> dict[int, socket.socket]:
    """Wait for all other machines, close the listener, and return their connections by rank.

    `address`: machine 0's, for messages. Raises ValueError, here and on the machines that came, if one does
    not come or has different facts.
    """
    came: dict[int, socket.socket] = {}
    place = f"{address}:{listener.getsockname()[1]}"
    listener.settimeout(_POLL_SECONDS)
    try:
        with listener:
            while True:
                for rank in [rank for rank, connection in came.items() if is_readable(connection)]:
                    came.pop(rank).close()  # it ended, and may come again
                missing = [str(rank) for rank in range(1, wait.num_machines) if rank not in came]
                if not missing:
                    break
                wait.seconds_left(f"machine{'s' * (len(missing) > 1)} {', '.join(missing)} at {place}")
                with suppress(OSError, msgspec.MsgspecError):  # nobody came, or a stranger
                    _welcome(listener.accept()[0], came, wait.num_machines, facts)
    except ValueError as error:
        for connection in came.values():
            _send(connection, str(error))
        raise
    for connection in came.values():
        _send(connection, "")
    return came


def _welcome(
    connection: socket.socket, came: dict[int, socket.socket], num_machines: int, facts: dict[str, Any]
) -> None:
    """Read a machine's entry. Raises OSError or MsgspecError for a stranger."""
    connection.settimeout(_HELLO_SECONDS)
    entry = msgspec.json.decode(connection.makefile("rb").readline(_MOST_BYTES), type=Entry)
    if not 0 < entry.rank < num_machines:
        raise OSError("no such machine")
    connection.sendall(_WELCOME)
    address = address_of(connection)
    if (earlier := came.pop(entry.rank, None)) is not None:
        taken = f"--machine_rank {entry.rank} of {address_of(earlier)} is taken by {address}"
        _send(earlier, f"{taken}\nhint: every machine needs its own --machine_rank")
    came[entry.rank] = connection
    _check_equal(facts, entry.facts, f"machine {entry.rank} ({address})")


def _send(connection: socket.socket, problem: str) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(problem).encode() + b"\n")


def join(entry: Entry, place: tuple[str, int], wait: Wait) -> socket.socket:
    """Come to machine 0 at `place`, wait until all machines have come, and return the connection.

    Raises ValueError if machine 0 does not come, or with the problem that it sends.
    """
    reason = ""
    while True:
        left = wait.seconds_left("machine 0 at {}:{}{}".format(*place, reason))
        try:
            connection, problem = _come(entry, place, left)
        except OSError as error:  # also for a name that is not known yet
            reason = f" ({error.strerror or error})"
            time.sleep(_POLL_SECONDS)
            continue
        if problem:
            raise ValueError(problem)
        return connection


def _come(entry: Entry, place: tuple[str, int], seconds: float) -> tuple[socket.socket, str]:
    """Return the connection and machine 0's answer. Raises OSError if there is none."""
    connection = socket.create_connection(place, min(seconds, _ANSWER_SECONDS))
    with connection.makefile("rb") as lines:
        welcome = b""
        with suppress(OSError):
            connection.sendall(msgspec.json.encode(entry) + b"\n")
            welcome = lines.readline(len(_WELCOME))
        if welcome != _WELCOME:
            raise OSError("no slm launch answers there: another program?")
        keep_alive(connection, seconds)
        answer = lines.readline(_MOST_BYTES)  # no time limit: machine 0 has one
        if not answer.endswith(b"\n"):
            raise OSError("it was there, but stopped answering")
        return connection, json.loads(answer)


def wait_for_port(place: tuple[str, int]) -> None:
    """Wait until machine 0's launcher, which imports torch, listens: torch is loud about a closed port."""
    until, is_open = time.monotonic() + _IMPORT_SECONDS, False
    while not is_open and time.monotonic() < until:
        with suppress(OSError):
            socket.create_connection(place, _ANSWER_SECONDS).close()
            is_open = True
        time.sleep(_POLL_SECONDS)


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def address_of(connection: socket.socket) -> str:
    """Return the address of the other side."""
    return connection.getpeername()[0].removeprefix("::ffff:")


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Let the kernel close the connection after `seconds` without an answer; reading has no time limit."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 1/3 of the time idle, then 6 probes that are 1/9 apart
    times = {socket.TCP_KEEPIDLE: seconds / 3, socket.TCP_KEEPINTVL: seconds / 9, socket.TCP_KEEPCNT: 6}
    for option, value in times.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))


def _check_equal(theirs: dict[str, Any], mine: dict[str, Any], machine: str) -> None:
    """Raise ValueError if a machine's facts differ from machine 0's."""
    theirs, mine = _flat(theirs), _flat(mine)
    differences = [
        f"{name}: {theirs.get(name, _UNSET)} on machine 0, {mine.get(name, _UNSET)} on {machine}"
        for name in dict.fromkeys([*theirs, *mine])
        if theirs.get(name) != mine.get(name)
    ]
    if differences:
        hint = "hint: use the same files, versions and command on every machine; only --machine_rank differs"
        raise ValueError("\n".join([*differences[:_MOST_DIFFERENCES], hint]))


def _flat(value: dict[str, Any], before: str = "") -> dict[str, str]:
    """Flatten `{"a": {"b": 1}}` to {"a b": "1"}; leaves out None."""
    flat: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{before}{name} ")
        elif inner is not None:
            flat[f"{before}{name}"] = json.dumps(inner)
    return flat


# This machine's addresses and ports.


def listen(address: str, port: int) -> socket.socket:
    """Listen on all addresses of this machine, of which `address` must be one; port 0 takes a free one.

    Raises ValueError if the name is unknown, the address another machine's, or the port taken.
    """
    try:
        if address:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(place[:2], family=family).close()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]
        raise ValueError(
            f"machine 0 can't listen at {address}:{port}: {reason}; this machine is "
            f"{own_addresses()}\nhint: give each machine its own --machine_rank, machine 0's address as "
            "--main_process_ip and a port that is free there as --main_process_port"
        ) from None


def interfaces() -> dict[str, str]:
    """Return this machine's network interfaces by address."""
    found = psutil.net_if_addrs().items()
    return {entry.address: name for name, entries in found for entry in entries}


def own_addresses() -> str:
    """Return this machine's IPv4 addresses as `10.0.0.1 (eth0), ...`."""
    return ", ".join(f"{at} ({name})" for at, name in interfaces().items() if "." in at and name != "lo")
