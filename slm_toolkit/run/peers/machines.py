"""Connections between the machines of a launch: a rank waits for all of them and notices a lost one.

If all ranks are on one machine, this module does nothing.
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
from slm_toolkit.launch.rendezvous import PATIENCE_VARIABLE, Entry, Meeting, patience_seconds
from slm_toolkit.run.peers.peer_store import launchers_store

_COLLECTIVE_TIMEOUT = timedelta(seconds=MOST_DDP_TIMEOUT)
"other ranks wait while rank 0 packs documents: on a large dataset longer than NCCL's ten minutes"
_SILENT_SECONDS = 10.0
"no waiting message before this, because the ranks of other machines are still importing torch"
_GRACE_SECONDS = 10.0
"time that this rank may take to end by itself after a machine is lost"
_RANK_0_SECONDS = 2.0
"head start of rank 0, which is connected to all machines, to write its record"
_CONNECT_SECONDS = 10.0
"time limit for a connection between two machines that have met"
_GOODBYE = b"goodbye"
UNREACHED = re.compile("gloo|nccl|by peer|broken pipe|socket|timed out", re.IGNORECASE)
"errors of collectives whose other side is gone"


def num_machines() -> int:
    """Return the number of machines of this launch, which torch's launcher sets."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def process_group_timeout() -> timedelta:
    """Return the timeout for making the process group.

    With several machines it is short; `Machines.connecting` then sets the longer one for collectives.
    """
    if num_machines() == 1:
        return _COLLECTIVE_TIMEOUT
    return timedelta(seconds=patience_seconds() + _SILENT_SECONDS)


def interface_variable(error: RuntimeError, *, on_gpu: bool) -> str:
    """Return the variable that sets the network interface of the failed library, NCCL or gloo.

    On GPUs gloo can fail, too: it runs the control group.
    """
    return "NCCL_SOCKET_IFNAME" if on_gpu and "gloo" not in str(error).lower() else "GLOO_SOCKET_IFNAME"


def let_collectives_wait() -> None:
    """Raise the timeout of all existing process groups, so that --ddp_timeout ends a wait first.

    HSDP and DeepSpeed make groups with the default timeouts: 10 minutes for NCCL, 30 for gloo.
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

    def meet(self, must_match: dict[str, Any]) -> None:
        """Wait for the first rank of every machine; `must_match` must be equal on all machines.

        Raises ValueError if a machine is missing (its launcher came, so it failed afterwards) or differs.
        """
        if num_machines() == 1:
            return
        seconds = patience_seconds()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = launchers_store(attempt, seconds=seconds)
        if not self._is_first:
            return
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        meeting = Meeting(self.rank, num_machines(), place, facts=must_match, store=self._store)
        hint = f"read its output, because its launcher came; {PATIENCE_VARIABLE} sets a longer wait"
        try:
            _, entries = meeting.wait(seconds, hint=hint, silent_seconds=_SILENT_SECONDS)
            if self._is_rank_0:
                self._links = [self._connect(rank, entry) for rank, entry in entries.items() if rank]
            else:
                self._links = [self._accept(entries[self.rank].reached_at)]
        except dist.DistError as error:
            raise ValueError(
                f"a machine does not answer any more: {str(error).splitlines()[0]}\nhint: read its output"
            ) from error
        for link in self._links:
            _keep_alive(link.socket, seconds)

    def _connect(self, rank: int, entry: Entry) -> _Link:
        """Connect rank 0 to the first rank of another machine.

        That rank listens on any free port, so a firewall that would block gloo and NCCL is noticed here.
        """
        port = int(self._store.get(f"port {rank}"))
        try:
            connection = socket.create_connection((entry.address, port), _CONNECT_SECONDS)
        except OSError as error:
            raise _unreached(rank, entry.address, port, error) from None
        return _Link(rank, entry.address, connection)

    def _accept(self, machine_0: str) -> _Link:
        """Wait for the connection from rank 0."""
        family = socket.AF_INET6 if ":" in machine_0 else socket.AF_INET
        with socket.create_server(("", 0), family=family) as listener:
            listener.settimeout(_CONNECT_SECONDS)
            port = listener.getsockname()[1]
            self._store.set(f"port {self.rank}", str(port))
            try:
                connection, _ = listener.accept()
            except OSError as error:
                raise _unreached(0, machine_0, port, error) from None
        return _Link(0, machine_0, connection)

    def of_rank_0(self, name: str, value: str) -> str:
        """Return rank 0's `value` for `name` on every rank, for values that differ between machines.

        For example, hashes of files' dates do.
        """
        if self._store is None:
            return value
        if self._is_rank_0:
            self._store.set(name, value)
        return self._store.get(name).decode()

    def check_shared(self, folder: Path, *, flag: str) -> None:
        """Raise ValueError on all ranks if a machine does not see rank 0's `folder`; `flag` needs it."""
        if self._store is None:
            return
        mark = folder / f".{uuid.uuid4().hex}"
        if self._is_rank_0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        mark = folder / self.of_rank_0("mark", mark.name)
        if self._is_first:
            self._store.set(f"sees {self.rank}", str(mark.exists()))
        sees = [self._store.get(f"sees {rank}") == b"True" for rank in range(num_machines())]
        if self._is_rank_0:
            mark.unlink()
        if blind := [rank for rank, sees_it in enumerate(sees) if not sees_it]:
            raise ValueError(
                f"{flag} needs a shared folder, but machine {blind[0]} does not see machine 0's {folder}\n"
                "hint: put --output_dir on a file system that all machines share"
            )

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Make the process group inside this context. Raises ValueError if ranks can't reach each other."""
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
                f"the machines met, but their ranks can't reach each other: {str(error).splitlines()[0]}\n"
                f"hint: set {variable} (now {os.environ.get(variable, 'not set')}) to the network interface "
                "between the machines, and open all TCP ports above 1024 between them"
            ) from error
        let_collectives_wait()

    def lost(self, *, has_failed: bool) -> str | None:
        """Return a message about a machine whose connection ended before the run did, or None.

        It is None, too, for a grace time in which this rank may end by itself. When ranks end, their kernel
        closes the connections; gloo then fails, NCCL fails or hangs. A machine that lost power or network
        closes nothing: keep-alive notices. `has_failed`: a collective of this rank failed, so skip the grace.
        """
        with self._reading:  # two threads of the watchdog may call this at once
            for link in list(self._links):
                if self._lost is None and select.select([link.socket], [], [], 0)[0]:
                    self._links.remove(link)
                    self._lost, self._lost_at = _lost(link), time.monotonic()
        if self._lost is None or self._has_parted:
            return None
        grace_seconds = 0.0 if has_failed else _GRACE_SECONDS
        grace_seconds += 0.0 if self._is_rank_0 else _RANK_0_SECONDS
        return self._lost if time.monotonic() - self._lost_at >= grace_seconds else None

    def part(self) -> None:
        """Announce that training is done, so that other ranks don't report this one as lost when it ends."""
        self._has_parted = True
        for link in list(self._links):
            with suppress(OSError):
                link.socket.sendall(_GOODBYE)


def _unreached(rank: int, address: str, port: int, error: OSError) -> ValueError:
    return ValueError(
        f"no connection with machine {rank} ({address}) at port {port}: {error.strerror or error}\n"
        "hint: check the firewall: ranks need all TCP ports above 1024 between the machines"
    )


def _lost(link: _Link) -> str | None:
    """Return a message about the lost machine; None if it said goodbye. The link must be readable."""
    machine = f"machine {link.rank} ({link.address})"
    try:
        if link.socket.recv(len(_GOODBYE)):
            return None
    except ConnectionResetError:
        pass
    except OSError as error:
        return f"{machine} does not answer any more ({error.strerror}): check its power and network"
    return f"{machine} ended before the run did: read its output for the cause"


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Turn on TCP keep-alive: the kernel closes the connection after `seconds` without an answer."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 1/3 of the time idle, then 6 probes that are 1/9 apart
    times = {socket.TCP_KEEPIDLE: seconds / 3, socket.TCP_KEEPINTVL: seconds / 9, socket.TCP_KEEPCNT: 6}
    for option, value in times.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))
