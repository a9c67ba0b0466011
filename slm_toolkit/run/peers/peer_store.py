"""Values that the ranks of a launch share through the store of torch's launcher."""

import functools
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_SECONDS = 20
"time limit for the store to answer; it runs in the launcher, which does nothing else"


class PeerStore:
    """Values by name. If the launcher is gone, the store reads as empty.

    Torch writes pages of C++ frames to stderr for each call that finds no launcher. If no process reads
    stderr, such a write blocks. So this class makes no more calls after the first one that found no launcher.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store | None = store

    def write(self, name: str, value: Any) -> None:
        self._call(lambda store: store.set(name, json.dumps(value)))

    def read(self, name: str) -> Any:
        """Return the value; None if it is not written yet. Never waits for it."""
        return self._call(lambda store: json.loads(store.get(name)) if store.check([name]) else None)

    def is_first(self, name: str, rank: int) -> bool | None:
        """Return True if `rank` is the first to claim `name`; None if the launcher is gone."""
        return self._call(lambda store: store.compare_set(name, "", str(rank)) == str(rank).encode())

    def _call(self, operation: Callable[[dist.Store], Any]) -> Any:
        """Return the operation's result; None if it fails. torch.distributed's errors are RuntimeErrors."""
        if self._store is None:
            return None
        try:
            return operation(self._store)
        except RuntimeError as error:
            if isinstance(error, dist.DistNetworkError):
                self._store = None
            return None


def open_peer_store(*, of_launch: bool = False) -> PeerStore | None:
    """Connect to the launcher's store; None for a single process or a launcher other than torch's.

    Raises ValueError if the launcher does not answer.
    of_launch: share one store among all attempts of a launch (--max_restarts).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    attempt = "launch" if of_launch else _attempt()
    return PeerStore(launchers_store(f"{attempt}/peer_store", seconds=_SECONDS))


def launchers_store(name: str, *, seconds: float) -> dist.Store:
    """Connect to a part of the launcher's store. Raises ValueError if the launcher does not answer."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
    except RuntimeError:
        raise ValueError(
            f"the launcher does not answer at {address}:{port}\nhint: was it killed while its ranks started?"
        ) from None
    return dist.PrefixStore(f"slm_toolkit/{name}", store)


# Ranks restarted by torch's launcher (--max_restarts) resume from the newest checkpoint of their launch.

_CHECKPOINT = "checkpoint of this launch"
"name in the launcher's store"
_MOST_GROUPS = 1000
"more process groups than one attempt makes"


def name_groups_anew() -> None:
    """Give this attempt's process groups new names. Call it before the first group is made.

    The launcher's store still holds the addresses of the groups of the last attempt, or of the fp32 steps
    before, under their names: ranks would wait for each other in vain.
    """
    dist.distributed_c10d._world.group_count += _attempt() * _MOST_GROUPS  # private: part of a group's name


def note_checkpoint(path: Path) -> None:
    """Note a checkpoint that this launch has written; if its ranks restart, they resume from it."""
    if os.environ.get("RANK", "0") == "0" and (peer_store := _store_of_launch()) is not None:
        peer_store.write(_CHECKPOINT, str(path))


def noted_checkpoint() -> str | None:
    """Return the newest checkpoint that this launch has written; None on the first attempt or without one."""
    if _attempt() == 0 or (peer_store := _store_of_launch()) is None:
        return None
    return peer_store.read(_CHECKPOINT)


@functools.cache
def _store_of_launch() -> PeerStore | None:
    return open_peer_store(of_launch=True)


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
