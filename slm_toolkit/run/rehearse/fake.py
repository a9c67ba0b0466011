"""Lets real engines run on tensors without memory: patches for torch, accelerate and DeepSpeed."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

_COMPARE_RANKS = {
    f"deepspeed.runtime.zero.{name}"
    for name in ("stage3", "partition_parameters", "partitioned_param_coordinator")
}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shape, dtype and storage size, but no memory, and nothing is computed.

    The tensors are fake CPU tensors, on any machine: fake CUDA tensors abort a torch without CUDA, and meta
    tensors take the unfused attention. Checked with torch 2.13, accelerate 1.15, deepspeed 0.19.8 and
    transformers 5.23.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from transformers import masking_utils

    make_mesh = _fully_shard._init_default_mesh

    def real_mesh(*args: Any, **options: Any) -> Any:  # the mesh holds numbers of ranks, which must be real
        with _disable_current_modes():
            return make_mesh(*args, **options)

    with ExitStack() as stack:
        for name in _COMPARE_RANKS & sys.modules.keys():  # there are no other ranks to compare with
            agree = patch.object(sys.modules[name], "assert_ints_same_as_other_ranks", lambda _: None)
            stack.enter_context(agree)
        for context in (
            _mode(),
            patch.object(_fully_shard, "_init_default_mesh", real_mesh),
            # it reads values; on real tensors of whole sequences it finds nothing either
            patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
            # accelerate tells parameters apart by it
            patch.object(FakeTensor, "data_ptr", _address, create=True),
            patch.object(torch.nn.parallel, "DistributedDataParallel", _FakeDistributedDataParallel),
            patch.object(torch.nn.Module, "to", lambda module, *_, **__: module),  # as `stay_in_place` says
            # a GPU's mask is in bytes; a CPU's own would be in the input's dtype
            patch.object(torch.nn.functional, "dropout", _dropout),
        ):
            stack.enter_context(context)
        yield


def _address(tensor: torch.Tensor) -> int:
    """An address that differs for different memory, and is well aligned."""
    return (tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.element_size()


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


@cache
def _mode() -> FakeTensorMode:
    """One mode for the whole process: tensors of two modes don't mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def stay_in_place(model: torch.nn.Module) -> None:
    """Turn the model's moves and casts into no-ops: fake parameters can't be swapped for others."""
    model.to = model.bfloat16 = lambda *_, **__: model


class _FakeDistributedDataParallel(DistributedDataParallel):
    """DDP whose C++ reducer never reads a bucket: nothing is broadcast, buckets keep their first order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, init_sync=False)

    def _ddp_init_helper(self, *args: Any, **options: Any) -> None:
        super()._ddp_init_helper(*args, **options)
        self.reducer = _Reducer(self.reducer)


class _Reducer:
    """The C++ reducer, without the rebuilding of its buckets, which would copy them."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
