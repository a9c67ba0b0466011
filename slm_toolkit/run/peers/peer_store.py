"""What the ranks of a launch leave for each other to read, in the store of torch's launcher."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SECONDS = 20
"for the store to answer: it is in the launcher, which does nothing else"


class PeerStore:
    """Values by name; a launcher that is gone reads as an empty store.

    Torch writes pages of C++ frames to stderr for each call that finds no launcher. Where nobody reads them a
    process that went on asking would stand still in that, so the first such call is the last.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store | None = store

    def write(self, name: str, value: Any) -> None:
        self._ask(lambda store: store.set(name, json.dumps(value)))

    def read(self, name: str) -> Any:
        """None where nothing stands there yet; never waits for it."""
        return self._ask(lambda store: json.loads(store.get(name)) if store.check([name]) else None)

    def is_first(self, name: str, rank: int) -> bool | None:
        """Whether `rank` is the first to ask for `name`; None where the launcher is gone."""
        return self._ask(lambda store: store.compare_set(name, "", str(rank)) == str(rank).encode())

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """None where there is no answer: torch.distributed's errors are RuntimeErrors."""
        if self._store is None:
            return None
        try:
            return question(self._store)
        except RuntimeError as error:
            if isinstance(error, dist.DistNetworkError):
                self._store = None
            return None


def open_peer_store(*, of_launch: bool = False) -> PeerStore | None:
    """None for a process that is alone, and under launchers other than torch's, which have no store.

    Raises ValueError where the launcher does not answer.
    of_launch: one store for all attempts of a launch (--max_restarts, --find_batch_size), not one for each.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_SECONDS))
    except RuntimeError:
        raise ValueError(
            f"the launcher does not answer at {address}:{port}\nhint: was it killed while its ranks started?"
        ) from None
    again = "launch" if of_launch else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PeerStore(dist.PrefixStore(f"slm_toolkit/{again}/peer_store", store))
