"""What the ranks of a run tell each other beside their gradients: objects, and at each step who must stop.

The ranks tell each other after every step and read the answers one step later (two on a GPU, whose losses
come late): so nobody waits, and all of them learn of the same step at the same place.
"""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from slm_toolkit.base.interrupts import SAME_SECONDS

Result = TypeVar("Result")


def gather_to_all(value: Any) -> list[Any]:
    """`value` of every rank, in order of rank; in a rehearsal of rank 0 alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def rank_0_first(work: Callable[[], Result]) -> Result:
    """`work` on rank 0, then on the first rank of each other machine, then on the rest: who comes later finds
    caches, on a disk that the machines share or on each one's own. A ValueError of one is raised on all."""
    if not torch.distributed.is_initialized():
        return work()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    turn = 0 if torch.distributed.get_rank() == 0 else 1 if is_first else 2
    result = None
    for going in range(3):
        problem = None
        if going == turn:
            try:
                result = work()
            except ValueError as error:
                problem = str(error)
        if found := next((problem for problem in gather_to_all(problem) if problem), None):
            raise ValueError(found)
    return result


@dataclass(frozen=True)
class Seen:
    """What the ranks said after one step."""

    step: int
    losses: tuple[float, ...]
    "of each rank"
    grad_norms: tuple[float | None, ...]
    "of all gradients before clipping, as each rank knows it; None where the engine tells none"
    stop_signal: int
    "that some rank got, 0 if none"
    is_writing: bool
    "whether some rank's share of a checkpoint is not on disk yet"

    def is_loss_bad(self, max_loss: float) -> bool:
        """Whether some loss is no number, or their mean too large: one alone may be of few labels."""
        return not all(map(math.isfinite, self.losses)) or sum(self.losses) / len(self.losses) > max_loss

    def bad_ranks(self, max_loss: float) -> list[int]:
        """Those whose loss is no number; else all, where the mean is too large or the norm no number."""
        if odd := [rank for rank, loss in enumerate(self.losses) if not math.isfinite(loss)]:
            return odd
        norms = [norm for norm in self.grad_norms if norm is not None]
        is_bad = self.is_loss_bad(max_loss) or not all(map(math.isfinite, norms))
        return list(range(len(self.losses))) if is_bad else []


class StopSignal:
    """SIGTERM, as schedulers send it before they take a machine away, and SIGINT (Ctrl-C): the first is noted
    and acted on between steps. After or before a SIGINT, a second signal ends the process at once."""

    def __init__(self, *numbers: int) -> None:
        self.number = 0
        "the signal that was noted, 0 before"
        self._noted_at = 0.0
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heeded}

    def restore(self) -> None:
        """From now on, the handlers from before act."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def ignore(self) -> None:
        """The run is about to end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number == 0:
            self.number, self._noted_at = number, time.monotonic()
        elif signal.SIGINT in (number, self.number) and time.monotonic() > self._noted_at + SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def control_group(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """Of all ranks, between hosts whatever the devices do; None: the default one, or no other rank."""
    if accelerator.num_processes == 1 or dist.get_backend() in ("gloo", "fake"):
        return None
    return dist.new_group(backend="gloo")


class StepExchange:
    """Tell the other ranks of a step, learn what they said of an earlier one."""

    def __init__(self, accelerator: Accelerator, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = accelerator.device, group
        self._num_ranks = accelerator.num_processes
        self._on_device: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._sent: deque[tuple[int, list[torch.Tensor], Any]] = deque()

    def after(self, step: int, loss: torch.Tensor, norm: Any, *, stop: int, is_writing: bool) -> list[Seen]:
        """Every rank must call it after each step; returns what is known by now of earlier ones, in order."""
        told = torch.zeros(5, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        told[2], told[3], told[4] = stop, is_writing, norm is not None
        told[0].copy_(loss.detach(), non_blocking=True)
        if isinstance(norm, torch.Tensor):
            told[1].copy_(norm.detach(), non_blocking=True)
        elif norm is not None:
            told[1] = norm
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        seen = self._receive()
        self._on_device.append((step, told, ready))
        while len(self._on_device) > (0 if ready is None else 1):
            self._send(*self._on_device.popleft())
        return seen

    def rest(self) -> list[Seen]:
        """What is not known yet of all steps so far; waits for it."""
        while self._on_device:
            self._send(*self._on_device.popleft())
        return self._receive()

    def _send(self, step: int, told: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()  # the device has begun the next step meanwhile
        answers = [torch.empty_like(told) for _ in range(self._num_ranks)] if self._num_ranks > 1 else [told]
        work = (
            dist.all_gather(answers, told, group=self._group, async_op=True) if self._num_ranks > 1 else None
        )
        self._sent.append((step, answers, work))

    def _receive(self) -> list[Seen]:
        seen = []
        while self._sent:
            step, answers, work = self._sent.popleft()
            if work is not None:
                work.wait()
            seen.append(_seen(step, torch.stack(answers).T.tolist()))
        return seen


def _seen(step: int, columns: Sequence[Sequence[float]]) -> Seen:
    losses, norms, stops, writing, has_norm = columns
    known = tuple(norm if has else None for norm, has in zip(norms, has_norm, strict=True))
    return Seen(step, tuple(losses), known, int(max(stops)), any(writing))
