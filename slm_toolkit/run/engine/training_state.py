"""Reads and writes a rank's training state as stretches of named tensors, in the same way for every engine.

FSDP2 shards rows, and ZeRO shards elements of one flat buffer. In both cases a rank's shard of a parameter's
weights or moments is a contiguous range of the flattened tensor: a stretch. Checkpoints are written from
stretches and read into stretches, so every strategy can read the checkpoints of every other strategy.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slm_toolkit.run.engine.muon import MOMENTUM
from slm_toolkit.run.engine.optimizer import MOMENTS, AdamWWithMasterWeights, local_part

WEIGHTS = "weights"
"""kind of a trained parameter's tensors that the optimizer updates: master weights, if any. The other kinds
are MOMENTS; a parameter that Muon updates has MOMENTUM instead"""


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `start + size` of one flattened tensor of the state; this rank has them."""

    kind: str
    name: str
    "the parameter's name in the Hugging Face model"
    start: int
    tensor: torch.Tensor
    "1-D; shares memory with the state; valid until the iterator yields the next stretch"
    is_mine: bool = True
    "whether this rank writes it; other ranks may have copies"

    @property
    def size(self) -> int:
        return self.tensor.numel()


def parameter_name(name: str) -> str:
    """Return a parameter's name in the model before an engine wrapped it."""
    for wrapper in ("module.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield name and parameter of each trained parameter."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            yield parameter_name(name), param


def num_elements(param: torch.Tensor) -> int:
    """Return the number of elements of the whole parameter, over all ranks."""
    return param.ds_numel if hasattr(param, "ds_numel") else param.numel()


def optimizer_steps(model: torch.nn.Module, optimizer: Any) -> int:
    """Return the number of steps that Adam has done; steps skipped for bad gradients don't count."""
    states = _inner(model, optimizer).state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def set_optimizer_steps(model: torch.nn.Module, optimizer: Any, num_steps: int) -> None:
    """Continue Adam's bias correction after `num_steps` steps. The moments must exist already."""
    for state in _inner(model, optimizer).state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(num_steps)
        elif "step" in state:  # Muon counts no steps; DeepSpeed's Adam on the host counts in an int
            state["step"] = num_steps
    if _is_on_host(_inner(model, optimizer)):
        _replay_bias_correction(_inner(model, optimizer), num_steps)


def stretches(model: torch.nn.Module, optimizer: Any, *, rank: int, world_size: int) -> Iterator[Stretch]:
    """Yield this rank's stretches of a prepared model's weights and moments. Creates missing moments."""
    inner = _inner(model, optimizer)
    if any(hasattr(param, "ds_id") for _, param in trained(model)):
        yield from _zero3_stretches(model)
        return
    for number, (name, param) in enumerate(trained(model)):
        writes_copy = number % world_size == rank  # all ranks have this tensor: spread the writing
        if hasattr(param, "_hp_mapping"):
            yield from _flat_partition_stretches(name, param, inner)
        else:
            yield from _parameter_stretches(name, param, inner, writes_copy)


def initial_weights(model: torch.nn.Module) -> Iterator[Stretch]:
    """Yield this rank's stretches of the weights of a model that no engine has prepared yet."""
    for name, param in trained(model):
        if hasattr(param, "ds_tensor"):  # zero3_init_flag sharded the model while building it
            start, size = _zero3_shard(param)
            part = param.ds_tensor.data.view(-1)[:size]
        else:
            start, part = 0, param.data.view(-1)
        yield Stretch(WEIGHTS, name, start, part)


def _inner(model: torch.nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that has the moments, unwrapped from accelerate's and DeepSpeed's wrappers."""
    wrapper = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else optimizer
    while hasattr(wrapper, "optimizer"):
        wrapper = wrapper.optimizer
    return wrapper


def _parameter_stretches(
    name: str, param: torch.nn.Parameter, inner: torch.optim.Optimizer, writes_copy: bool
) -> Iterator[Stretch]:
    """Yield a parameter's stretches under DDP or in one process (whole tensors), or under FSDP2 (rows)."""
    state = _state_of(inner, param)
    start, is_mine = 0, writes_copy
    if isinstance(param, DTensor):
        start, is_mine = _rows(param)
    for kind, tensor in {WEIGHTS: state.get("master", param), **_moments(state)}.items():
        yield Stretch(kind, name, start, local_part(tensor).detach().view(-1), is_mine)


def _rows(param: DTensor) -> tuple[int, bool]:
    """Return the first element of this rank's shard, and True if no earlier rank has the same shard."""
    placements = param.placements
    assert all(not isinstance(place, Shard) or place.dim == 0 for place in placements), placements
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, placements)
    coordinate = param.device_mesh.get_coordinate()
    is_first = all(
        isinstance(place, Shard) or index == 0 for place, index in zip(placements, coordinate, strict=True)
    )
    return offset[0] * math.prod(param.shape[1:]), is_first


def _flat_partition_stretches(
    name: str, param: torch.nn.Parameter, inner: torch.optim.Optimizer
) -> Iterator[Stretch]:
    """Yield a parameter's stretches under ZeRO-1 and 2, which shard a flat buffer of all parameters."""
    mapping = param._hp_mapping
    if mapping is None:  # the whole parameter is on other ranks
        return
    flat = inner.param_groups[mapping.param_group_index]["params"][0]
    fragment, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
    yield from _buffer_stretches(name, start, flat, inner, fragment.start, fragment.numel)


def _zero3_stretches(model: torch.nn.Module) -> Iterator[Stretch]:
    """Yield all stretches under ZeRO-3: every rank has an equal shard of each parameter, the last one padded.

    Goes group by group, because ZeRO-Infinity stores groups on disk: each group is read once and stays in
    memory until the iterator reaches the next group.
    """
    groups: dict[int, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in trained(model):
        zero = param._z3_optimizer
        groups.setdefault(zero.grad_position[zero.get_param_id(param)][0], []).append((name, param))
    for group, params in sorted(groups.items()):
        with _in_ram(zero, group):
            flat = zero.fp32_partitioned_groups_flat[group]
            for name, param in params:
                _, offset, _ = zero.grad_position[zero.get_param_id(param)]
                start, size = _zero3_shard(param)
                yield from _buffer_stretches(name, start, flat, zero.optimizer, offset, size)


def _zero3_shard(param: torch.nn.Parameter) -> tuple[int, int]:
    """Return start and size of this rank's shard of a ZeRO-3 parameter, without padding."""
    padded_size = param.ds_tensor.ds_numel
    start = torch.distributed.get_rank(param.ds_process_group) * padded_size
    return start, max(0, min(padded_size, param.ds_numel - start))


def _buffer_stretches(
    name: str, start: int, flat: torch.Tensor, inner: torch.optim.Optimizer, offset: int, size: int
) -> Iterator[Stretch]:
    """Yield stretches of a parameter's elements from `start` on, at `offset` in flat weights and moments."""
    for kind, tensor in {WEIGHTS: flat, **_moments(_state_of(inner, flat))}.items():
        yield Stretch(kind, name, start, tensor.detach().narrow(0, offset, size))


@contextmanager
def _in_ram(zero: Any, group: int) -> Iterator[None]:
    """Read a group's state from ZeRO-Infinity's disk into RAM; write it back afterwards."""
    on_disk = zero._swappable_optimizer_subgroup(group)
    if on_disk:
        zero._optimizer_states_and_gradient_swap_in(group)
    yield
    if on_disk:
        zero._optimizer_states_and_gradient_swap_out(group)


def _moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {kind: state[kind] for kind in (*MOMENTS, MOMENTUM) if kind in state}


def _state_of(inner: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer state; before the first step, create it like the optimizer would."""
    if isinstance(inner, AdamWWithMasterWeights):
        return inner.state_of(param)
    state = inner.state[param]
    if not state:
        on_host = _is_on_host(inner)
        # on the host, a bf16 master weight has fp32 moments, unless the flags choose bf16 for them, too
        dtype = torch.float32 if on_host and inner.fp32_optimizer_states else param.dtype
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(param.detach(), dtype=dtype)
        fused = bool(inner.defaults.get("fused"))
        step = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        state["step"] = 0 if on_host else step
    return state


def _is_on_host(inner: torch.optim.Optimizer) -> bool:
    """Return True if this is DeepSpeed's own AdamW for optimizer states in host RAM."""
    return type(inner).__name__ == "DeepSpeedCPUAdam"


def _replay_bias_correction(inner: Any, num_steps: int) -> None:
    """Replay the beta products of DeepSpeed's CPU Adam step by step, because pow would round differently."""
    group = inner.param_groups[0]
    beta1, beta2 = group["betas"]
    dummy = [torch.zeros(1) for _ in range(4)]
    for step in range(1, num_steps + 1):
        rest = (group["lr"], beta1, beta2, group["eps"], 0.0, group["bias_correction"])
        inner.ds_opt_adam.adam_update(inner.opt_id, step, *rest, *dummy)
