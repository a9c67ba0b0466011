"""What the pretended GPU of bench/gpu/pretend.py leans on in torch."""

import inspect

import torch
from drift import Leaning


def _devices_in_python() -> None:
    from torch.utils._device import DeviceContext, _device_constructors

    base, tensor = torch._C.TensorBase, torch.ones(1)
    assert base.device.__get__(tensor) == torch.device("cpu")
    assert base.to(tensor, dtype=torch.int64).dtype == torch.int64
    assert {torch.ones, torch.tensor, torch.empty} <= _device_constructors()
    assert DeviceContext("cpu").device == torch.device("cpu")
    assert callable(torch.cuda._lazy_call)


def _default_device_of_fsdp() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    assert "torch._C._get_accelerator()" in inspect.getsource(_fsdp_init)


PRETEND = (
    Leaning(
        "torch: a tensor's device can be told anew in Python",
        ("_C", "_device_constructors", "DeviceContext", "_lazy_call"),
        "keep tensors of the pretended GPU on the CPU and let them say cuda:0",
        "bench/gpu/pretend.py: `pretend_tensors`, by what this torch asks for a tensor's device",
        _devices_in_python,
    ),
    Leaning(
        "torch: whom FSDP2 asks for its default device",
        ("_get_accelerator",),
        "shard over the pretended GPU",
        "bench/gpu/pretend.py: `pretend_cuda`, by what fully_shard asks",
        _default_device_of_fsdp,
    ),
)
