"""Connections between the machines of a launch: a rank waits for all of them and notices a lost one.

If all ranks are on one machine, this module does nothing.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slm_toolkit.config.run_config import MOST_DDP_TIMEOUT
from slm_toolkit.launch.rendezvous import (
    PATIENCE_VARIABLE,
    Entry,
    Wait,
    address_of,
    host,
    is_readable,
    join,
    keep_alive,
    listen,
    patience_seconds,
)
from slm_toolkit.run.peers.peer_store import launchers_store

_COLLECTIVE_TIMEOUT = timedelta(seconds=MOST_DDP_TIMEOUT)
"other ranks wait while rank 0 packs documents: on a large dataset longer than NCCL's ten minutes"
_GRACE_SECONDS = 10.0
"time that this rank may take to end by itself after a machine is lost"
_RANK_0_SECONDS = 2.0
"head start of rank 0, which is connected to all machines, to write its record"
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
    return _COLLECTIVE_TIMEOUT if num_machines() == 1 else timedelta(seconds=patience_seconds() + 10)


def let_collectives_wait() -> None:
    """Raise the timeout of all existing process groups, so that --ddp_timeout ends a wait first.

    HSDP and DeepSpeed make groups with the default timeouts: 10 minutes for NCCL, 30 for gloo.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    for group in dist.distributed_c10d._world.pg_map:  # private
        dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT, group)  # private


class Machines:
    """Rank 0's connections to the first rank of every other machine, or one such rank's to rank 0."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("GROUP_RANK", "0"))
        self._is_rank_0 = os.environ.get("RANK", "0") == "0"
        self._is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._store: dist.Store | None = None
        self._links: dict[str, socket.socket] = {}
        "by `machine 1 (10.0.0.2)`"
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
        self._store = launchers_store(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), seconds=seconds)
        hint = (
            "read its output, because its launcher came; ranks need all TCP ports above 1024 between the "
            f"machines; {PATIENCE_VARIABLE} sets a longer wait"
        )
        wait = Wait(self.rank, num_machines(), hint=hint)
        address = os.environ["MASTER_ADDR"]
        if self._is_rank_0:
            listener = listen("", 0)
            self._store.set("port", str(listener.getsockname()[1]))
            links = host(listener, address, must_match, wait)
        elif not self._is_first:
            return
        else:
            try:
                port = int(self._store.get("port"))
            except dist.DistError as error:
                raise ValueError(
                    f"machine 0 does not answer: {str(error).splitlines()[0]}\nhint: read its output"
                ) from error
            links = {0: join(Entry(self.rank, must_match), (address, port), wait)}
        for rank, link in links.items():
            keep_alive(link, seconds)
            self._links[f"machine {rank} ({address_of(link)})"] = link

    def of_rank_0(self, name: str, value: str) -> str:
        """Return rank 0's `value` for `name` on every rank, for values that differ between machines.

        For example, hashes of files' dates do.
        """
        if self._store is None:
            return value
        if self._is_rank_0:
            self._store.set(name, value)
        return self._store.get(name).decode()

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
            raise ValueError(
                f"the machines met, but their ranks can't reach each other: {str(error).splitlines()[0]}\n"
                "hint: set GLOO_SOCKET_IFNAME, and on GPUs NCCL_SOCKET_IFNAME, to the network interface "
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
            for machine, link in list(self._links.items()):
                if self._lost is None and is_readable(link):
                    del self._links[machine]
                    self._lost, self._lost_at = _lost(machine, link), time.monotonic()
        if self._lost is None or self._has_parted:
            return None
        grace_seconds = (not has_failed) * _GRACE_SECONDS + (not self._is_rank_0) * _RANK_0_SECONDS
        return self._lost if time.monotonic() - self._lost_at >= grace_seconds else None

    def part(self) -> None:
        """Announce that training is done, so that other ranks don't report this one as lost when it ends."""
        self._has_parted = True
        for link in list(self._links.values()):
            with suppress(OSError):
                link.sendall(_GOODBYE)


def _lost(machine: str, link: socket.socket) -> str | None:
    """Return a message about the lost machine; None if it said goodbye. The link must be readable."""
    try:
        if link.recv(len(_GOODBYE)):
            return None
    except ConnectionResetError:
        pass
    except OSError as error:
        return f"{machine} does not answer any more ({error.strerror}): check its power and network"
    return f"{machine} ended before the run did: read its output for the cause"
