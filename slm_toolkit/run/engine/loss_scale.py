"""LossScale: the dynamic loss scale of `--numerics fp16`, by one rule under every engine."""

from collections.abc import Callable
from typing import Any

import torch

INITIAL_SCALE = 2.0**16
"torch's GradScaler and DeepSpeed start with it, too"
GROWTH_INTERVAL = 2000
"good steps in a row after which the scale doubles, as in GradScaler (DeepSpeed: 1000)"
LOWEST_SCALE = 1.0


class LossScale:
    """Losses are multiplied by it before backward, so that small gradients don't become 0 in fp16.

    A step whose gradients overflow changes no weight and halves the scale; GROWTH_INTERVAL good steps in a
    row double it. It has those methods of torch's GradScaler that accelerate calls, but leaves it to the
    optimizer to divide gradients, in fp32. DeepSpeed's own rule differs (it forgives the first overflow, and
    divides by the new scale in the step that doubles it), so DeepSpeed is told this one's scale.
    """

    def __init__(self, device: torch.device | str, *, tells: Callable[[float], object] | None = None) -> None:
        """`tells`: called with the scale from now on, whenever it may have changed; then the host waits."""
        self._tells = tells
        self.value = torch.tensor(INITIAL_SCALE, device=device)
        "fp32, a scalar beside the gradients, so that updating it never makes the host wait"
        self.num_good = torch.zeros((), dtype=torch.int32, device=device)
        "good steps since the last change"
        self._tell()

    def _tell(self) -> None:
        if self._tells is not None:
            self._tells(self.get_scale())

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value.to(loss.device)

    def get_scale(self) -> float:
        return self.value.item()

    @torch.no_grad()
    def count_step(self, is_bad: torch.Tensor) -> None:
        """Change the scale after a step. `is_bad`: whether gradients were not finite, equal on all ranks."""
        good = self.num_good + 1
        grows = ~is_bad & (good >= GROWTH_INTERVAL)
        factor = torch.where(is_bad, 0.5, torch.where(grows, 2.0, 1.0))
        self.value.mul_(factor).clamp_(min=LOWEST_SCALE)
        self.num_good.copy_(torch.where(is_bad | grows, 0, good))
        self._tell()

    def state_dict(self) -> dict[str, Any]:
        """Return the state by GradScaler's names."""
        return {
            **{"scale": self.get_scale(), "growth_factor": 2.0, "backoff_factor": 0.5},
            **{"growth_interval": GROWTH_INTERVAL, "_growth_tracker": int(self.num_good)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["scale"])
        self.num_good.fill_(state["_growth_tracker"])
        self._tell()
