"""Run Python as if this machine had an NVIDIA GPU; every tensor stays in host RAM.

    python bench/gpu/pretend.py -- -m slm_toolkit.train --model slm-1m --max_steps 3
    python bench/gpu/pretend.py --gpus 2 --memory_gib 1 -- -m slm_toolkit.cli.main compare ...

The lines under `torch.cuda.is_available()` and `device.type == "cuda"` run, in child processes too. Each
storage is on the GPU or on the host, as on a real machine: an operation that mixes the two raises, as do
`numpy()` of a GPU tensor and a GPU that is full. Collectives of nccl run over gloo. Kernels, streams and
clocks are the CPU's, so times and dollars mean nothing.

Not pretended: kernels in a profile (`--profile` finds no step breakdown), CUDA graphs, and the insides of
compiled code, which sees CPU tensors and whose memory is not counted; libraries with CUDA code of their own
(bitsandbytes, flash-attn, TransformerEngine).
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SITE = HERE / "pretend_site"
NUM_GPUS, MEMORY_GIB = "SLM_PRETEND_GPUS", "SLM_PRETEND_MEMORY_GIB"
NAME, CAPABILITY, NUM_SMS = "NVIDIA H200", (9, 0), 132
UUID = "aaaaaaaa-0000-0000-0000-000000000000"
"of the device in nvml.c that answers every query"
H200_GIB = 139.8
"as PyTorch reports it (slm_toolkit/hardware/gpus.csv)"


def environment(*, num_gpus: int = 1, memory_gib: float = H200_GIB) -> dict[str, str]:
    """Variables that make each Python started with them pretend; NVML answers where a C compiler is."""
    folders = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(folders),
        NUM_GPUS: str(num_gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus))),  # NVML's pretended machine has eight
        MEMORY_GIB: str(memory_gib),
    }
    if library := _nvml():
        folders = [str(library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    return variables


def _nvml() -> Path | None:
    """The folder of a libnvidia-ml.so.1 that is compiled from nvml.c, once per user and version of it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source = HERE / "nvml.c"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"slm-pretended-nvml-{os.getuid()}-{key}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        unfinished = folder / f"{os.getpid()}.so"
        subprocess.run((compiler, "-shared", "-fPIC", "-o", unfinished, source), check=True)
        unfinished.rename(library)
    return folder


def install_with_torch() -> None:
    """Let `install` follow the first import of torch; and let the toolkit see a driver's file."""
    sys.meta_path.insert(0, _Finder("torch", lambda torch: install()))
    sys.meta_path.insert(0, _Finder("slm_toolkit.hardware.gpus", _show_driver))


def _show_driver(module: Any) -> None:
    module.NVIDIA_FILES = (str(HERE),)


def import_next_sitecustomize(folder: Path) -> None:
    """Run the sitecustomize that this one hides, if there is one further down the path."""
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != folder.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `then` with a module after its first import."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: types.ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_install
        return spec


def install() -> None:
    """Make torch, which has been imported, believe in a GPU; only for the rest of this process."""
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: nothing is pretended beside it")
    gpu = _Gpu(float(os.environ[MEMORY_GIB]), int(os.environ[NUM_GPUS]))
    _pretend_cuda(gpu)
    _pretend_collectives(gpu)
    _pretend_autocast()
    _enter_modes(gpu)


class _Gpu:
    """Which storages are on the GPU, how many bytes they take, and how many they took at most."""

    def __init__(self, memory_gib: float, num_gpus: int) -> None:
        self.total_bytes, self.num_gpus = int(memory_gib * 2**30), num_gpus
        self.index = 0
        self.allocated = self.peak = self.peak_reserved = self.num_ooms = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._on_host: weakref.WeakSet[Any] = weakref.WeakSet()
        "storages made for the host; of others, a compiled kernel's say, nothing is known"
        self.is_hidden = False
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.target = threading.local()

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor's storage is on the GPU; of a DTensor its local part's."""
        storage = None if self.is_hidden else _storage_of(tensor)
        return storage is not None and storage._cdata in self._storages

    def is_on_host(self, tensor: Any) -> bool:
        storage = _storage_of(tensor)
        return storage is not None and storage in self._on_host

    def keep_on_host(self, tensor: Any) -> None:
        if (storage := _storage_of(tensor)) is not None and storage._cdata not in self._storages:
            self._on_host.add(storage)

    def put(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            self.resized(storage)
            return
        nbytes = _rounded(storage.nbytes())
        if self.allocated + nbytes > self.total_bytes:
            self.num_ooms += 1
            raise _out_of_memory(self, nbytes)

        def freed(_: Any) -> None:
            self._grow(-self._storages.pop(key)[1])

        self._storages[key] = weakref.ref(storage, freed), nbytes
        self._grow(nbytes)

    def resized(self, storage: Any) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None:
            nbytes = _rounded(storage.nbytes())
            self._storages[storage._cdata] = known[0], nbytes
            self._grow(nbytes - known[1])

    def reset_peak(self) -> None:
        self.peak = self.peak_reserved = self.allocated

    def _grow(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        self.peak_reserved = -(-self.peak // 2**21) * 2**21  # the allocator's segments are of 2 MiB

    @contextlib.contextmanager
    def making(self, device: str | None) -> Iterator[None]:
        """Inside, new storages are on `device`; None: where their inputs are."""
        before = getattr(self.target, "device", None)
        self.target.device = device
        try:
            yield
        finally:
            self.target.device = before


def _storage_of(tensor: Any) -> Any:
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512  # as CUDA's caching allocator rounds


def _out_of_memory(gpu: _Gpu, nbytes: int) -> Exception:
    import torch

    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. GPU {gpu.index} has a total "
        f"capacity of {gpu.total_bytes / 2**30:.2f} GiB of which "
        f"{(gpu.total_bytes - gpu.allocated) / 2**20:.2f} MiB is free."
    )


def _enter_modes(gpu: _Gpu) -> None:
    """Follow each tensor of this thread, and of those that autograd runs for it, to its device."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
    from torch.utils._device import _device_constructors
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    aten, Tensor, base = torch.ops.aten, torch.Tensor, torch._C.TensorBase
    real_device, real_is_cpu = base.device.__get__, base.is_cpu.__get__
    copies = {aten.copy_, aten._to_copy, aten.set_, aten.equal}
    indexing = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
    constructors = _device_constructors()

    def on_gpu() -> torch.device:
        return torch.device("cuda", gpu.index)

    class Placement(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls) -> bool:  # or Dynamo would compile nothing
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it turns into operations on the local part, which come back here
            kwargs = kwargs or {}
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            held = any(gpu.holds(tensor) for tensor in inputs)
            hosts = [tensor for tensor in inputs if gpu.is_on_host(tensor)]
            target = getattr(gpu.target, "device", None)
            if target is None:
                mixes = func.namespace == "aten" and func.overloadpacket not in copies | indexing
                if held and mixes and any(tensor.dim() for tensor in hosts):
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two devices, "
                        f"cuda:{gpu.index} and cpu! (when checking arguments of {func})"
                    )
                if held or not inputs:
                    target = "cuda"
                elif len(hosts) == len(inputs):
                    target = "cpu"
            out = func(*args, **kwargs)
            for tensor in tree_leaves(out):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and real_device(tensor).type == "cpu":
                    if target == "cuda" and not gpu.is_on_host(tensor):
                        gpu.put(tensor)
                    elif target == "cpu":
                        gpu.keep_on_host(tensor)
            return out

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        args = list(args)
        device = kwargs.pop("device", None)
        other = kwargs.pop("other", None)
        if args and isinstance(args[0], torch.Tensor):
            other = args.pop(0)
        elif args and isinstance(args[0], (str, int, torch.device)) and not isinstance(args[0], bool):
            device = args.pop(0)
        elif args and args[0] is None:
            args.pop(0)
        if other is not None:
            device, kwargs["dtype"] = other.device, kwargs.get("dtype", other.dtype)
        names = ("dtype", "non_blocking", "copy") if device is not None and other is None else ("dtype",)
        if args and isinstance(args[0], torch.dtype):
            names = ("dtype", "non_blocking", "copy")
        elif args:
            names = ("non_blocking", "copy")
        kwargs |= dict(zip(names, args, strict=False))
        kwargs.pop("non_blocking", None)
        if device is None:
            return base.to(tensor, **kwargs) if kwargs else tensor
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "meta" or tensor.device.type == "meta":
            with gpu.making("cuda" if device.type == "cuda" else None), torch._C.DisableTorchFunction():
                return base.to(tensor, device="cpu" if device.type == "cuda" else device, **kwargs)
        if (device.type == "cuda") != gpu.holds(tensor):
            kwargs |= {"device": "cpu", "copy": True}
            with gpu.making("cuda" if device.type == "cuda" else "cpu"), torch._C.DisableTorchFunction():
                return base.to(tensor, **kwargs)
        return base.to(tensor, **kwargs) if kwargs else tensor

    def refuse_numpy(func: Any) -> Any:
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if gpu.holds(tensor):
                raise TypeError(
                    f"can't convert {on_gpu()} device type tensor to numpy. Use Tensor.cpu() to copy the "
                    "tensor to host memory first."
                )
            return func(tensor, *args, **kwargs)

        return numpy

    def pin(tensor: Any, *_: Any, **__: Any) -> Any:
        if gpu.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        with gpu.making("cpu"):
            pinned = tensor.clone()
        gpu.pinned.add(pinned.untyped_storage())
        return pinned

    # of the class, so that they hold in every thread and inside calls that a mode handles
    Tensor.device = property(lambda tensor: on_gpu() if gpu.holds(tensor) else real_device(tensor))
    Tensor.is_cuda = property(gpu.holds)
    Tensor.is_cpu = property(lambda tensor: real_is_cpu(tensor) and not gpu.holds(tensor))
    Tensor.get_device = lambda tensor: gpu.index if gpu.holds(tensor) else base.get_device(tensor)
    Tensor.to = to
    Tensor.cuda = lambda tensor, device=None, *_, **__: to(tensor, on_gpu())
    Tensor.cpu = lambda tensor, *_, **__: to(tensor, torch.device("cpu"))
    Tensor.numpy, Tensor.__array__ = refuse_numpy(base.numpy), refuse_numpy(Tensor.__array__)
    Tensor.pin_memory, Tensor.record_stream = pin, lambda *_: None
    Tensor.is_pinned = lambda tensor, *_, **__: tensor.untyped_storage() in gpu.pinned

    class Devices(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            is_pinned = kwargs.pop("pin_memory", False)
            device = kwargs.get("device")
            if func in constructors or device is not None:
                wanted = torch.device(device if device is not None else "cpu").type
                if isinstance(device, int) and not isinstance(device, bool):
                    wanted = "cuda"
                source = args[0] if args and isinstance(args[0], torch.Tensor) else None
                if device is None and source is not None:  # torch.as_tensor(tensor)
                    return func(*args, **kwargs)
                if func in (torch.as_tensor, torch.asarray, torch.tensor) and source is not None:
                    del kwargs["device"]
                    return to(func(*args, **kwargs), torch.device(wanted))
                if wanted == "cuda":
                    kwargs["device"] = "cpu"
                with gpu.making("cuda" if wanted == "cuda" else "cpu"):
                    made = func(*args, **kwargs)
                if wanted == "cuda" and isinstance(made, torch.Tensor):
                    gpu.put(made)  # torch.tensor's data come from no operation
                if is_pinned:
                    gpu.pinned.add(made.untyped_storage())
                return made
            return func(*args, **kwargs)

    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, nbytes: int) -> Any:  # FSDP2 frees and fills storages so
        result = resize(storage, nbytes)
        gpu.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_count
    devices, run_backward = Devices(), torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:  # a call that a mode handles runs without it
        with contextlib.nullcontext() if devices in _get_current_function_mode_stack() else devices:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = backward
    compile_for_cpu = torch.compile

    def compile_hidden(model: Any = None, **options: Any) -> Any:
        """Compiled code sees the CPU that it is compiled for; what it returns is on the GPU again."""
        if model is None:
            return functools.partial(compile_hidden, **options)
        import torch._functorch.config as of_functorch

        of_functorch.force_non_lazy_backward_lowering = True  # backward, too, is compiled inside `call`
        compiled = compile_for_cpu(model, **options)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if gpu.is_hidden or devices not in _get_current_function_mode_stack():
                return compiled(*args, **kwargs)
            held = any(gpu.holds(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            popped = _pop_mode()
            gpu.is_hidden = True
            try:
                with _disable_current_modes():
                    out = compiled(*args, **kwargs)
            finally:
                gpu.is_hidden = False
                _push_mode(popped)
            for leaf in tree_leaves(out):
                if held and isinstance(leaf, Tensor):
                    gpu.put(leaf)
            return out

        return call

    torch.compile = compile_hidden
    torch.compiler.cudagraph_mark_step_begin = lambda: None
    Placement().__enter__()
    devices.__enter__()


class _Event:
    """An event of a device that has done each thing as soon as it was asked to."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds."""
        return 1e3 * (end._at - self._at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    """The one order in which a CPU does things."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.cuda_stream = device, priority, 0

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class _DeviceContext:
    """`with torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _pretend_cuda(gpu: _Gpu) -> None:
    """Replace what torch.cuda would ask the driver."""
    import torch

    stream = _Stream()
    properties = types.SimpleNamespace(
        name=NAME,
        uuid=UUID,
        total_memory=gpu.total_bytes,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=NUM_SMS,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=60 * 2**20,
        is_integrated=False,
        gcnArchName="",
    )

    def set_device(device: Any) -> None:
        gpu.index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= gpu.index < gpu.num_gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")

    def statistics(device: Any = None) -> dict[str, int]:
        return {
            "num_alloc_retries": gpu.num_ooms,
            "num_ooms": gpu.num_ooms,
            "allocated_bytes.all.current": gpu.allocated,
            "allocated_bytes.all.peak": gpu.peak,
            "reserved_bytes.all.current": gpu.peak_reserved,
            "reserved_bytes.all.peak": gpu.peak_reserved,
        }

    def returns(value: Any) -> Callable[..., Any]:  # anew each time: Dynamo has one rule per function
        return lambda *_, **__: value

    replaced = {
        "is_available": lambda: not gpu.is_hidden,
        "is_initialized": returns(True),
        "is_bf16_supported": returns(True),
        "is_current_stream_capturing": returns(False),
        "init": returns(None),
        "_lazy_init": returns(None),
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: gpu.num_gpus,
        "current_device": lambda: gpu.index,
        "set_device": set_device,
        "get_device_name": returns(NAME),
        "get_device_capability": returns(CAPABILITY),
        "get_device_properties": returns(properties),
        "get_arch_list": returns(["sm_90"]),
        "can_device_access_peer": returns(True),
        "synchronize": returns(None),
        "ipc_collect": returns(None),
        "empty_cache": returns(None),
        "memory_allocated": lambda device=None: gpu.allocated,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "memory_reserved": lambda device=None: gpu.peak_reserved,
        "max_memory_reserved": lambda device=None: gpu.peak_reserved,
        "memory_stats": statistics,
        "memory_summary": returns("pretended"),
        "mem_get_info": lambda device=None: (gpu.total_bytes - gpu.allocated, gpu.total_bytes),
        "reset_peak_memory_stats": lambda device=None: gpu.reset_peak(),
        "reset_max_memory_allocated": lambda device=None: gpu.reset_peak(),
        "Event": _Event,
        "Stream": _Stream,
        "stream": returns(stream),
        "set_stream": returns(None),
        "current_stream": returns(stream),
        "default_stream": returns(stream),
        "device": _DeviceContext,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * gpu.num_gpus,
        "set_rng_state_all": lambda states: torch.set_rng_state(states[gpu.index]),
        "manual_seed": returns(None),  # torch.manual_seed seeds the CPU's numbers, which are the GPU's here
        "manual_seed_all": returns(None),
        "initial_seed": lambda: torch.initial_seed(),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.default_generators = (torch.default_generator,) * gpu.num_gpus
    torch.cuda.nccl.version = returns((2, 28, 0))
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = returns(None), returns(None)

    def accelerator(check_available: bool = False) -> torch.device:
        return torch.device("cpu" if gpu.is_hidden else "cuda")

    of_any = {
        "is_available": lambda: not gpu.is_hidden,
        "current_accelerator": lambda check_available=False: accelerator(),
        "device_count": lambda: gpu.num_gpus,
        "current_device_index": lambda: gpu.index,
        "current_device_idx": lambda: gpu.index,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "synchronize": returns(None),
        "current_stream": returns(stream),
    }
    for name, value in of_any.items():
        setattr(torch.accelerator, name, value)
    torch._C._get_accelerator = accelerator  # whom FSDP2 asks for its default mesh
    torch.Stream, torch.Event = _Stream, _Event
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = returns(True)
    profile = torch.profiler.profile

    @functools.wraps(profile)
    def profile_cpu(*, activities: Any = (), **kwargs: Any) -> Any:
        cuda = torch.profiler.ProfilerActivity.CUDA
        return profile(activities=[activity for activity in activities if activity != cuda], **kwargs)

    torch.profiler.profile = profile_cpu
    real_kernel = torch.nn.attention.sdpa_kernel

    @contextlib.contextmanager
    def sdpa_kernel(*args: Any, **kwargs: Any) -> Iterator[None]:
        real_kernel(*args, **kwargs)  # its arguments are looked at; a CPU has not all of these kernels
        yield

    torch.nn.attention.sdpa_kernel = sdpa_kernel


def _pretend_autocast() -> None:
    """Autocast of "cuda" acts on CPU tensors."""
    import torch

    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = on_cpu
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        asked = getattr(torch, name)

        def of_cpu(device_type: str | None = None, asked: Any = asked) -> Any:
            return asked("cpu" if device_type in ("cuda", None) else device_type)

        setattr(torch, name, of_cpu)


def _pretend_collectives(gpu: _Gpu) -> None:
    """Run nccl's collectives over gloo, which wants other words for some, and refuse host tensors to nccl."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    over_gloo: weakref.WeakSet[Any] = weakref.WeakSet()
    init, new_group, get_backend = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def is_nccl(backend: str | None) -> bool:
        return backend is None or "nccl" in str(backend)

    def init_over_gloo(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo" if is_nccl(backend) else backend, *args, **kwargs)
        if is_nccl(backend):
            over_gloo.add(c10d.GroupMember.WORLD)

    def new_over_gloo(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        world_is_nccl = c10d.GroupMember.WORLD in over_gloo
        nccl = is_nccl(backend) and (backend is not None or world_is_nccl)
        group = new_group(ranks, timeout, "gloo" if nccl else backend, *args, **kwargs)
        if nccl and isinstance(group, dist.ProcessGroup):
            over_gloo.add(group)
        return group

    def backend_of(group: Any = None) -> str:
        return "nccl" if (group or c10d.GroupMember.WORLD) in over_gloo else get_backend(group)

    def for_gloo(call: Any, position: int) -> Any:
        """Without AVG, which gloo lacks: a sum, then a division."""

        @functools.wraps(call)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or c10d.GroupMember.WORLD
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if group in over_gloo and any(gpu.is_on_host(tensor) for tensor in tensors):
                raise RuntimeError("No backend type associated with device type cpu")
            op = kwargs.get("op", args[position] if len(args) > position else dist.ReduceOp.SUM)
            if op != dist.ReduceOp.AVG:
                return call(*args, **kwargs)
            kwargs["op"], is_async = dist.ReduceOp.SUM, kwargs.pop("async_op", False)
            args = args[:position]
            call(*args, **kwargs)
            args[0].div_(dist.get_world_size(kwargs.get("group")))
            return _Done(args[0]) if is_async else None

        return collective

    barrier = c10d.barrier

    def barrier_without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    replaced = {
        "init_process_group": init_over_gloo,
        "new_group": new_over_gloo,
        "get_backend": backend_of,
        "is_nccl_available": lambda: True,
        "barrier": barrier_without_devices,
        "all_reduce": for_gloo(c10d.all_reduce, 1),
        "reduce_scatter_tensor": for_gloo(c10d.reduce_scatter_tensor, 2),
        "all_gather_into_tensor": for_gloo(c10d.all_gather_into_tensor, 99),
        "broadcast": for_gloo(c10d.broadcast, 99),
    }
    if not hasattr(c10d, "ProcessGroupNCCL"):  # a CPU build's; `_set_pg_timeout` looks for it in each group
        replaced["ProcessGroupNCCL"] = type("ProcessGroupNCCL", (), {})
    for name, value in replaced.items():
        for module in (c10d, dist):
            setattr(module, name, value)


class _Done:
    """The handle of a collective that has ended."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        import torch

        future: Any = torch.futures.Future()
        future.set_result([self._result])
        return future


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory_gib", type=float, default=H200_GIB, help="of each (default: an H200's)")
    parser.add_argument(
        "words", nargs="*", metavar="-- WORDS", help="Python's own: -m MODULE ... or FILE ..."
    )
    args = parser.parse_args()
    variables = environment(num_gpus=args.gpus, memory_gib=args.memory_gib)
    os.execve(sys.executable, [sys.executable, *args.words], {**os.environ, **variables})


if __name__ == "__main__":
    main()
