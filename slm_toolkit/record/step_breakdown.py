"""Split a training step's time into activities, from a torch.profiler trace; needs no torch.

    anatomy_of(read_trace("trace.json.gz"))

The steps are the trace's `ProfilerStep#N` annotations. Each instant of a step counts for the first activity
in this list that applies:

 1. compute runs: optimizer > attention > matmul > other. Communication at the same time is also counted as
    overlapped, outside the sum;
 2. communication runs alone, or a thread waits for it: exposed;
 3. the annotation `phase:data` is open: data;
 4. idle: on a GPU no kernel runs; on a CPU, Python or other code that is not a torch op runs.

On a GPU, kernels and copies on all streams count. A kernel's name and the CPU op that launched it decide its
activity. `measure.profile_steps` synchronizes after each step, so that every step's kernels end inside the
step's window on the CPU. The step is that window; it includes the wait before the first kernel.

On a CPU, ops of the training thread (and of autograd's thread, if it is another) are compute; `gloo:...` on
any thread is communication. Only the innermost op at an instant counts. Autograd nodes, autograd.Functions
and the hooks of FSDP and DeepSpeed enclose waits, so their own time is not compute. The own time of
`c10d::...` is communication; a copy inside it is compute. Compute and communication share the cores, so
overlapped communication slows the compute that hides it.

Optimizer: everything inside `phase:optimizer` or torch's `Optimizer.step#...`, including clipping and
clearing. Under DeepSpeed it is the optimizer's step; the norm for clipping may be computed before it.
Attention: fused kernels, or `bmm` and `softmax` of eager attention, whose mask, scale and casts are other
compute.
"""

import bisect
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float, str]
"start and end in microseconds, and the kind of activity"

_COMPUTE = ("optimizer", "attention", "matmul", "other_compute")
BUSY = (
    *_COMPUTE,
    "communication_exposed",
    "data",
)  # an instant counts for the first that runs

_STEP = re.compile(r"ProfilerStep#(\d+)")
_OPTIMIZER = re.compile(r"phase:optimizer$|Optimizer\.step#")
_COLLECTIVE = re.compile(r"gloo:")  # annotations on a process group's own thread
_COMMUNICATION_OP = re.compile(r"c10d::|_?c10d_functional::|record_param_comms$")
_WRAPPER = re.compile(r"autograd::|torch::autograd::")  # so are names without "::": nodes and Functions
_COMPILED = re.compile(r"## Call CompiledFxGraph")  # its own time is Inductor's generated code
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product", re.IGNORECASE)
_EAGER_ATTENTION_OPS = {"aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data"}
_MATMUL_OP = re.compile(r"\w+::_?(mm|addmm|mv|addmv|matmul|linear\w*|scaled_mm|grouped_mm|mkldnn_linear\w*)$")
_COMMUNICATION_KERNEL = re.compile(r"nccl")
_ADAM_KERNEL = re.compile(r"adam", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply")  # FSDP copies use it, too: only if no launch is known
_FUSED_BY_INDUCTOR = re.compile(r"triton_(poi|red|per)_")  # their names list ops that they replace or follow
_MATMUL_KERNEL = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma|triton_tem_fused_\w*mm", re.IGNORECASE)
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


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
    """Compute the Anatomy of a trace. Raises ValueError if no step is annotated."""
    events = [event for event in events if event["ph"] == "X" and "dur" in event]
    windows = [_span(event) for event in events if _is_step(event)]
    if not windows:
        raise ValueError(
            "the trace has no ProfilerStep#N annotation\n"
            "hint: give torch.profiler.profile a schedule, and call its step() after each training step"
        )
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    intervals = [(start, end, "step") for start, end in windows]
    intervals += _gpu_intervals(events) if on_gpu else _cpu_intervals(events)
    intervals += [(*_span(event), "data") for event in events if event["name"] == "phase:data"]
    parts = _sweep(intervals)

    return Anatomy(
        **{
            f"{part}_seconds": parts[part] / 1e6 / len(windows)
            for part in (*BUSY, "idle", "communication_overlapped")
        },
        num_steps=len(windows),
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
            part = next((kind for kind in BUSY if running[kind]), "idle")
            parts[part] += instant - previous
            if part in _COMPUTE and running["communication_exposed"]:
                parts["communication_overlapped"] += instant - previous
        running[kind] += change
        previous = instant
    return parts


def _cpu_intervals(events: list[Event]) -> Iterator[Interval]:
    """Yield the CPU's activities: the innermost ops of the training threads, and the collectives."""
    training = {event["tid"] for event in events if _is_step(event)}
    training |= {event["tid"] for event in events if event["name"].startswith("autograd::engine::")}
    for tid, frames in _frames_by_thread(events).items():
        if tid in training:
            yield from ((start, end, frame.kind) for start, end, frame in frames if frame.kind)
    for event in events:
        if _COLLECTIVE.match(event["name"]):
            yield *_span(event), "communication_exposed"


def _gpu_intervals(events: list[Event]) -> Iterator[Interval]:
    """Yield the device's activities on all streams."""
    frames = _frames_by_thread(events)
    launches, ops = {}, {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            launches[args["correlation"]] = event
        elif event.get("cat") == "cpu_op" and "External id" in args:
            ops[args["External id"]] = event
    for event in events:
        if event.get("cat") in _DEVICE_CATEGORIES:
            args = event.get("args", {})
            launchers = (launches.get(args.get("correlation")), ops.get(args.get("External id")))
            launching = (
                _frame_at(frames[launcher["tid"]], launcher["ts"]) for launcher in launchers if launcher
            )
            yield *_span(event), _kernel_kind(event["name"], next(filter(None, launching), None))


@dataclass(frozen=True)
class _Frame:
    """An op on a thread's stack; it inherits its activity from the ops that enclose it."""

    name: str
    end: float
    is_op: bool
    in_optimizer: bool
    in_attention: bool

    @property
    def kind(self) -> str | None:
        """Return the activity of the op's own time, without its inner ops; None if it may be a wait."""
        name = self.name
        if not self.is_op:
            return None
        if _COMMUNICATION_OP.match(name):
            return "communication_exposed"
        if _is_wrapper(name):
            return None
        if self.in_optimizer:
            return "optimizer"
        if self.in_attention:
            return "attention"
        return "matmul" if _MATMUL_OP.match(name) else "other_compute"


def _frames_by_thread(events: list[Event]) -> dict[int, list[tuple[float, float, _Frame]]]:
    """Split each thread's time where the innermost op changes; optimizer annotations count as ops."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" or (
            event.get("cat") == "user_annotation" and _OPTIMIZER.match(event["name"])
        ):
            threads[event["tid"]].append(event)
    return defaultdict(list, {tid: list(_innermost(of_thread)) for tid, of_thread in threads.items()})


def _innermost(events: Iterable[Event]) -> Iterator[tuple[float, float, _Frame]]:
    stack: list[_Frame] = []
    now = 0.0
    last = {"name": "", "ts": float("inf"), "dur": 0.0}  # closes all open frames
    for event in (*sorted(events, key=lambda event: (event["ts"], -event["dur"])), last):
        start, end = _span(event)
        while stack and stack[-1].end <= start:
            frame = stack.pop()
            if now < frame.end:
                yield now, frame.end, frame
                now = frame.end
        if stack and now < start:
            yield now, start, stack[-1]
        now = start
        name, enclosing = event["name"], stack[-1] if stack else None
        stack.append(
            _Frame(
                name=name,
                end=end,
                is_op=event.get("cat") == "cpu_op",
                in_optimizer=bool(_OPTIMIZER.match(name))
                or (enclosing is not None and enclosing.in_optimizer),
                in_attention=name in _EAGER_ATTENTION_OPS
                or (bool(_ATTENTION.search(name)) and not _is_wrapper(name))
                or (enclosing is not None and enclosing.in_attention),
            )
        )


def _is_wrapper(name: str) -> bool:
    """Return whether an op runs hooks, which wait, prefetch or recompute."""
    return not _COMPILED.match(name) and ("::" not in name or _WRAPPER.match(name) is not None)


def _frame_at(frames: list[tuple[float, float, _Frame]], instant: float) -> _Frame | None:
    index = bisect.bisect_right(frames, instant, key=lambda frame: frame[0]) - 1
    return frames[index][2] if index >= 0 and instant < frames[index][1] else None


def _kernel_kind(name: str, frame: _Frame | None) -> str:
    """Return the activity of a kernel launched by the op `frame`; None: the op is unknown."""
    if _COMMUNICATION_KERNEL.search(name):
        return "communication_exposed"
    if (frame and frame.in_optimizer) or _ADAM_KERNEL.search(name):
        return "optimizer"
    if frame is None and _OPTIMIZER_KERNEL.search(name):
        return "optimizer"
    if _FUSED_BY_INDUCTOR.match(name):
        return "other_compute"
    if (frame and frame.in_attention) or _ATTENTION.search(name):
        return "attention"
    if _MATMUL_KERNEL.search(name) or (frame and _MATMUL_OP.match(frame.name)):
        return "matmul"
    return "other_compute"


def _is_step(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"]) is not None


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
