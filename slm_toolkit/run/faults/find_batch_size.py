"""--find_batch_size: a run that does not fit starts again in place, with smaller and more micro-steps.

Every rank becomes a new process of the same id (exec), so that nothing of the old one's memory is left and
the launcher sees no failure. They meet again in the launcher's store, under other names.
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
"in the environment of a run that has started again: those that it tried, as JSON"
_CHECKPOINT_VARIABLE = "SLM_CHECKPOINT_OF_THIS_LAUNCH"
_ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"what ranks leave each other in the launcher's store is told apart by it"
_OUT_OF_MEMORY = "out of memory"
"what stands in the peer store then"
_MOST_GROUPS = 1000
"of one attempt"
_SECONDS_BETWEEN_LOOKS = 0.5
_SETTLE_SECONDS = 5.0
"for the word of a rank without memory to arrive, after a collective has failed for its end"


def smaller_batch(config: RunConfig) -> RunConfig:
    """The config of this attempt: `config` at first, then with fewer sequences per micro-step."""
    tried = _tried()
    if not tried:
        return config
    total = config.per_device_train_batch_size * config.gradient_accumulation_steps
    size = next_size(tried[-1], total)
    return dataclasses.replace(
        config,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=total // size,
        base_batch_size=config.base_batch_size or config.per_device_train_batch_size,
    )


def next_size(size: int, total: int) -> int:
    """The largest divisor of `total`, the sequences of a process and step, that is at most half of `size`."""
    return max(divisor for divisor in range(1, size // 2 + 1) if total % divisor == 0)


def search_described(asked: RunConfig, ran: RunConfig) -> dict[str, Any] | None:
    """For the record; None without --find_batch_size."""
    if not asked.find_batch_size:
        return None
    sizes = {"asked": asked.per_device_train_batch_size, "ran": ran.per_device_train_batch_size}
    return {**sizes, "out_of_memory": _tried()}


def name_groups_anew() -> None:
    """Before the first process group: the launcher's store still holds addresses of the last attempt's."""
    dist.distributed_c10d._world.group_count += _attempt() * _MOST_GROUPS  # private: groups are named by it


def note_checkpoint(path: Path) -> None:
    """Written by this launch: if its ranks start again, they go on from there."""
    os.environ[_CHECKPOINT_VARIABLE] = str(path)
    if os.environ.get("RANK", "0") == "0" and (peer_store := _store_of_launch()) is not None:
        peer_store.write(_CHECKPOINT_VARIABLE, str(path))


def noted_checkpoint() -> str | None:
    """The newest checkpoint that this launch has written, for ranks that start again: by --find_batch_size,
    or by torch's launcher (--max_restarts), whose new processes know it from the launcher's store alone."""
    if _attempt() == 0:
        return None
    if _tried():
        return os.environ.get(_CHECKPOINT_VARIABLE)
    return peer_store.read(_CHECKPOINT_VARIABLE) if (peer_store := _store_of_launch()) is not None else None


@functools.cache
def _store_of_launch() -> PeerStore | None:
    return open_peer_store(of_launch=True)


class BatchSizeFinder:
    """Around training, on each rank: where one runs out of memory, all start again together."""

    def __init__(self, config: RunConfig) -> None:
        self._size = config.per_device_train_batch_size
        self._is_on = config.find_batch_size and self._size > 1
        self._peer_store = open_peer_store() if self._is_on else None
        self._ended, self._once = threading.Event(), threading.Lock()
        if self._peer_store is not None:
            threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        """Does not return where this rank failed for want of memory, or for another rank's."""
        self._ended.set()
        if not self._is_on or not isinstance(error, RuntimeError) or isinstance(error, RunEnded):
            return
        if is_out_of_memory(error):
            self._start_again(say=True)
        until = time.monotonic() + _SETTLE_SECONDS
        while self._peer_store is not None and time.monotonic() < until:
            if self._peer_store.read(_OUT_OF_MEMORY):
                self._start_again(say=False)
            time.sleep(0.1)

    def end(self) -> None:
        """The steps are done: what needs too much memory after them, a smaller batch does not help."""
        self._is_on = False
        self._ended.set()

    def _look(self) -> None:
        """In a thread: the one that trains may wait in a collective for the rank without memory."""
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            if self._peer_store.read(_OUT_OF_MEMORY):
                self._start_again(say=False)

    def _start_again(self, *, say: bool) -> NoReturn:
        self._once.acquire()  # the watching thread and the one that trains may both have seen it
        if self._peer_store is not None:
            self._peer_store.write(_OUT_OF_MEMORY, True)
        if say:
            rank = os.environ.get("RANK", "0")
            line = f"rank {rank} is out of memory with {self._size} sequences per micro-step: trying fewer"
            print(line, file=sys.stderr, flush=True)
        os.environ[_TRIED_VARIABLE] = json.dumps([*_tried(), self._size])
        os.environ[_ATTEMPT_VARIABLE] = str(_attempt() + 1)
        sys.stdout.flush()
        workers = psutil.Process().children(recursive=True)  # of data: they hold the GPU's memory open
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, timeout=_SETTLE_SECONDS)
        # or gloo's sockets would outlive the process that knew them
        for number in os.listdir("/proc/self/fd"):
            if int(number) > 2:
                with suppress(OSError):
                    os.set_inheritable(int(number), False)
        os.execv(sys.executable, sys.orig_argv)


def _attempt() -> int:
    return int(os.environ.get(_ATTEMPT_VARIABLE, "0"))


def _tried() -> list[int]:
    return json.loads(os.environ.get(_TRIED_VARIABLE, "[]"))
