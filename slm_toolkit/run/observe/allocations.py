"""Trace every allocation of a training step, to list which memory is alive at the peak and its purpose."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from slm_toolkit.record.memory_parts import PARTS

_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")
_GATHERS = ("all_gather", "allgather", "split_with_sizes_copy")  # FSDP2 splits its buffers with the last one
_BUFFER_MAKERS = ("aten.empty.memory_format", "aten.new_empty.default")
_SCALAR = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default
_CAT = torch.ops.aten.cat.default


class Allocation:
    """One tensor storage: where it was made and, once known, its part of memory (parameters, ...)."""

    __slots__ = ("module", "nbytes", "op", "part", "phase")

    def __init__(self, nbytes: int, phase: str, module: str, op: str) -> None:
        self.nbytes, self.phase, self.module, self.op = nbytes, phase, module, op
        self.part: str | None = None


@dataclass(frozen=True)
class Event:
    """A change of a storage's size, in bytes."""

    allocation: Allocation
    delta_bytes: int
    phase: str
    module: str


class AllocationTrace(TorchDispatchMode):
    """Trace storages, not tensors: views need no memory, and a storage lives as long as its last user.

    It works on real tensors and, inside a FakeTensorMode, on fake tensors; if the program reads a fake
    tensor's value, the trace makes one up. The caller updates `phase` and `module`, the program's place.
    """

    def __init__(self, *, fake: bool, device_type: str) -> None:
        super().__init__()
        self.fake, self.device_type = fake, device_type
        self.phase, self.module = "setup", ""
        self.events: list[Event] = []
        self._live: dict[int, tuple[Allocation, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this again with operations on this rank's shard
        if self.fake and func is _SCALAR:
            return _made_up(args[0].dtype)
        if self.fake and func is _EQUAL:
            return True
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            countable = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
            if countable and tensor.device.type == self.device_type:
                self._see(tensor.untyped_storage(), str(func))
        if func.namespace in _COLLECTIVES and self.phase in ("forward", "backward"):
            self._claim_buffers(func, args, kwargs or {})
        if func is _CAT and self._is_gathered(args[0][0]):  # ZeRO-3 joins gathered shards with cat
            self.claim([out], "gathered_parameters")
        return out

    def __enter__(self) -> "AllocationTrace":
        self._resize = torch.UntypedStorage.resize_
        original = self._resize

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:  # FSDP2 frees and refills storages so
            result = original(storage, nbytes)
            self._see(storage, "resize_")
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize

    def adopt(self, tensors: Iterable[torch.Tensor | None], part: str) -> None:
        """Set the part of `tensors`, and count the tensors that were made before the trace began."""
        for tensor in tensors:
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self._see(local.untyped_storage(), "adopted").part = part

    def claim(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Set the part of `tensors`, except of untraced ones and those that have a part already."""
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[0].part is None:
                entry[0].part = part

    def _claim_buffers(self, func: Any, args: Any, kwargs: Any) -> None:
        """Set the part of an engine's buffers according to the collective that uses them."""
        name = str(func)
        if "chunk_cat" in name:  # FSDP2 copies whole gradients into the buffer that it reduces
            self.claim(args[0], "gradients")
        tensors = (item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor))
        gathers = any(word in name for word in _GATHERS)
        self.claim(tensors, "gathered_parameters" if gathers else "communication")

    def _is_gathered(self, tensor: torch.Tensor) -> bool:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[0].part == "gathered_parameters"

    def _see(self, storage: torch.UntypedStorage, op: str) -> Allocation:
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._live.get(key)
        if entry is not None:
            allocation = entry[0]
            if allocation.nbytes != nbytes:
                self._change(allocation, nbytes - allocation.nbytes)
                allocation.nbytes = nbytes
            return allocation
        allocation = Allocation(nbytes, self.phase, self.module, op)

        def freed(_: Any) -> None:
            freed_allocation = self._live.pop(key)[0]
            self._change(freed_allocation, -freed_allocation.nbytes)

        self._live[key] = (allocation, weakref.ref(storage, freed))
        self._change(allocation, nbytes)
        return allocation

    def _change(self, allocation: Allocation, delta_bytes: int) -> None:
        if delta_bytes:
            self.events.append(Event(allocation, delta_bytes, self.phase, self.module))


def _made_up(dtype: torch.dtype) -> Any:
    """Return a value that every engine accepts: gradients are finite, norms are 1, ranks agree."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def part_of(allocation: Allocation) -> str:
    """Return the part of an allocation; if none was set, infer it from where the allocation was made."""
    if allocation.part is not None:
        return allocation.part
    namespace = allocation.op.partition(".")[0]
    if allocation.phase == "setup":
        return "communication"  # neither parameters nor state: an engine's buckets
    if allocation.phase == "optimizer":
        return "temporary"
    if allocation.op == "resize_":
        return "gathered_parameters"
    if namespace in _COLLECTIVES or (allocation.phase == "backward" and allocation.op in _BUFFER_MAKERS):
        return "communication"
    if allocation.module in ("", "lm_head", "loss"):
        return "logits_and_loss"
    return "activations" if allocation.phase == "forward" else "temporary"


@contextmanager
def following_modules(model: torch.nn.Module, trace: AllocationTrace) -> Iterator[None]:
    """Set `trace.module` to the decoder layer (and its child) that is computing, in forward and backward.

    Also set the part of each gradient when it is made.
    """

    def has_gradient(gradient: torch.Tensor) -> None:
        trace.claim([gradient], "gradients")

    handles = [param.register_hook(has_gradient) for param in model.parameters() if param.requires_grad]

    def enter(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            trace.module = name

        return hook

    def leave(name: str, outer: str) -> Any:
        def backward_begins(gradient: torch.Tensor) -> None:
            trace.module = name

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            trace.module = outer
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(backward_begins)

        return hook

    for name, module in model.named_modules():
        short = name.removeprefix("module.").removeprefix("model.")
        parts = short.split(".")
        is_layer_or_child = parts[0] == "layers" and 2 <= len(parts) <= 3
        if short in ("embed_tokens", "norm", "lm_head") or is_layer_or_child:
            outer = ".".join(parts[:2]) if len(parts) == 3 else "loss" if short == "lm_head" else ""
            handles.append(module.register_forward_pre_hook(enter(short)))
            handles.append(module.register_forward_hook(leave(short, outer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def peak_of(events: list[Event], *, first: int) -> dict[str, Any]:
    """Return the record's `memory_at_peak` among the events from index `first` on, with all memory before."""
    total = highest = peak = 0
    for index, event in enumerate(events):
        total += event.delta_bytes
        if index >= first and total > highest:
            highest, peak = total, index
    parts = dict.fromkeys(PARTS, 0)
    for event in events[: peak + 1]:
        parts[part_of(event.allocation)] += event.delta_bytes
    at = events[peak]
    return {"phase": at.phase, "module": at.module, "num_bytes": highest, "parts": parts}
