"""Lets the machines of a launch meet in the store of torch's launcher, and names those missing or different.

Each machine writes an entry with its facts, and waits for the entries of all others. The launchers meet in
this way, and later their ranks.
"""

import errno
import json
import os
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

FACTS_VARIABLE = "SLM_LAUNCH_FACTS"
"environment variable of a launcher: JSON of its `facts` and `problem`, see Entry"
PATIENCE_VARIABLE = "SLM_PATIENCE_SECONDS"
PATIENCE_SECONDS = 300.0
_SAY_SECONDS = 30.0
"time between two lines about waiting"
_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 10.0
_READ_SECONDS = 2.0
"machine 0 ends this much later after an error, so that the others can read the entries that led to it"
_MOST_DIFFERENCES = 10
_UNSET = "not given"
_PROBLEM = "problem"
"key for the message of a machine 0 that gives up"


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


@dataclass(frozen=True)
class Entry:
    """What a machine writes for the others."""

    address: str
    reached_at: str
    "the address at which this machine reached machine 0"
    written_at: float
    "different for two machines that have the same address and facts"
    facts: dict[str, Any]
    "JSON values that must be equal on all machines"
    problem: str | None
    "the reason why this machine can't start; then all other machines end, too"


class Meeting:
    """Waits until all machines have written their entries into machine 0's store, in any order.

    The store is used in a thread of its own, because torch waits forever for a program or network that does
    not answer.
    """

    def __init__(
        self,
        rank: int,
        num_machines: int,
        place: tuple[str, int],
        *,
        facts: dict[str, Any],
        problem: str | None = None,
        store: "Store | None" = None,
    ) -> None:
        """`place`: machine 0's address and port. `store`: None to connect to the store there."""
        self._rank, self._num_machines, self._place = rank, num_machines, place
        self._written_at = time.time()
        self._facts, self._problem, self._given = facts, problem, store
        self._entries: dict[int, Entry] = {}
        self._reason = ""
        "why machine 0 was not met yet"
        self._store: Future[Store] = Future()
        "done when all machines have come"

    def wait(
        self, seconds: float, *, hint: str, silent_seconds: float = 0.0
    ) -> tuple["Store", dict[int, Entry]]:
        """Return the store and the entries by rank.

        Raises ValueError if a machine does not come, can't start, has different facts or this one's rank.
        `silent_seconds`: print nothing in these first seconds. `hint`: what a user can do.
        """
        threading.Thread(target=self._meet, daemon=True).start()
        began, say_after = time.monotonic(), silent_seconds
        who, place = f"machine {self._rank} of {self._num_machines}", "{}:{}".format(*self._place)
        while not wait([self._store], _POLL_SECONDS).done:
            waited = time.monotonic() - began
            ranks = range(self._num_machines) if 0 in self._entries else [0]
            missing = [str(rank) for rank in ranks if rank not in self._entries]
            if not missing:  # the other thread is about to end
                continue
            machines = f"machine{'s' * (len(missing) > 1)} {', '.join(missing)} at {place}{self._reason}"
            if waited >= seconds:
                problem = f"{who} waited {seconds:g} s for {machines}\nhint: {hint}"
                if self._rank == 0:  # its store ends with it
                    _shared(self._given).set(_PROBLEM, problem)
                    time.sleep(_READ_SECONDS)
                raise ValueError(problem)
            if waited >= say_after:
                say_after = waited + _SAY_SECONDS
                line = shown(f"{who}: waiting for {machines}")
                print(f"{line}, {waited:.0f} of {seconds:g} s", file=sys.stderr, flush=True)
        return self._store.result(), self._entries

    def _meet(self) -> None:
        while not self._store.done():
            try:
                # a plain socket, because torch prints pages about a closed port
                with socket.create_connection(self._place, _CONNECT_SECONDS) as connection:
                    addresses = connection.getsockname()[0], connection.getpeername()[0]
                self._reason = " (no slm launch answers there: another program?)"
                store = self._given or _client(*self._place)
                self._exchange(store, Entry(*addresses, self._written_at, self._facts, self._problem))
                self._store.set_result(store)
            except OSError as error:  # also for a name that is not known yet
                self._reason = f" ({error.strerror or str(error) or 'no answer'})"
            except ValueError as error:
                time.sleep(_READ_SECONDS)
                self._store.set_exception(error)
            except RuntimeError as error:  # torch.distributed's: machine 0 is gone, and may come again
                if self._entries:
                    self._reason = " (it was there, but stopped answering)"
                self._entries = {}
                if self._given is not None:
                    self._store.set_exception(error)
            time.sleep(_POLL_SECONDS)

    def _exchange(self, store: "Store", own: Entry) -> None:
        store, text = _shared(store), json.dumps(own.__dict__)
        keys = [str(rank) for rank in range(self._num_machines)]
        if not store.check(keys):  # else all have come: this machine is one too many
            store.set(keys[self._rank], text)
        while len(self._entries) < self._num_machines:
            for rank, key in enumerate(keys):
                if rank not in self._entries and store.check([key]):
                    self._entries[rank] = Entry(**json.loads(store.get(key)))
            if store.check([_PROBLEM]):
                raise ValueError(store.get(_PROBLEM).decode())
            if 0 in self._entries:
                self._reason = ""
                _check_equal(self._entries)
            if (other := store.get(keys[self._rank]).decode()) != text:
                taken = (
                    f"--machine_rank {self._rank} of {own.address} is taken by {json.loads(other)['address']}"
                )
                raise ValueError(f"{taken}\nhint: every machine needs its own --machine_rank")
            time.sleep(_POLL_SECONDS)


def _shared(store: "Store") -> "Store":
    from torch.distributed import PrefixStore

    return PrefixStore("slm_toolkit/machines", store)


def _client(address: str, port: int) -> "Store":
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _check_equal(entries: dict[int, Entry]) -> None:
    """Raise ValueError if a machine can't start, or its facts differ from machine 0's."""
    for rank, entry in sorted(entries.items()):
        machine = f"machine {rank} ({entry.address})"
        if entry.problem is not None:
            raise ValueError(f"{machine}: {entry.problem}")
        theirs, mine = _flat(entries[0].facts), _flat(entry.facts)
        differences = [
            f"{name}: {theirs.get(name, _UNSET)} on machine 0, {mine.get(name, _UNSET)} on {machine}"
            for name in dict.fromkeys([*theirs, *mine])
            if theirs.get(name) != mine.get(name)
        ]
        if differences:
            num_more = len(differences) - _MOST_DIFFERENCES
            more = [f"and {num_more} more"] if num_more > 0 else []
            hint = (
                "hint: use the same files, versions and command on every machine; only --machine_rank differs"
            )
            raise ValueError("\n".join([*differences[:_MOST_DIFFERENCES], *more, hint]))


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
    """Return a socket that listens on `port` of this machine's `address`; "" for all of its addresses.

    Raises ValueError if the name is unknown, the address another machine's, or the port taken.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"no such machine: {address} ({reason})\nhint: --main_process_ip must be an address of machine 0"
        ) from None
    try:
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"--machine_rank 0 must be the machine at {address} (--main_process_ip); this machine is "
                f"{own_addresses()}\nhint: every machine needs its own --machine_rank"
            ) from None
        raise ValueError(
            f"can't listen on port {port} of this machine: {os.strerror(error.errno)}{_user_of(port)}\n"
            "hint: another launch may use it; give a free --main_process_port, the same on every machine"
        ) from None


def _user_of(port: int) -> str:
    """Return which process uses `port`, as the end of a message; empty if the system does not show it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f", by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def interfaces() -> dict[str, str]:
    """Return this machine's network interfaces by address."""
    found = psutil.net_if_addrs().items()
    return {entry.address: name for name, entries in found for entry in entries}


def own_addresses() -> str:
    """Return this machine's IPv4 addresses as `10.0.0.1 (eth0), ...`."""
    return ", ".join(f"{at} ({name})" for at, name in interfaces().items() if "." in at and name != "lo")
