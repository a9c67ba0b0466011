"""Run Python as if this machine had NVIDIA GPUs, to see that code for a GPU runs before there is one.

    python bench/gpu/pretend.py -m slm_toolkit.train --model slm-1m --max_steps 3
    python bench/gpu/pretend.py --gpus 2 -m slm_toolkit.cli.main compare ...

The lines under `torch.cuda.is_available()` and `device.type == "cuda"` run, in child processes too. Every
tensor is in host RAM and says that it is on the GPU. Collectives of nccl run over gloo. Streams, events,
memory statistics and kernels are stand-ins: no time, byte or dollar means anything.

Not pretended: NVML, CUDA graphs, Triton, what `torch.compile` makes of a model (it returns the model), what a
GPU refuses (a sum of tensors on two devices), and libraries with CUDA code of their own (bitsandbytes).
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_GPUS = "SLM_PRETEND_GPUS"
NAME = "NVIDIA H200"
MEMORY_BYTES = int(139.8 * 2**30)
USED_BYTES = 2**30


def pretend_with(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with a module after its first import."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, found: str, path: Any, target: Any = None) -> Any:
            if found != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), change(module))
            return spec

    sys.meta_path.insert(0, Finder())


def install() -> None:
    """In each Python below `main`: pretend as soon as torch is imported."""
    pretend_with("torch", lambda torch: (pretend_cuda(torch), pretend_tensors(torch), pretend_nccl(torch)))

    def show_driver(gpus: Any) -> None:
        gpus.NVIDIA_FILES = (__file__,)

    pretend_with("slm_toolkit.hardware.gpus", show_driver)


def returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class Event:
    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return 1e3 * (end.seconds - self.seconds)

    query = returns(True)
    wait = synchronize = returns(None)


class Stream:
    """The one order in which a CPU does things; also the context of a device."""

    cuda_stream = priority = 0
    query = returns(True)
    is_capturing = returns(False)
    __init__ = __exit__ = wait_event = wait_stream = synchronize = returns(None)

    def __enter__(self) -> "Stream":
        return self

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


def pretend_cuda(torch: Any) -> None:
    """Replace what torch.cuda and torch.accelerator would ask the driver."""
    num_gpus, stream = int(os.environ[NUM_GPUS]), Stream()
    properties = types.SimpleNamespace(
        name=NAME,
        uuid="aaaaaaaa-0000-0000-0000-000000000000",
        total_memory=MEMORY_BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        is_integrated=False,
    )
    values = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("init", "_lazy_init", "synchronize", "empty_cache")),
        **dict.fromkeys(("set_device", "set_device_index", "set_stream", "manual_seed_all", "manual_seed")),
        **dict.fromkeys(("reset_peak_memory_stats", "is_current_stream_capturing")),
        **dict.fromkeys(("current_stream", "default_stream", "stream"), stream),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), USED_BYTES),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), USED_BYTES),
        **dict.fromkeys(("current_device", "current_device_index"), int(os.environ.get("LOCAL_RANK", "0"))),
        "current_accelerator": torch.device("cuda"),
        "device_count": num_gpus,
        "get_device_name": NAME,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "memory_stats": {"num_alloc_retries": 0, "num_ooms": 0},
        "mem_get_info": (MEMORY_BYTES - 2 * USED_BYTES, MEMORY_BYTES),
    }
    for module in (torch.cuda, torch.accelerator):
        for name, value in values.items():
            setattr(module, name, returns(value))  # anew each time: Dynamo has one rule per function
    torch.cuda._lazy_call = lambda call, **_: call()
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.device = Event, Stream, Stream
    torch.cuda.default_generators = (torch.default_generator,) * num_gpus
    torch.cuda.nccl.version = returns((2, 28, 0))
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = returns(None), returns(None)
    torch._C._get_accelerator = torch.accelerator.current_accelerator  # FSDP2's default mesh
    torch.Stream, torch.Event = Stream, Event
    torch.version.cuda = "13.0"
    torch.compile = lambda model=None, **_: model or (lambda function: function)

    profile = torch.profiler.profile
    torch.profiler.profile = lambda *, activities, **kwargs: profile(activities=activities[:1], **kwargs)

    @contextmanager
    def any_kernel(*_: Any, **__: Any) -> Iterator[None]:
        yield  # a CPU has not all of a GPU's kernels

    torch.nn.attention.sdpa_kernel = any_kernel


def pretend_tensors(torch: Any) -> None:
    """Let tensors say that they are on the GPU, and make on the CPU what is asked for on the GPU."""
    from torch.utils._device import DeviceContext, _device_constructors

    base = torch._C.TensorBase

    def on_host(value: Any) -> Any:
        """The CPU instead of a GPU; anything else as it is."""
        if isinstance(value, str | torch.device) and torch.device(value).type == "cuda":
            return torch.device("cpu")
        return torch.device("cpu") if type(value) is int else value

    def device(tensor: Any) -> Any:
        real = base.device.__get__(tensor)
        return torch.device("cuda", torch.cuda.current_device()) if real.type == "cpu" else real

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if "cpu" in map(str, (*args[:1], kwargs.get("device"))):
            tensor = tensor.clone()  # a copy, as from a GPU
        kwargs = {name: on_host(value) for name, value in kwargs.items()}
        return base.to(tensor, *map(on_host, args), **kwargs)

    def made_on_host(function: Any) -> Any:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return function(*args, **{name: on_host(value) for name, value in kwargs.items()})

        return make

    constructors = _device_constructors()
    for name, function in list(vars(torch).items()):
        if isinstance(function, types.BuiltinFunctionType) and function in constructors:
            setattr(torch, name, made_on_host(function))
    for name in ("new_empty", "new_ones", "new_zeros", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, made_on_host(getattr(base, name)))
    torch.Tensor.device, torch.Tensor.to = property(device), to
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    torch.Tensor.is_cpu = property(returns(False))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.cpu = lambda tensor, *_, **__: tensor.clone()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    torch.Tensor.record_stream = returns(None)
    enter = DeviceContext.__init__
    DeviceContext.__init__ = lambda context, asked: enter(context, on_host(asked))
    begin = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device_type, *args, **kwargs: begin(self, "cpu", *args, **kwargs)
    for ask in (torch.is_autocast_enabled, torch.get_autocast_dtype):
        setattr(torch, ask.__name__, lambda kind=None, ask=ask: ask("cpu"))


def pretend_nccl(torch: Any) -> None:
    """Run nccl's collectives over gloo, which can't average."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def over_gloo(call: Any) -> Any:
        @functools.wraps(call)
        def make(*args: Any, **kwargs: Any) -> Any:
            for name in ("device_id", "device_ids"):
                kwargs.pop(name, None)
            args = ["gloo" if "nccl" in str(arg) else arg for arg in args]
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            return call(*args, **kwargs)

        return make

    def is_average(arg: Any) -> bool:
        return not isinstance(arg, torch.Tensor) and arg == dist.ReduceOp.AVG

    def summed(call: Any) -> Any:
        """A collective whose average is a sum, then a division."""

        @functools.wraps(call)
        def collective(*args: Any, **kwargs: Any) -> Any:
            averages = any(map(is_average, (*args, *kwargs.values())))
            if averages:
                args = [arg for arg in args if not is_average(arg)]
                kwargs["op"] = dist.ReduceOp.SUM
            work = call(*args, **kwargs)
            if averages:
                if work is not None:
                    work.wait()
                (args or list(kwargs.values()))[0].div_(dist.get_world_size(kwargs.get("group")))
            return work

        return collective

    backend_of = c10d.get_backend
    answers = {
        "init_process_group": over_gloo(c10d.init_process_group),
        "new_group": over_gloo(c10d.new_group),
        "barrier": over_gloo(c10d.barrier),
        "get_backend": lambda group=None: backend_of(group).replace("gloo", "nccl"),
        "is_nccl_available": returns(True),
        "ProcessGroupNCCL": type("ProcessGroupNCCL", (), {}),  # a CPU build has none, but asks for it
        "all_reduce": summed(c10d.all_reduce),
        "reduce_scatter_tensor": summed(c10d.reduce_scatter_tensor),
    }
    for name, answer in answers.items():
        setattr(c10d, name, answer)
        setattr(dist, name, answer)


def main() -> None:
    words = sys.argv[1:]
    num_gpus = "1"
    if words[:1] == ["--gpus"]:
        _, num_gpus, *words = words
    paths = [str(Path(__file__).resolve().parent / "pretend_site"), os.environ.get("PYTHONPATH", "")]
    variables = {NUM_GPUS: num_gpus, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **variables})


if __name__ == "__main__":
    main()
