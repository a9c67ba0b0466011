"""What we lean on in DeepSpeed's ZeRO: asked of engines that play rank 0 of 2, see drift_engines.py."""

import functools
import inspect
import math
import sys
from typing import Any
from unittest.mock import patch

import torch
from drift import Leaning

_SIZES = ((6, 5), (3, 6))
"of two weights: 30 + 18 elements, of which rank 0 has 24 in a flat buffer, 15 and 9 under ZeRO-3"


def small_model() -> Any:
    """Two matrices; every element is a number that bf16 can hold."""
    layers = [torch.nn.Linear(size[1], size[0], bias=False) for size in _SIZES]
    for layer in layers:
        layer.weight.data = torch.arange(layer.weight.numel()).float().view(layer.weight.shape) / 8
    return torch.nn.Sequential(*layers)


@functools.cache
def _zero(stage: int) -> tuple[Any, list[Any]]:
    """DeepSpeed's engine, with one step done, and the weights that it began with."""
    import deepspeed

    model = small_model().bfloat16()
    before = [param.detach().clone().float().view(-1) for param in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, before


@functools.cache
def _stepped(stage: int) -> tuple[Any, dict[str, Any]]:
    """The engine after a step, and what was there between backward and step."""
    engine, _ = _zero(stage)
    seen: dict[str, Any] = {"steps before": engine.global_steps}
    zero, take = engine.optimizer, engine.optimizer.step

    def step(*arguments: Any, **options: Any) -> Any:
        zero.step = take
        groups = getattr(zero, "averaged_gradients", {}).values()
        seen["gradients"] = sum(gradient.numel() for group in groups for gradient in group or [])
        seen["whole"] = [param.grad for param in engine.module.parameters()]
        return take(*arguments, **options)

    zero.step = step
    engine.backward(engine(torch.ones(1, _SIZES[0][1], dtype=torch.bfloat16)).float().sum())
    engine.step()
    seen["steps after"] = engine.global_steps
    return engine, seen


def _sums_in_fp32() -> None:
    """ZeRO-1 with fp32 gradients is another optimizer, which keeps the sums of all ranks."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
    }
    model = small_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    sums = engine.optimizer.fp32_groups_gradients_flat
    assert {flat.dtype for flat in sums} == {torch.float32}
    assert sum(flat.numel() for flat in sums) >= 48, "the sums are no longer whole on each rank"


def _zero_engine() -> None:
    for stage in (1, 2, 3):
        engine, seen = _stepped(stage)
        assert engine.zero_optimization_stage() == stage
        assert engine.dp_world_size == 2
        assert (seen["steps before"], seen["steps after"]) == (0, 1), f"global_steps: {seen}"
        assert "gradients" in seen, "engine.step() no longer calls the step of engine.optimizer"
        norm = engine.get_global_grad_norm()
        assert float(norm) > 0, f"get_global_grad_norm() gives {norm!r}"
        assert engine.optimizer.clip_grad == 0.5
        assert type(engine.optimizer.optimizer).__name__ == "AdamW", "no torch optimizer beneath ZeRO's"


def _zero_flat() -> None:
    for stage in (1, 2):
        engine, before = _zero(stage)
        zero, inner = engine.optimizer, engine.optimizer.optimizer
        (flat,) = zero.single_partition_of_fp32_groups
        assert flat.numel() == 24, f"rank 0 of 2 has {flat.numel()} of 48 elements"
        assert len(zero.bit16_groups[0]) == 2
        num_mapped = 0
        for param, whole in zip(engine.module.parameters(), before, strict=True):
            assert hasattr(param, "_hp_mapping"), "parameters have no _hp_mapping"
            if (mapping := param._hp_mapping) is None:
                continue
            assert inner.param_groups[mapping.param_group_index]["params"][0] is flat
            there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
            num_mapped += there.numel
            ours = flat.detach().narrow(0, there.start, there.numel)
            assert ours.tolist() == whole.narrow(0, here.start, here.numel).tolist(), "another stretch"
        assert num_mapped == 24, f"_hp_mapping leads to {num_mapped} of rank 0's 24 elements"
        _, seen = _stepped(stage)
        assert seen["gradients"] == 24, f"averaged_gradients hold {seen['gradients']} of rank 0's 24"


def _zero_parts() -> None:
    engine, before = _zero(3)
    zero = engine.optimizer
    num_elements = 0
    for param, whole in zip(engine.module.parameters(), before, strict=True):
        assert param.ds_numel == whole.numel()
        assert tuple(param.ds_shape) in _SIZES
        assert isinstance(param.ds_id, int)
        assert param.numel() == 0, "a parameter that nobody gathered is whole"
        assert torch.distributed.get_rank(param.ds_process_group) == 0
        size = param.ds_tensor.ds_numel
        assert size == whole.numel() // 2, f"{size} of {whole.numel()} elements on rank 0 of 2"
        assert param._z3_optimizer is zero
        group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        part = zero.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, size)
        assert part.tolist() == whole[:size].tolist(), "grad_position leads to other elements"
        num_elements += size
    assert num_elements == 24
    groups = {zero.sub_group_to_group_id[index] for index in range(len(zero.fp16_groups))}
    assert groups == {0}, f"sub-groups of {groups}, where the optimizer has one group"
    assert sum(param.ds_numel for group in zero.fp16_groups for param in group) == 48
    _, seen = _stepped(3)
    assert seen["gradients"] >= 24, f"averaged_gradients hold {seen['gradients']} of rank 0's 24"


def _zero_ranks_agree() -> None:
    for name in ("stage3", "partition_parameters", "partitioned_param_coordinator"):
        module = sys.modules[f"deepspeed.runtime.zero.{name}"]
        assert hasattr(module, "assert_ints_same_as_other_ranks"), f"{module.__name__} asks in another way"


def _no_numbers() -> None:
    for stage in (1, 2, 3):
        engine, _ = _stepped(stage)
        zero = engine.optimizer
        masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        before = [master.detach().clone() for master in masters]
        hidden = torch.full((1, _SIZES[0][1]), float("nan"), dtype=torch.bfloat16)
        engine.backward(engine(hidden).float().sum())
        engine.step()
        after = [master.detach() for master in masters]
        same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert same, f"ZeRO-{stage} steps although a gradient is NaN"
        assert not math.isfinite(engine.get_global_grad_norm()), f"ZeRO-{stage}: the norm is a number"


def _scale_from_outside() -> None:
    for stage in (1, 2, 3):
        engine, _ = _stepped(stage)
        zero, norms = engine.optimizer, []
        for scale in (4.0, 1.0):
            zero.override_loss_scale(scale)
            assert zero.loss_scale == scale, f"ZeRO-{stage}: loss_scale is {zero.loss_scale}"
            engine.backward(engine(torch.ones(1, _SIZES[0][1], dtype=torch.bfloat16)).float().sum())
            engine.step()
            assert not zero.overflow
            norms.append(float(engine.get_global_grad_norm()))
        assert norms[0] == norms[1] > 0, f"ZeRO-{stage} does not divide by the scale that it multiplies by"


def _cpu_adam() -> None:

    from deepspeed.ops.adam import DeepSpeedCPUAdam

    assert "fp32_optimizer_states" in inspect.signature(DeepSpeedCPUAdam).parameters
    source = inspect.getsource(DeepSpeedCPUAdam)
    assert "self.fp32_optimizer_states =" in source
    call = "self.ds_opt_adam.adam_update(self.opt_id, state['step'], group['lr'], beta1, beta2, group['eps'],"
    assert call in source, "the replay of its steps, for the powers of the betas, gives other arguments"
    assert "state['step'] = 0" in source, "its steps are counted in another way"
    for name in ("exp_avg", "exp_avg_sq"):
        assert f"state['{name}']" in source, f"its state has no {name}"


class _Disk:
    """For DeepSpeed's, which takes minutes to compile: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def is_swappable_tensor(self, tensor: Any = None, numel: int | None = None) -> bool:
        self.asked.append(("fits", numel))
        return numel is not None

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any) -> None:
        self.asked.append(("in", parameter))

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool) -> None:
        self.asked.append(("out", parameter))


def _zero_infinity() -> None:
    zero = _zero(3)[0].optimizer
    assert zero._swappable_optimizer_subgroup(0) is False, "without a disk there is something on it"
    disk = _Disk()
    with patch.multiple(zero, create=True, swap_optimizer=True, optimizer_swapper=disk):
        assert zero._swappable_optimizer_subgroup(0) is True
        assert disk.asked == [("fits", 24)], f"of rank 0's 24 elements it asks {disk.asked}"
        zero._optimizer_states_and_gradient_swap_in(0)
        zero._optimizer_states_and_gradient_swap_out(0)
    moved = [(way, parameter) for way, parameter in disk.asked if way != "fits"]
    assert [way for way, _ in moved] == ["in", "out"], [way for way, _ in moved]
    flat = zero.fp32_partitioned_groups_flat[0]
    assert all(parameter is flat for _, parameter in moved), "another tensor comes from the disk"


ZERO = (
    Leaning(
        "deepspeed: the engine's numbers",
        (
            *(
                "zero_optimization_stage",
                "dp_world_size",
                "global_steps",
                "get_global_grad_norm",
                "clip_grad",
            ),
            "optimizer",
        ),
        "prove which stage runs, read the gradient norm, and count state",
        "run/engine/engine.py: probe_engine and optimizer_step; run/observe/probe.py; run/observe/measure.py",
        _zero_engine,
    ),
    Leaning(
        "deepspeed: the sums of fp32 gradients under ZeRO-1",
        ("fp32_groups_gradients_flat",),
        "count the bytes of gradients",
        "run/observe/measure.py: live_gradients",
        _sums_in_fp32,
    ),
    Leaning(
        "deepspeed: the flat partitions of ZeRO-1 and 2",
        (
            *("single_partition_of_fp32_groups", "bit16_groups", "_hp_mapping", "averaged_gradients"),
            *("hp_fragment_address", "lp_fragment_address", "param_group_index"),
        ),
        "count bytes of master weights and gradients, and move a rank's stretches to and from checkpoints",
        "run/observe/measure.py: `_deepspeed_masters`, live_gradients; "
        "run/engine/training_state.py: `_flat_partition_stretches`",
        _zero_flat,
    ),
    Leaning(
        "deepspeed: the partitioned parameters of ZeRO-3",
        (
            *(
                "ds_tensor",
                "ds_numel",
                "ds_shape",
                "ds_id",
                "ds_process_group",
                "fp32_partitioned_groups_flat",
            ),
            *("_z3_optimizer", "grad_position", "get_param_id"),
            *("fp16_groups", "sub_group_to_group_id"),
        ),
        "count parameters and bytes, and move a rank's stretches to and from checkpoints",
        "run/observe/measure.py, run/observe/probe.py `_group_sizes`, run/engine/engine.py "
        "`_is_matrix`, run/model/model.py; "
        "run/engine/training_state.py: `_zero3_stretches`",
        _zero_parts,
    ),
    Leaning(
        "deepspeed: ZeRO-Infinity's optimizer state on a disk",
        (
            "_swappable_optimizer_subgroup",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
        ),
        "fetch it for a checkpoint, and put it back (a real disk: the slow tests of ds_zero3_nvme)",
        "run/engine/training_state.py: `_from_disk`",
        _zero_infinity,
    ),
    Leaning(
        "deepspeed: ZeRO-3 asks other ranks whether they agree",
        ("assert_ints_same_as_other_ranks", "deepspeed.runtime.zero"),
        "rehearse on fake tensors, which have no others to ask",
        "run/rehearse.py: _RANKS_AGREE and what is replaced in those modules",
        _zero_ranks_agree,
    ),
    Leaning(
        "deepspeed: a step whose gradients are no numbers",
        ("get_global_grad_norm",),
        "leave it out, as under every engine, and see it by its norm",
        "run/engine/engine.py: optimizer_step, which has to keep DeepSpeed from stepping then",
        _no_numbers,
    ),
    Leaning(
        "deepspeed: a loss scale from outside",
        ("override_loss_scale", "loss_scale", "overflow"),
        "have one rule of the loss scale under every engine, and unscaled gradient norms",
        "run/engine/engine.py: scale_losses and optimizer_step; run/observe/measure.py",
        _scale_from_outside,
    ),
    Leaning(
        "deepspeed: its Adam on the host",
        ("fp32_optimizer_states", "DeepSpeedCPUAdam", "ds_opt_adam", "opt_id"),
        "know the kernel by its class, and make moments in its dtype for a checkpoint to fill",
        "run/observe/probe.py: `_optimizer_kernel`; run/engine/training_state.py: `_adam_state`",
        _cpu_adam,
    ),
)
