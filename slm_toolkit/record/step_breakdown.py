"""Split a training step's time into activities, from a torch.profiler trace; needs no torch.

    anatomy_of(read_trace("trace.json.gz"))

The steps are the trace's `ProfilerStep#N` annotations. Each instant of a step counts for the first activity
in this list that applies:

 1. compute runs: optimizer > attention > matmul > other. Communication at the same time is also counted as
    overlapped, outside the sum;
 2. communication runs alone, or a thread waits for it: exposed;
 3. the annotation `phase:data` is open: data;
 4. idle: on a GPU no kernel runs; on a CPU, Python or other code that is not a torch op runs.

On a GPU, kernels and copies on all streams count; a kernel's name decides its activity.
`measure.profile_steps` synchronizes after each step, so that every step's kernels end inside the step's
window on the CPU. The step is that window; it includes the wait before the first kernel.

On a CPU, ops of the training thread (and of autograd's thread, if it is another) are compute; `gloo:...` on
any thread is communication. Autograd nodes, autograd.Functions and the hooks of FSDP and DeepSpeed enclose
waits, so they are not compute, but the ops inside them are. `c10d::...` waits for communication. Compute and
communication share the cores, so overlapped communication slows the compute that hides it.

Optimizer: everything that is launched inside `phase:optimizer` or torch's `Optimizer.step#...`, including
clipping and clearing. Under DeepSpeed it is the optimizer's step; the norm for clipping may be computed
before it. Attention: fused kernels; on a CPU also `bmm` and `softmax` of eager attention, which on a GPU are
matmul and other compute.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float, str]
"start and end in microseconds, and the kind of activity"

_COMPUTE = ("optimizer", "attention", "matmul", "other_compute")
BUSY = (*_COMPUTE, "communication_exposed", "data")
"an instant counts for the first that runs"

_OPTIMIZER = re.compile(r"phase:optimizer$|Optimizer\.step#")
_COMMUNICATION = re.compile(r"gloo:|.*nccl")  # gloo's annotations on its own threads, and NCCL's kernels
_WAIT = re.compile(r"c10d::|_?c10d_functional::|record_param_comms$")
_OP = re.compile(r"(?!autograd::|torch::autograd::)\w+::|## Call CompiledFxGraph")  # others run hooks
_FUSED_BY_INDUCTOR = re.compile(r"triton_(poi|red|per)_")  # their names list ops that they replace or follow
_ATTENTION = re.compile(
    r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product|aten::(bmm|baddbmm|_softmax(_backward_data)?)$",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"::_?(mm|addmm|mv|addmv|matmul|linear\w*|scaled_mm|grouped_mm|mkldnn_linear\w*)$"
    r"|gemm|gemv|cutlass|cublas|nvjet|xmma|triton_tem_fused_\w*mm",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Anatomy:
    """Mean seconds per profiled step of one rank, by activity. The parts add up to `step_seconds`."""

    matmul_seconds: float
    attention_seconds: float
    other_compute_seconds: float
    optimizer_seconds: float
    communication_exposed_seconds: float
    data_seconds: float
    idle_seconds: float
    communication_overlapped_seconds: float
    "communication while compute ran: contained in the compute above, not added to the sum"
    num_steps: int
    device: str
    "cuda or cpu"

    @property
    def step_seconds(self) -> float:
        return sum(getattr(self, f"{part}_seconds") for part in (*BUSY, "idle"))


def read_trace(path: str | Path) -> list[Event]:
    """Read the events of a Chrome trace, a `.json.gz`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def anatomy_of(events: list[Event]) -> Anatomy:
    """Compute the Anatomy of a trace with at least one annotated step."""
    events = [event for event in events if event["ph"] == "X" and "dur" in event]
    steps = [event for event in events if _is_annotation(event, "ProfilerStep#")]
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    activities = _gpu_intervals(events) if on_gpu else _cpu_intervals(events, {step["tid"] for step in steps})
    data = [event for event in events if event["name"] == "phase:data"]
    parts = _sweep(
        [
            *activities,
            *((*_span(step), "step") for step in steps),
            *((*_span(event), "data") for event in data),
        ]
    )
    return Anatomy(
        **{
            f"{part}_seconds": parts[part] / 1e6 / len(steps)
            for part in (*BUSY, "idle", "communication_overlapped")
        },
        num_steps=len(steps),
        device="cuda" if on_gpu else "cpu",
    )


def _sweep(intervals: list[Interval]) -> Counter[str]:
    """Sum the microseconds of each part, over all instants inside a `step` interval."""
    points = [(start, 1, kind) for start, _, kind in intervals]
    points += [(end, -1, kind) for _, end, kind in intervals]
    running: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    previous = 0.0
    for instant, change, kind in sorted(points):
        if running["step"] and instant > previous:
            part = next((kind for kind in (*BUSY[:-1], "wait", "data") if running[kind]), "idle")
            parts["communication_exposed" if part == "wait" else part] += instant - previous
            if part in _COMPUTE and running["communication_exposed"]:
                parts["communication_overlapped"] += instant - previous
        running[kind] += change
        previous = instant
    return parts


def _cpu_intervals(events: list[Event], step_threads: set[int]) -> Iterator[Interval]:
    """Yield the ops of the training threads, and the collectives."""
    threads = step_threads | {
        event["tid"] for event in events if event["name"].startswith("autograd::engine::")
    }
    optimizers = _optimizer_spans(events)
    for event in events:
        name = event["name"]
        if _COMMUNICATION.match(name):
            yield *_span(event), "communication_exposed"
        elif event.get("cat") == "cpu_op" and event["tid"] in threads:
            if _WAIT.match(name):
                yield *_span(event), "wait"
            elif _OP.match(name):
                yield *_span(event), _compute_kind(name, event, optimizers)


def _gpu_intervals(events: list[Event]) -> Iterator[Interval]:
    """Yield the kernels and copies of all streams."""
    optimizers = _optimizer_spans(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name, launch = event["name"], launches.get(event.get("args", {}).get("correlation"))
            is_communication = _COMMUNICATION.match(name)
            kind = "communication_exposed" if is_communication else _compute_kind(name, launch, optimizers)
            yield *_span(event), kind


def _compute_kind(name: str, launch: Event | None, optimizers: list[Event]) -> str:
    """Return the activity of an op or kernel. `launch`: the event on the CPU that started it."""
    if launch and any(
        span["tid"] == launch["tid"] and span["ts"] <= launch["ts"] <= span["ts"] + span["dur"]
        for span in optimizers
    ):
        return "optimizer"
    if _FUSED_BY_INDUCTOR.match(name):
        return "other_compute"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "other_compute"


def _optimizer_spans(events: list[Event]) -> list[Event]:
    return [
        event for event in events if event.get("cat") == "user_annotation" and _OPTIMIZER.match(event["name"])
    ]


def _is_annotation(event: Event, prefix: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(prefix)


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
