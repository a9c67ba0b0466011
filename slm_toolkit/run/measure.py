"""Clocks and bytes of a training process: seconds per step, peak memory, the state each rank holds."""

import resource
import time
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator


class StepClock:
    """Seconds of each step on this rank, the device's queue drained on both sides."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self._synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self._start)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or "reserved" would count what preparing left behind
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """This rank's peaks: allocated and reserved since the reset (None on CPU), resident since it began."""
    on_gpu = device.type == "cuda"
    return {
        "allocated": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
    }


def tensor_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of this rank's part of `tensors`; memory that two of them share is counted once."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            seen[local.data_ptr(), local.nbytes] = local.nbytes
    return sum(seen.values())


class GradientCounter:
    """Bytes of gradients that this rank holds between backward and the optimizer's first step.

    accelerate runs DeepSpeed's backward and step as one call, so there the count hangs on the step itself.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        self.model, self.engine = model, _deepspeed_engine(accelerator)
        self.num_bytes: int | None = None
        if self.engine is not None:
            zero = self.engine.optimizer
            original = zero.step

            def count_and_step(*args: Any, **kwargs: Any) -> Any:
                zero.step = original
                self.count()
                return original(*args, **kwargs)

            zero.step = count_and_step

    def count(self) -> None:
        """Count, if this was not done yet."""
        if self.num_bytes is not None:
            return
        gradients = [param.grad for param in self.model.parameters()]
        if self.engine is not None:
            for group in getattr(self.engine.optimizer, "averaged_gradients", {}).values():
                gradients += group or []
        self.num_bytes = tensor_bytes(gradients)


def state_bytes(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: int
) -> dict[str, int]:
    """Bytes per part of the training state on this rank, between two steps (gradients: before a step)."""
    if (engine := _deepspeed_engine(accelerator)) is not None:
        return {"gradients": gradients, **_deepspeed_state_bytes(engine)}
    state = optimizer.optimizer.state.values()
    return {
        "parameters": tensor_bytes(model.parameters()),
        "gradients": gradients,
        "master_weights": tensor_bytes(of_param.get("master") for of_param in state),
        "optimizer": tensor_bytes(
            value
            for of_param in state
            for key, value in of_param.items()
            if key != "master" and isinstance(value, torch.Tensor)
        ),
    }


def _deepspeed_engine(accelerator: Accelerator) -> Any:
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return wrapped.engine if wrapped is not None else None


def _deepspeed_state_bytes(engine: Any) -> dict[str, int]:
    zero = engine.optimizer
    params = list(engine.module.parameters())
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        parameters = tensor_bytes(param.ds_tensor for param in params)
        masters = zero.fp32_partitioned_groups_flat
    else:
        parameters = tensor_bytes(params)
        masters = getattr(zero, "single_partition_of_fp32_groups", [])
    adam = getattr(zero, "optimizer", zero).state.values()
    tensors = [value for of_param in adam for value in of_param.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": parameters,
        "master_weights": tensor_bytes(masters),
        "optimizer": tensor_bytes(tensors),
    }
