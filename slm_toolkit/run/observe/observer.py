"""The interface of everything that a run does around its steps."""

from typing import Any

import torch


class Observer:
    """A part of a run that the loop calls around each step, and once after the last one; all do nothing here.

    Every rank has the same observers, because some of them communicate.
    """

    def before_step(self, step: int) -> None:
        """`step` counts from 0, here and below."""

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor | float | None) -> None:
        """`loss`: this rank's mean over the micro-steps.

        `norm`: of all gradients before clipping; None if the engine has none.
        """

    def end(self, observed: dict[str, Any]) -> None:
        """Add this observer's fields of the record to `observed`. Observers end in reverse order."""
