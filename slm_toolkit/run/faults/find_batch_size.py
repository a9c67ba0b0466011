"""--find_batch_size: a run that is out of memory restarts in place, with smaller and more micro-steps.

Every rank replaces itself by a new process with the same id (exec). This frees all its memory, and the
launcher sees no failure. The new processes meet in the launcher's store again, under other names.
"""

import dataclasses
import functools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.peers.failure import is_out_of_memory
from slm_toolkit.run.peers.peer_store import PeerStore, open_peer_store

_TRIED_VARIABLE = "SLM_OUT_OF_MEMORY_BATCH_SIZES"
"environment variable of a restarted run: the batch sizes that ran out of memory, as JSON"
_CHECKPOINT_VARIABLE = "SLM_CHECKPOINT_OF_THIS_LAUNCH"
_ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"the number of the attempt; it separates the attempts' values in the launcher's store"
_OUT_OF_MEMORY = "out of memory"
"name in the peer store, written when a rank runs out of memory"
_MOST_GROUPS = 1000
"more process groups than one attempt makes"
_SECONDS_BETWEEN_LOOKS = 0.5
_SETTLE_SECONDS = 5.0
"time that another rank's report of out of memory may take to arrive after a collective failed"


def smaller_batch(config: RunConfig) -> RunConfig:
    """Return the config of this attempt: first `config` itself, then with fewer sequences per micro-step."""
    too_large = _tried_sizes()
    if not too_large:
        return config
    total = config.per_device_train_batch_size * config.gradient_accumulation_steps
    size = next_size(too_large[-1], total)
    return dataclasses.replace(
        config,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=total // size,
        base_batch_size=config.base_batch_size or config.per_device_train_batch_size,
    )


def next_size(size: int, total: int) -> int:
    """Return the largest divisor of `total` that is at most half of `size`.

    `total`: the sequences that a process trains on in one step.
    """
    return max(divisor for divisor in range(1, size // 2 + 1) if total % divisor == 0)


def search_described(asked: RunConfig, ran: RunConfig) -> dict[str, Any] | None:
    """Return the record's batch_size_search; None without --find_batch_size."""
    if not asked.find_batch_size:
        return None
    sizes = {"asked": asked.per_device_train_batch_size, "ran": ran.per_device_train_batch_size}
    return {**sizes, "out_of_memory": _tried_sizes()}


def name_groups_anew() -> None:
    """Give this attempt's process groups new names. Call it before the first group is made.

    The launcher's store still holds the addresses of the last attempt's groups under their names.
    """
    dist.distributed_c10d._world.group_count += _attempt() * _MOST_GROUPS  # private: part of a group's name


def note_checkpoint(path: Path) -> None:
    """Note a checkpoint that this launch has written; if its ranks restart, they resume from it."""
    os.environ[_CHECKPOINT_VARIABLE] = str(path)
    if os.environ.get("RANK", "0") == "0" and (peer_store := _store_of_launch()) is not None:
        peer_store.write(_CHECKPOINT_VARIABLE, str(path))


def is_restarted() -> bool:
    """Return True if this process does its launch's work again after a restart of all ranks."""
    return _attempt() > 0


def noted_checkpoint() -> str | None:
    """Return the newest checkpoint that this launch has written; None on the first attempt or without one.

    --find_batch_size passes it on in the environment. Ranks that torch's launcher restarts (--max_restarts)
    read it from the launcher's store.
    """
    if not is_restarted():
        return None
    if _tried_sizes():
        return os.environ.get(_CHECKPOINT_VARIABLE)
    return peer_store.read(_CHECKPOINT_VARIABLE) if (peer_store := _store_of_launch()) is not None else None


@functools.cache
def _store_of_launch() -> PeerStore | None:
    return open_peer_store(of_launch=True)


class BatchSizeFinder:
    """Wrap training on each rank (`with`): if a rank runs out of memory, all ranks restart together."""

    def __init__(self, config: RunConfig) -> None:
        self._size = config.per_device_train_batch_size
        self._is_on = config.find_batch_size and self._size > 1
        self._peer_store = open_peer_store() if self._is_on else None
        self._ended, self._restart_lock = threading.Event(), threading.Lock()
        if self._peer_store is not None:
            threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        """Restart this process, and never return, if this rank or another one ran out of memory."""
        self._ended.set()
        if not self._is_on or not isinstance(error, RuntimeError) or isinstance(error, RunEnded):
            return
        if is_out_of_memory(error):
            self._restart(report=True)
        until = time.monotonic() + _SETTLE_SECONDS
        while self._peer_store is not None and time.monotonic() < until:
            if self._peer_store.read(_OUT_OF_MEMORY):
                self._restart(report=False)
            time.sleep(0.1)

    def end(self) -> None:
        """Stop the search after the last step: a smaller batch would not lower the memory needed later."""
        self._is_on = False
        self._ended.set()

    def _look(self) -> None:
        """Look for another rank's report, in a thread, because the training thread may wait for that rank."""
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            if self._peer_store.read(_OUT_OF_MEMORY):
                self._restart(report=False)

    def _restart(self, *, report: bool) -> NoReturn:
        self._restart_lock.acquire()  # the looking thread and the training thread may both come here
        if self._peer_store is not None:
            self._peer_store.write(_OUT_OF_MEMORY, True)
        if report:
            rank = os.environ.get("RANK", "0")
            line = f"rank {rank} is out of memory with {self._size} sequences per micro-step: trying fewer"
            print(line, file=sys.stderr, flush=True)
        os.environ[_TRIED_VARIABLE] = json.dumps([*_tried_sizes(), self._size])
        os.environ[_ATTEMPT_VARIABLE] = str(_attempt() + 1)
        sys.stdout.flush()
        workers = psutil.Process().children(recursive=True)  # DataLoader workers keep GPU memory allocated
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, timeout=_SETTLE_SECONDS)
        # close all open files at the exec, or gloo's sockets would stay open in the new process
        for number in os.listdir("/proc/self/fd"):
            if int(number) > 2:
                with suppress(OSError):
                    os.set_inheritable(int(number), False)
        os.execv(sys.executable, sys.orig_argv)


def _attempt() -> int:
    return int(os.environ.get(_ATTEMPT_VARIABLE, "0"))


def _tried_sizes() -> list[int]:
    return json.loads(os.environ.get(_TRIED_VARIABLE, "[]"))
