"""Ranks restarted by torch's launcher (--max_restarts) resume from the newest checkpoint of their launch."""

import functools
import os
from pathlib import Path

from slm_toolkit.run.peers.peer_store import PeerStore, open_peer_store

_CHECKPOINT = "checkpoint of this launch"
"name in the launcher's store"


def note_checkpoint(path: Path) -> None:
    """Note a checkpoint that this launch has written; if its ranks restart, they resume from it."""
    if os.environ.get("RANK", "0") == "0" and (peer_store := _store_of_launch()) is not None:
        peer_store.write(_CHECKPOINT, str(path))


def noted_checkpoint() -> str | None:
    """Return the newest checkpoint that this launch has written; None on the first attempt or without one."""
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not is_restarted or (peer_store := _store_of_launch()) is None:
        return None
    return peer_store.read(_CHECKPOINT)


@functools.cache
def _store_of_launch() -> PeerStore | None:
    return open_peer_store(of_launch=True)
