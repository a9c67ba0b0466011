"""Profiles a few steps with torch.profiler, writes a chrome trace and reads it back as an anatomy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from slm_toolkit.record.step_breakdown import Anatomy, anatomy_of, read_trace

TRACE_FILE = "trace-rank{rank}.json.gz"
PROFILED_STEPS = 3
PROFILER_STEPS = 1 + PROFILED_STEPS  # the profiler warms up in the first, which is not in the trace


class StepProfiler:
    """Profiles steps 2 to PROFILER_STEPS; `step()` ends each.

    The profiler itself takes time, most of all on a CPU: profiled steps show shares of time, not rates.
    """

    def __init__(self, path: Path) -> None:
        """`path` ends in .json.gz; its folder exists once the profiled steps are done."""
        self.path = path
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=PROFILED_STEPS, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            record_shapes=False,
            with_stack=False,
            acc_events=True,  # changes nothing for a single cycle, and silences torch 2.11's warning
        )

    def start(self) -> None:
        self._profile.start()

    def step(self) -> None:
        """Call it after each training step, outside of timed code. The last call writes the trace."""
        self._profile.step()

    def stop(self) -> Anatomy:
        """This rank's anatomy; PROFILER_STEPS steps must be done."""
        self._profile.stop()
        return anatomy_of(read_trace(self.path))


def profile_steps(
    step: Callable[[], object], folder: Path, *, deepspeed_engine: Any | None
) -> Anatomy | None:
    """Call `step` PROFILER_STEPS times under the profiler. Every rank must, so that all are slowed alike.

    Writes a trace of each rank into `folder`; https://ui.perfetto.dev opens it. None on a GPU whose driver
    shows no kernels, for example where only administrators may profile.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    profiler = StepProfiler(folder / TRACE_FILE.format(rank=rank))
    if deepspeed_engine is not None:  # it steps inside backward, and torch names only Adam's part of the step
        zero_step = deepspeed_engine.optimizer.step

        def named_step(*arguments: Any, **options: Any) -> Any:
            with torch.profiler.record_function("phase:optimizer"):
                return zero_step(*arguments, **options)

        deepspeed_engine.optimizer.step = named_step
    profiler.start()
    for _ in range(PROFILER_STEPS):
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.step()
    anatomy = profiler.stop()
    return None if torch.cuda.is_available() and anatomy.device != "cuda" else anatomy
