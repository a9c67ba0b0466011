"""The other machines of a launch, seen from a rank: all have come, and none is lost unnoticed.

Where all ranks are on one machine, nothing here does anything.
"""

import os
import re
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slm_toolkit.config.run_config import MOST_DDP_TIMEOUT
from slm_toolkit.launch.rendezvous import (
    PATIENCE_VARIABLE,
    Machine,
    Patience,
    Peer,
    attend,
    host,
    listen,
    patience_seconds,
)

_COLLECTIVE_TIMEOUT = timedelta(seconds=MOST_DDP_TIMEOUT)
"rank 0 packs documents while the others wait for it: longer than NCCL's ten minutes on a large dataset"
_SILENT_SECONDS = 10.0
"while the ranks of other machines import torch, too"
_GRACE_SECONDS = 10.0
"for this rank to end by itself after a machine is lost"
_RANK_0_SECONDS = 2.0
"for rank 0, which knows all machines, to write its record before other ranks do"
_ACCEPT_SECONDS = 10.0
"for a connection that its machine already has"
_GOODBYE = b"goodbye"
UNREACHED = re.compile("gloo|nccl|by peer|broken pipe|socket|timed out", re.IGNORECASE)
"in errors of collectives whose other side is gone"


def num_machines() -> int:
    """Of this launch, as torch's launcher says."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def process_group_timeout() -> timedelta:
    """For making the process group; between machines `Machines.connecting` lets collectives take longer."""
    if num_machines() == 1:
        return _COLLECTIVE_TIMEOUT
    return timedelta(seconds=patience_seconds() + _SILENT_SECONDS)


def interface_variable(error: RuntimeError, *, on_gpu: bool) -> str:
    """What names the network interface to the library that failed; on GPUs the control group is gloo's."""
    return "NCCL_SOCKET_IFNAME" if on_gpu and "gloo" not in str(error).lower() else "GLOO_SOCKET_IFNAME"


def let_collectives_wait() -> None:
    """Of all process groups that exist now, HSDP's and DeepSpeed's too: it is --ddp_timeout that ends a wait.

    Those that engines make for themselves would end it after NCCL's 10 minutes, or gloo's 30.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    for group in dist.distributed_c10d._world.pg_map:  # private
        dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT, group)  # private


@dataclass(frozen=True)
class _Link:
    """An open connection to another machine."""

    rank: int
    address: str
    socket: socket.socket


class Machines:
    """Rank 0's connections to the first rank of every other machine, or one such rank's to rank 0."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("GROUP_RANK", "0"))
        self._is_rank_0 = os.environ.get("RANK", "0") == "0"
        self._is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._store: dist.Store | None = None
        self._links: list[_Link] = []
        self._lost: str | None = None
        self._lost_at = 0.0
        self._has_parted = False
        self._reading = threading.Lock()

    def meet(self, said: dict[str, Any]) -> None:
        """Wait for the first rank of every machine; `said` is what all must say alike.

        The launchers have met already: a machine that is missing now has failed since. Raises ValueError.
        """
        if num_machines() == 1:
            return
        seconds = patience_seconds()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = dist.PrefixStore(f"slm_toolkit/{again}", store)
            if self._is_first:
                self._links = self._meet_first_ranks(
                    Machine(self.rank, num_machines(), said), address, seconds
                )
        except dist.DistError as error:
            raise ValueError(
                f"machine 0 at {address}:{port} was there and went away: {str(error).splitlines()[0]}\n"
                "hint: what says its own output?"
            ) from error
        for link in self._links:
            _keep_alive(link.socket, seconds)

    def _meet_first_ranks(self, me: Machine, address: str, seconds: float) -> list[_Link]:
        """On a port of rank 0's choice, of the kind that gloo and NCCL need, too."""
        if me.rank > 0:
            hint = "a firewall? ranks need all TCP ports above 1024 between the machines"
            port = int(self._store.get("port"))
            patience = Patience(seconds, _SILENT_SECONDS, hint)
            connection = attend(me, address, port, patience=patience, store=self._store)
            return [_Link(0, connection.getpeername()[0], connection)]
        hint = f"its launcher came: what says its own output? {PATIENCE_VARIABLE} waits longer"
        with listen(address, 0) as listener:
            port = listener.getsockname()[1]
            self._store.set("port", str(port))
            patience = Patience(seconds, _SILENT_SECONDS, hint)
            return _accept(listener, host(me, self._store, at=f"{address}:{port}", patience=patience))

    def of_rank_0(self, name: str, value: str) -> str:
        """What rank 0 has by that name: hashes of files' dates differ from machine to machine."""
        if self._store is None:
            return value
        if self._is_rank_0:
            self._store.set(name, value)
        return self._store.get(name).decode()

    def check_shared(self, folder: Path, *, flag: str) -> None:
        """Raises ValueError on all ranks where a machine does not see rank 0's `folder`; `flag` needs it."""
        if self._store is None:
            return
        mark = folder / self.of_rank_0("mark", f".{uuid.uuid4().hex}")
        if self._is_rank_0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        self.of_rank_0("marked", "yes")
        if self._is_first:
            self._store.set(f"sees {self.rank}", str(mark.exists()))
        sees = [self._store.get(f"sees {rank}") == b"True" for rank in range(num_machines())]
        if self._is_rank_0:
            mark.unlink()
        if blind := [rank for rank, sees_it in enumerate(sees) if not sees_it]:
            raise ValueError(
                f"{flag}, but machine {blind[0]} does not see machine 0's {folder}\n"
                "hint: --output_dir on a file system that all machines share"
            )

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Around what makes the process group. Raises ValueError where the ranks don't reach each other."""
        if num_machines() == 1:
            yield
            return
        try:
            yield
            on_gpu = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
        except RuntimeError as error:
            if not UNREACHED.search(str(error)):
                raise
            variable = interface_variable(error, on_gpu=torch.cuda.is_available())
            raise ValueError(
                f"the machines met, but their ranks don't reach each other: {str(error).splitlines()[0]}\n"
                f"hint: {variable} ({os.environ.get(variable, 'not set')}) names the interface between the "
                "machines; all TCP ports above 1024 must be open between them"
            ) from error
        let_collectives_wait()

    def lost(self, *, has_failed: bool) -> str | None:
        """The machine whose connection ended before the run did; None while this rank may yet end by itself.

        The kernel of a machine whose ranks end closes the connections; gloo then fails, NCCL fails or hangs.
        A machine without power or network closes none: keep-alive finds out. `has_failed`: a collective of
        this rank has, for which it waits no longer.
        """
        with self._reading:  # two threads of the watchdog may be here
            for link in self._links if self._lost is None and not self._has_parted else ():
                if select.select([link.socket], [], [], 0)[0]:
                    self._lost, self._lost_at = _lost(link), time.monotonic()
                    if self._lost is not None:
                        break
                    self._links = [other for other in self._links if other is not link]
        if self._lost is None or self._has_parted:
            return None
        patience = 0.0 if has_failed else _GRACE_SECONDS
        patience += 0.0 if self._is_rank_0 else _RANK_0_SECONDS
        return self._lost if time.monotonic() - self._lost_at >= patience else None

    def part(self) -> None:
        """This rank has trained: the others must not miss it when it ends."""
        self._has_parted = True
        for link in self._links:
            with suppress(OSError):
                link.socket.sendall(_GOODBYE)


def _accept(listener: socket.socket, peers: list[Peer]) -> list[_Link]:
    """The connections that these machines made before they came; those of strangers are closed."""
    expected = {(peer.address, peer.port): peer.rank for peer in peers}
    links = []
    listener.settimeout(_ACCEPT_SECONDS)
    while expected:
        try:
            connection, (address, port, *_) = listener.accept()
        except TimeoutError:
            raise ValueError(
                f"no connection from {', '.join(f'{address}:{port}' for address, port in expected)}, where "
                "another machine connected\nhint: are addresses translated between the machines (NAT)?"
            ) from None
        if (rank := expected.pop((address, port), None)) is None:
            connection.close()
        else:
            connection.settimeout(None)
            links.append(_Link(rank, address, connection))
    return links


def _lost(link: _Link) -> str | None:
    """The end of a machine whose connection has something to read; None after its goodbye."""
    who = f"machine {link.rank} ({link.address})"
    try:
        if link.socket.recv(len(_GOODBYE)):
            return None
    except ConnectionResetError:
        pass
    except OSError as error:
        return f"{who} does not answer any more ({error.strerror}): its power, its network?"
    return f"{who} ended before the run did: its own output says why"


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Let the kernel ask the other machine's, and end the connection after so long without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval, num_probes = max(1, round(seconds / 3)), max(1, round(seconds / 9)), 6  # 1/3 + 6/9 = 1
    values = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": num_probes}
    for name, value in values.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
