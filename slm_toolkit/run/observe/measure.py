"""Measure one rank: seconds per step, peak memory, gradients, training state, and a profile of its steps."""

import ctypes
import gc
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from slm_toolkit.record.step_breakdown import Anatomy, anatomy_of, read_trace
from slm_toolkit.run.engine.training_state import parameter_name
from slm_toolkit.run.observe.progress import say

READING_GRADIENTS = "slm_toolkit: reading gradients"
"name of the profiler range around the probe's own collectives"


class StepClock:
    """The seconds of each step on this rank, and of each phase in it, measured on the device.

    A step lasts from the end of the step before it to its own end, because work between two steps, such as
    reading losses and sampling the GPU, also takes time in a training. After `pause` it lasts from its own
    beginning. On a GPU, CUDA events on the training stream measure it, so that the host never waits. The
    GPU's waits for a slow host are included. On a CPU, the host's clock measures it. Events are kept until
    the GPU has passed them, numbers until the run ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._phases: list[tuple[str, Any, Any]] = []
        "name, start and end of the phases of the current step"
        self._unread: deque[list[tuple[str, Any, Any]]] = deque()
        "of steps that the device may not have finished yet: the step, then its phases"
        self._last_end: Any = None
        "end of the step before; None after a pause"
        self._start: Any = None
        "beginning of the current step"
        self._num_read = 0
        self._seconds = {"step": array("d")}
        "of steps and phases; a phase's last zeros are missing"

    @contextmanager
    def step(self) -> Iterator[None]:
        self._start = self._now() if self._last_end is None else self._last_end
        self._phases = []
        yield
        self._last_end = self._now()
        self._unread.append([("step", self._start, self._last_end), *self._phases])
        while self._unread and (self.device.type != "cuda" or self._unread[0][0][2].query()):
            self._read_first()

    def pause(self) -> None:
        """Exclude the time since the last step, such as an evaluation or a checkpoint, from the next step.

        Within a step, the step begins now.
        """
        self._last_end, self._start = None, self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the step. The times of parts with the same name are added up."""
        start = self._now()
        with record_function(f"phase:{name}"):
            yield
        self._phases.append((name, start, self._now()))

    @property
    def seconds(self) -> list[float]:
        self._drain()
        return self._seconds["step"].tolist()

    def phase_seconds(self) -> dict[str, list[float]]:
        """Return, for each phase, its seconds in each step."""
        self._drain()
        phases = {name: seconds.tolist() for name, seconds in self._seconds.items() if name != "step"}
        return {name: each + [0.0] * (self._num_read - len(each)) for name, each in phases.items()}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        for name, start, end in self._unread.popleft():
            seconds = self._seconds.setdefault(name, array("d"))
            seconds.extend([0.0] * (self._num_read + 1 - len(seconds)))
            is_cuda = self.device.type == "cuda"  # its events count milliseconds
            seconds[-1] += start.elapsed_time(end) / 1e3 if is_cuda else round(end - start, 7)
        self._num_read += 1


def num_compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # private; slow to import if nothing compiles
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure peaks anew, without memory that is cached after preparing, compiling or probing."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps freed memory below its top
        trim(0)


def tensor_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of this rank's part of `tensors`; memory that tensors share is counted once."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            seen[local.data_ptr(), local.nbytes] = local.nbytes
    return sum(seen.values())


class GradientCounter:
    """Count the bytes of this rank's gradients between backward and the optimizer's first step.

    accelerate runs DeepSpeed's backward and step as one call, so this class wraps DeepSpeed's step.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        self.accelerator, self.model, self.engine = accelerator, model, deepspeed_engine(accelerator)
        self.num_bytes: int | None = None
        self.dtypes: frozenset[str] = frozenset()
        self.norms: dict[str, float | None] = {}
        "norm of each parameter's gradient, after the reduction and before clipping"
        self.module = accelerator.unwrap_model(model)
        if self.engine is not None:
            zero = self.engine.optimizer
            original = zero.step

            def count_and_step(*args: Any, **kwargs: Any) -> Any:
                zero.step = original
                self.count()
                return original(*args, **kwargs)

            zero.step = count_and_step

    def count(self) -> None:
        """Count the gradients, if they were not counted yet."""
        if self.num_bytes is not None:
            return
        gradients = live_gradients(self.model, self.engine)
        self.num_bytes = tensor_bytes(gradients)
        dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
        self.dtypes = frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes)
        with record_function(READING_GRADIENTS):
            norms = gradient_norms(self.module, self.engine)
        scale = self._loss_scale()
        self.norms = {name: None if norm is None else norm / scale for name, norm in norms.items()}

    @property
    def overflowed(self) -> bool:
        """True if a gradient is not finite, the same on all ranks: in fp16 that is normal."""
        return not all(math.isfinite(norm) for norm in self.norms.values() if norm is not None)

    def _loss_scale(self) -> float:
        if self.accelerator.scaler is not None:
            return self.accelerator.scaler.get_scale()
        return getattr(self.engine.optimizer, "loss_scale", 1.0) if self.engine is not None else 1.0


def live_gradients(model: torch.nn.Module, engine: Any) -> list[torch.Tensor | None]:
    """Return all gradients in this rank's memory; `engine` is DeepSpeed's, None under any other."""
    gradients = [param.grad for param in model.parameters()]
    if engine is not None:
        zero = engine.optimizer
        for group in getattr(zero, "averaged_gradients", {}).values():
            gradients += group or []
        gradients += getattr(zero, "fp32_groups_gradients_flat", [])  # BF16_Optimizer's
        gradients += [master.grad for master in _deepspeed_masters(zero)]  # offloaded gradients
    return gradients


@torch.no_grad()
def gradient_norms(module: torch.nn.Module, engine: Any) -> dict[str, float | None]:
    """Return each trained parameter's norm of the reduced gradient, before clipping; None without a gradient.

    Every rank must call it, between backward and the optimizer's step. Empty under FSDP1, because its flat
    parameters combine several parameters.
    """
    norms: dict[str, torch.Tensor | None] = {}
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        gradient = param.grad if engine is None else _whole_gradient(param)
        if gradient is not None and engine is None and gradient.shape != param.shape:
            return {}
        norm = None if gradient is None else torch.linalg.vector_norm(gradient, dtype=torch.float32)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms[parameter_name(name)] = norm
    present = [norm for norm in norms.values() if norm is not None]
    values = iter(torch.stack(present).tolist() if present else [])
    return {name: None if norm is None else next(values) for name, norm in norms.items()}


def _whole_gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(param)


def num_trainable(model: torch.nn.Module) -> int:
    """Return the number of trained parameters over all ranks; under FSDP1, only in this rank's shards."""
    trained = (param for param in model.parameters() if param.requires_grad)
    return sum(getattr(param, "ds_numel", param.numel()) for param in trained)


def training_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, list[torch.Tensor]]:
    """Return this rank's live tensors: parameters, master_weights (may be empty) and optimizer."""
    if (engine := deepspeed_engine(accelerator)) is not None:
        return _deepspeed_state(engine)
    state = optimizer.optimizer.state.values()
    return {
        "parameters": list(model.parameters()),
        "master_weights": [param_state["master"] for param_state in state if "master" in param_state],
        "optimizer": [
            value
            for param_state in state
            for key, value in param_state.items()
            if key != "master" and isinstance(value, torch.Tensor)
        ],
    }


def deepspeed_engine(accelerator: Accelerator) -> Any:
    """Return DeepSpeed's engine; None under any other engine."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return wrapped.engine if wrapped is not None else None


@contextmanager
def each_step_in(context: Callable[[], AbstractContextManager[Any]], stepper: Any) -> Iterator[None]:
    """Run each `stepper.step` in a new context. For DeepSpeed, which steps inside backward; else None."""
    if stepper is None:
        yield
        return
    take_step = stepper.step

    def step_inside(*arguments: Any, **options: Any) -> Any:
        with context():
            return take_step(*arguments, **options)

    stepper.step = step_inside
    yield
    stepper.step = take_step


def _deepspeed_state(engine: Any) -> dict[str, list[torch.Tensor]]:
    zero = engine.optimizer
    params = list(engine.module.parameters())
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        params = [param.ds_tensor for param in params]
    adam = getattr(zero, "optimizer", zero).state.values()
    values = [value for param_state in adam for value in param_state.values()]
    moments = [value for value in values if isinstance(value, torch.Tensor)]
    return {"parameters": params, "master_weights": _deepspeed_masters(zero), "optimizer": moments}


def _deepspeed_masters(zero: Any) -> list[torch.Tensor]:
    """Return the master weights of stage 3, or of stages 1 and 2; empty under stage 0."""
    names = (
        *("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"),
        "fp32_groups_flat_partition",  # of BF16_Optimizer: stage 1 with fp32 gradients
    )
    return next((list(getattr(zero, name)) for name in names if hasattr(zero, name)), [])


TRACE_FILE = "trace-rank{rank}.json.gz"
PROFILED_STEPS = 3
PROFILER_STEPS = 1 + PROFILED_STEPS  # the first step warms the profiler up and is not in the trace


def profile_steps(step: Callable[[], object], folder: Path, accelerator: Accelerator) -> Anatomy | None:
    """Call `step` PROFILER_STEPS times under torch.profiler, and return the shares of time.

    Every rank must call it, so that profiling slows all ranks equally. Profiled steps show shares, not rates.
    It writes each rank's trace into `folder`; open it in https://ui.perfetto.dev. Returns None if the GPU's
    driver shows no kernels, for example because only administrators may profile.
    """
    say(f"profiling; traces: {folder}/trace-rank*.json.gz, table: slm report {folder}")
    path = folder / TRACE_FILE.format(rank=accelerator.process_index)
    has_gpu = torch.cuda.is_available()
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])],
        schedule=schedule(wait=0, warmup=1, active=PROFILED_STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=False,
        with_stack=False,
        acc_events=True,  # changes nothing for a single cycle, and silences torch 2.11's warning
    )
    # torch names only Adam's part of DeepSpeed's step
    engine, phase = deepspeed_engine(accelerator), partial(record_function, "phase:optimizer")
    with each_step_in(phase, engine and engine.optimizer), profiler:
        for _ in range(PROFILER_STEPS):
            step()
            if has_gpu:
                torch.cuda.synchronize()
            profiler.step()  # the last call writes the trace
    anatomy = anatomy_of(read_trace(path))
    if has_gpu and anatomy.device != "cuda":
        say(
            "no step anatomy: the GPU driver reported no kernels; it may allow profiling to "
            "administrators only"
        )
        return None
    return anatomy
