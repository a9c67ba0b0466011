"""Ranks restarted by torch's launcher (--max_restarts) resume from the newest checkpoint of their launch."""

import functools
import os
from pathlib import Path

import torch.distributed as dist

from slm_toolkit.run.peers.peer_store import PeerStore, open_peer_store

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
