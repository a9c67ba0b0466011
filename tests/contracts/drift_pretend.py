"""What the pretended GPU of bench/gpu/pretend.py leans on in torch."""

import inspect

import torch
from drift import Leaning


def _devices_in_python() -> None:
    from torch.utils._device import _device_constructors
    from torch.utils._pytree import tree_leaves

    base, tensor = torch._C.TensorBase, torch.ones(1)
    assert base.device.__get__(tensor) == torch.device("cpu")
    assert base.is_cpu.__get__(tensor) is True
    with torch._C.DisableTorchFunction():
        assert base.to(tensor, dtype=torch.int64).dtype == torch.int64
    assert {torch.ones, torch.tensor, torch.empty} <= _device_constructors()
    assert tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
    for name in ("_to_copy", "_index_put_impl_"):
        assert hasattr(torch.ops.aten, name), f"torch.ops.aten has no {name}"


def _modes_around_a_call() -> None:
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert self not in _get_current_function_mode_stack(), "a mode is there while it handles a call"
            return func(*args, **(kwargs or {}))

    with Seen() as mode:
        assert _get_current_function_mode_stack() == [mode]
        torch.ones(1)
        popped = _pop_mode()
        assert popped is mode
        assert _get_current_function_mode_stack() == []
        _push_mode(popped)
    run = torch.autograd._engine_run_backward
    assert run is torch.autograd.graph._engine_run_backward, "backward starts elsewhere"
    assert "_engine_run_backward" in inspect.getsource(torch.autograd.backward)


def _compiled_backward() -> None:
    import torch._functorch.config as of_functorch

    assert of_functorch.force_non_lazy_backward_lowering in (False, True)


def _default_device_of_fsdp() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    assert "torch._C._get_accelerator()" in inspect.getsource(_fsdp_init)


PRETEND = (
    Leaning(
        "torch: a tensor's device can be told anew in Python",
        ("_C", "_device_constructors", "tree_leaves", "_to_copy", "_index_put_impl_"),
        "keep tensors of the pretended GPU on the CPU and let them say cuda:0",
        "bench/gpu/pretend.py: `_enter_modes`, by what this torch asks for a tensor's device",
        _devices_in_python,
    ),
    Leaning(
        "torch: a function mode is off while it handles a call",
        ("_engine_run_backward", "_get_current_function_mode_stack", "_pop_mode", "_push_mode"),
        "enter it again for backward, and leave it around compiled code",
        "bench/gpu/pretend.py: `backward` and `compile_hidden`",
        _modes_around_a_call,
    ),
    Leaning(
        "torch: a compiled backward can be compiled beforehand",
        ("torch._functorch.config",),
        "compile backward, too, where compiled code is shown the CPU",
        "bench/gpu/pretend.py: `compile_hidden`, by this torch's name of the setting",
        _compiled_backward,
    ),
    Leaning(
        "torch: whom FSDP2 asks for its default device",
        ("_get_accelerator",),
        "shard over the pretended GPU",
        "bench/gpu/pretend.py: `_pretend_cuda`, by what fully_shard asks",
        _default_device_of_fsdp,
    ),
)
