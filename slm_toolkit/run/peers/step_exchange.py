"""Exchange values between ranks: Python objects, and after each step the losses, norms and stop signals.

Each rank sends its values after every step. It receives those of all ranks one step later; on a GPU two steps
later, because the host runs ahead of the losses. So no rank waits, and after a step all ranks know the same.
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

from slm_toolkit.base.errors import SAME_SECONDS

Result = TypeVar("Result")


def gather_to_all(value: Any) -> list[Any]:
    """Return the `value` of every rank, in order of rank; in a rehearsal only rank 0's."""
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def rank_0_first(work: Callable[[], Result]) -> Result:
    """Do `work` on rank 0, then on the first rank of each other machine, then on the remaining ranks.

    So later ranks find filled caches, whether or not the machines share a disk. A ValueError on one rank is
    raised on all ranks.
    """
    if not torch.distributed.is_initialized():
        return work()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    turn = 0 if torch.distributed.get_rank() == 0 else 1 if is_first else 2
    result = None
    for current_turn in range(3):
        problem = None
        if current_turn == turn:
            try:
                result = work()
            except ValueError as error:
                problem = str(error)
        if first_problem := next((problem for problem in gather_to_all(problem) if problem), None):
            raise ValueError(first_problem)
    return result


@dataclass(frozen=True)
class Seen:
    """The values of all ranks after one step."""

    step: int
    losses: tuple[float, ...]
    "one loss per rank"
    grad_norms: tuple[float | None, ...]
    "norm of all gradients before clipping, as each rank computed it; None if the engine gives no norm"
    stop_signal: int
    "a signal that any rank received; 0 if none did"

    def is_loss_bad(self, max_loss: float) -> bool:
        """Return True if a loss is not finite or the mean over ranks exceeds max_loss.

        A single rank's loss may exceed it, because that rank may have few labels.
        """
        return not all(map(math.isfinite, self.losses)) or sum(self.losses) / len(self.losses) > max_loss

    def bad_ranks(self, max_loss: float) -> list[int]:
        """Return the ranks whose loss is not finite.

        If there are none, return all ranks if the mean loss is too large or a norm is not finite.
        """
        if not_finite := [rank for rank, loss in enumerate(self.losses) if not math.isfinite(loss)]:
            return not_finite
        norms = [norm for norm in self.grad_norms if norm is not None]
        is_bad = self.is_loss_bad(max_loss) or not all(map(math.isfinite, norms))
        return list(range(len(self.losses))) if is_bad else []


class StopSignal:
    """Note the first SIGTERM (schedulers send it before they take a machine away) or SIGINT (Ctrl-C).

    The run acts on the signal between steps. A second signal ends the process at once if one of the two is
    SIGINT and more than SAME_SECONDS lie between them.
    """

    def __init__(self, *numbers: int) -> None:
        self.number = 0
        "the noted signal; 0 if there is none"
        self._noted_at = 0.0
        not_ignored = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._earlier_handlers = {number: signal.signal(number, self._note) for number in not_ignored}

    def restore(self) -> None:
        """Put the earlier signal handlers back."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore both signals from now on, because the run is about to end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number == 0:
            self.number, self._noted_at = number, time.monotonic()
        elif signal.SIGINT in (number, self.number) and time.monotonic() > self._noted_at + SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def control_group(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks, so that they can communicate while the GPUs work.

    Return None if the default group is gloo already, in a rehearsal, or if there is only one rank.
    """
    if accelerator.num_processes == 1 or dist.get_backend() in ("gloo", "fake"):
        return None
    return dist.new_group(backend="gloo")


class StepExchange:
    """Send this rank's values of a step to all ranks, and receive all ranks' values of an earlier step."""

    def __init__(self, accelerator: Accelerator, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = accelerator.device, group
        self._num_ranks = accelerator.num_processes
        self._on_device: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._sent: deque[tuple[int, list[torch.Tensor], Any]] = deque()

    def after(self, step: int, loss: torch.Tensor, norm: Any, *, stop: int) -> list[Seen]:
        """Send the values of `step` and return those received of earlier steps, in order.

        Every rank must call it after each step.
        """
        values = torch.zeros(4, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        values[2], values[3] = stop, norm is not None
        values[0].copy_(loss.detach(), non_blocking=True)
        if isinstance(norm, torch.Tensor):
            values[1].copy_(norm.detach(), non_blocking=True)
        elif norm is not None:
            values[1] = norm
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        seen = self._receive()
        self._on_device.append((step, values, ready))
        while len(self._on_device) > (0 if ready is None else 1):
            self._send(*self._on_device.popleft())
        return seen

    def rest(self) -> list[Seen]:
        """Return the values of all steps that `after` has not returned yet."""
        while self._on_device:
            self._send(*self._on_device.popleft())
        return self._receive()

    def _send(self, step: int, values: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()  # does not idle the device, which has begun the next step
        by_rank, work = [values], None
        if self._num_ranks > 1:
            by_rank = [torch.empty_like(values) for _ in range(self._num_ranks)]
            work = dist.all_gather(by_rank, values, group=self._group, async_op=True)
        self._sent.append((step, by_rank, work))

    def _receive(self) -> list[Seen]:
        seen = []
        while self._sent:
            step, by_rank, work = self._sent.popleft()
            if work is not None:
                work.wait()
            seen.append(_seen(step, torch.stack(by_rank).T.tolist()))
        return seen


def _seen(step: int, columns: Sequence[Sequence[float]]) -> Seen:
    losses, norms, stops, has_norm = columns
    grad_norms = tuple(norm if has else None for norm, has in zip(norms, has_norm, strict=True))
    return Seen(step, tuple(losses), grad_norms, int(max(stops)))
