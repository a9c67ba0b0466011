"""What we lean on in torch's tensors, modules and process groups."""

import inspect
import weakref
from unittest.mock import patch

import torch
from drift import Leaning
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _dispatch_mode() -> None:
    with _Seen() as seen:
        value = torch.ones(2).sum().item()
        with _disable_current_modes():
            torch.ones(3).exp()
    assert value == 2.0
    assert "aten._local_scalar_dense.default" in seen.names, f".item() is {seen.names[-1]}"
    assert "aten.exp.default" not in seen.names, "_disable_current_modes leaves modes on"
    assert str(torch.ops.aten._local_scalar_dense.default) == "aten._local_scalar_dense.default"


def _trees() -> None:
    from torch.utils._pytree import tree_iter, tree_map_only

    assert list(tree_iter({"a": [1, (2,)], "b": 3})) == [1, 2, 3]
    assert tree_map_only(int, lambda number: -number, [1, "a", (2,)]) == [-1, "a", (-2,)]


def _storages() -> None:
    ended: list[object] = []
    tensor = torch.empty(4)
    view, other = tensor[1:], torch.empty(4)
    assert isinstance(tensor.untyped_storage()._cdata, int)
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata, "a view has another _cdata"
    assert other.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    watched = weakref.ref(tensor.untyped_storage(), ended.append)
    del tensor
    assert not ended, "a storage's Python object does not live as long as its last view"
    del view
    assert ended, "a storage's Python object outlives its last tensor"
    assert watched() is None


def _fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(2, 3)
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake + torch.nn.Parameter(torch.ones(3)), FakeTensor)
        assert fake.untyped_storage().nbytes() == 24  # 6 x 4
        with patch.object(FakeTensor, "data_ptr", lambda tensor: 77, create=True):
            assert fake.data_ptr() == 77, "data_ptr of a fake tensor can't be replaced"


def _modules_and_functions_replaced() -> None:
    module = torch.nn.Linear(1, 1)
    with patch.object(torch.nn.Module, "to", lambda module, *_, **__: "replaced"):
        assert module.to(torch.bfloat16) == "replaced"
    with patch.object(torch.nn.functional, "dropout", lambda *_, **__: torch.zeros(1)):
        assert torch.nn.Dropout(0.5)(torch.ones(9)).numel() == 1, "torch.nn.Dropout calls another dropout"
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query = torch.zeros(1, 2, 3, 4)
    attend = patch.object(
        torch.nn.functional, "scaled_dot_product_attention", lambda query, *_, **__: query + 1
    )
    with attend:
        attended, _ = sdpa_attention_forward(torch.nn.Module(), query, query, query, None)
    assert attended.min() == 1, "transformers calls another attention"


def _storage_resize() -> None:
    tensor = torch.empty(4)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    assert "resize_" in vars(torch.UntypedStorage) or hasattr(torch.UntypedStorage, "resize_")
    from torch.distributed.fsdp import fully_shard  # noqa: F401 - with it come its operators

    for name in ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in"):
        assert hasattr(torch.ops.fsdp, name), f"torch.ops.fsdp has no {name}"
    assert hasattr(torch.ops._c10d_functional, "reduce_scatter_tensor")


def _wrapper_names() -> None:
    from accelerate.utils import extract_model_from_parallel
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils, _flat_param

    wrapped = checkpoint_wrapper(torch.nn.Linear(1, 1))
    names = [name for name, _ in torch.nn.Sequential(wrapped).named_modules()]
    assert "0._checkpoint_wrapped_module" in names, names
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert "_orig_mod.weight" in dict(compiled.named_parameters()), "torch.compile wraps under another name"
    assert type(extract_model_from_parallel(compiled, keep_torch_compile=False)) is torch.nn.Linear
    assert _common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"
    assert _common_utils.FSDP_FLATTENED == "_fsdp_flattened"
    assert "_is_flat_param" in inspect.getsource(_flat_param.FlatParameter)


def _group_timeout() -> None:
    parameters = list(inspect.signature(torch.distributed.distributed_c10d._set_pg_timeout).parameters)
    assert parameters[:2] == ["timeout", "group"], parameters
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        other = torch.distributed.new_group(backend="gloo")
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        assert len(groups) == 2, f"of two groups it knows {len(groups)}"
        assert other in groups, "groups of one's own are not in it"
    finally:
        torch.distributed.destroy_process_group()


def _group_names() -> None:
    """One store, as a launcher's, and two attempts: the second finds nothing of the first's."""
    assert not torch.distributed.is_initialized()
    store, names = torch.distributed.HashStore(), []
    for first in (0, 1000):
        torch.distributed.distributed_c10d._world.group_count += first
        before = set(store.list_keys())
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            names += [torch.distributed.group.WORLD.group_name, torch.distributed.new_group([0]).group_name]
            ours = set(store.list_keys()) - before
        finally:
            torch.distributed.destroy_process_group()
        assert ours, f"groups {names} leave nothing new in the store"
        assert all(key.startswith(tuple(f"{name}/" for name in names[-2:])) for key in ours), ours
    assert names == ["0", "1", "1000", "1001"], f"groups are called {names}"


TORCH = (
    Leaning(
        "torch: dispatch modes",
        ("TorchDispatchMode", "_disable_current_modes", "_local_scalar_dense"),
        "follow every operator of a step, to trace memory and to checkpoint by operator",
        "run/observe/allocations.py, run/model/model.py, run/rehearse.py: torch's new "
        "way of seeing operators",
        _dispatch_mode,
    ),
    Leaning(
        "torch: trees of tensors",
        ("tree_iter", "tree_map_only", "torch.utils._pytree"),
        "go through what operators return",
        "torch.utils._pytree's new names; run/__init__.py imports it early",
        _trees,
    ),
    Leaning(
        "torch: a storage's address and Python object",
        ("_cdata",),
        "tell storages apart and see the end of each",
        "run/observe/allocations.py and run/rehearse.py: another identity of a storage, or "
        "weakrefs of tensors",
        _storages,
    ),
    Leaning(
        "torch: fake tensors",
        ("FakeTensor", "FakeTensorMode", "data_ptr"),
        "run engines on tensors without memory in a rehearsal",
        "run/rehearse.py: make the mode, and give fake tensors addresses, as this torch has it",
        _fake_tensors,
    ),
    Leaning(
        "torch: modules and functions looked up when they are called",
        ("to", "dropout", "scaled_dot_product_attention"),
        "keep fake parameters in place, and drop and pad heads as a GPU does",
        "run/rehearse.py: replace what this torch calls instead",
        _modules_and_functions_replaced,
    ),
    Leaning(
        "torch: names of FSDP2's operators",
        ("resize_", "chunk_cat", "split_with_sizes_copy"),
        "tell in allocations.py whose a buffer is by the collective that it goes to",
        "run/observe/allocations.py: _COLLECTIVES, _GATHERS and `_claim_buffers` by the operators' new names",
        _storage_resize,
    ),
    Leaning(
        "torch: what wrappers call the module in them, and FSDP1 its flat parameters",
        (
            *("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "keep_torch_compile"),
            *("_is_flat_param", "_fsdp_flattened"),
        ),
        "name parameters in models and checkpoints as Hugging Face does, and refuse checkpoints under FSDP1",
        "run/checkpoint/checkpoint.py and run/engine/training_state.py: names of parameters, and "
        "how a flat one is known",
        _wrapper_names,
    ),
    Leaning(
        "torch: the timeout of a process group that is there",
        ("_set_pg_timeout", "pg_map", "_get_backend", "_timeout"),
        "let collectives of every group take as long as --ddp_timeout may be",
        "run/peers/machines.py: let_collectives_wait, by torch's new function",
        _group_timeout,
    ),
    Leaning(
        "torch: process groups called by their number",
        ("_world", "group_count"),
        "meet again, after the fp32 steps or --max_restarts, in a store with addresses of the last attempt",
        "run/faults/restarts.py: name_groups_anew, by whatever names a group now",
        _group_names,
    ),
)
