"""What we lean on in torch's kernels: their signatures, and their names in a profile."""

import inspect

import torch
from drift import Leaning
from torch.profiler import ProfilerActivity, profile


def _adamw() -> None:
    from torch.optim.adamw import adamw

    wanted = {
        *("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "foreach", "fused"),
        *("grad_scale", "found_inf", "amsgrad", "beta1", "beta2", "lr", "weight_decay", "eps", "maximize"),
    }
    missing = wanted - set(inspect.signature(adamw).parameters)
    assert not missing, f"adamw() has no {', '.join(sorted(missing))}"
    for foreach, fused in ((True, False), (False, True), (False, False)):
        weight, step = torch.tensor([1.0]), torch.tensor(0.0)
        gradient, moments = torch.tensor([0.5]), [torch.zeros(1), torch.zeros(1)]
        adamw(
            *([weight], [gradient], [moments[0]], [moments[1]], [], [step]),
            **{"foreach": foreach, "fused": fused, "amsgrad": False, "maximize": False},
            **{"beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.0, "eps": 0.0},
        )
        # the first step of Adam is lr x gradient / |gradient|; the moments are 0.1 x 0.5 and 0.01 x 0.25
        found = (weight.item(), moments[0].item(), moments[1].item(), step.item())
        wanted_values = (0.9, 0.05, 0.0025, 1.0)
        for value, by_hand in zip(found, wanted_values, strict=True):
            assert abs(value - by_hand) < 1e-6, f"foreach {foreach}, fused {fused}: {found}"
    weight, step = torch.tensor([1.0]), torch.tensor(0.0)
    adamw(
        *([weight], [torch.tensor([0.5])], [torch.zeros(1)], [torch.zeros(1)], [], [step]),
        **{"fused": True, "amsgrad": False, "maximize": False, "found_inf": torch.tensor(1.0)},
        **{"beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.0, "eps": 0.0},
    )
    assert (weight.item(), step.item()) == (1.0, 0.0), "a fused step is done though found_inf says not to"


def _left_out() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=True)
    weight.grad = torch.tensor([0.5])
    for found_inf, wanted in ((1.0, 1.0), (0.0, 0.9)):  # the first step of Adam is lr x 1
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        assert abs(weight.item() - wanted) < 1e-6, f"found_inf {found_inf}: {weight.item()}, not {wanted}"


def _foreach() -> None:
    tensors = [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)]
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    assert [norm.item() for norm in norms] == [5.0, 2.0]
    assert norms[0].dtype == torch.float32
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert tensors[1].item() == 1.0
    torch._foreach_lerp_(tensors, [torch.zeros_like(tensor) for tensor in tensors], 0.5)
    assert tensors[1].item() == 0.5
    signs = torch._foreach_lerp(tensors, [torch.full_like(tensor, -9.0) for tensor in tensors], 0.5)
    torch._foreach_sign_(signs)
    assert (tensors[1].item(), signs[1].item()) == (0.5, -1.0)
    torch._foreach_copy_(tensors, [torch.zeros(2), torch.ones(1)])  # across dtypes
    assert [tensor.sum().item() for tensor in tensors] == [0.0, 1.0]
    steps = [torch.tensor(0.0), torch.tensor(3.0)]
    torch._foreach_add_(steps, 1)
    torch._foreach_sub_(steps, [torch.tensor(1.0)] * 2)
    assert [step.item() for step in steps] == [0.0, 3.0]


def _kineto() -> None:
    hidden = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    wide = torch.ones(1, 1, 4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(4))
    compiled = torch.compile(lambda tensor: tensor + 1, backend="eager")
    compiled(torch.ones(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        (hidden @ torch.ones(3, 5, dtype=torch.bfloat16)).exp_().sum().backward()
        for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH):
            with torch.nn.attention.sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(wide, wide, wide).sum().backward()
        logits = torch.softmax(weight, dim=0).sum()
        logits.backward()
        torch.nn.functional.cross_entropy(weight.view(1, -1), torch.tensor([1])).backward()
        for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            torch.optim.AdamW([weight], **options).step()
        torch.ones(2).to(torch.float8_e4m3fn)
        compiled(torch.ones(2))
    events = profiled.profiler.kineto_results.events()
    attention = next(event for event in events if event.name() == "aten::scaled_dot_product_attention")
    assert len(attention.shapes()) >= 7, f"arguments of attention: {attention.shapes()}"
    assert attention.concrete_inputs()[4:7] == [0.0, False, None], "not dropout, is_causal and scale"
    assert attention.start_ns() < attention.end_ns()
    names = {event.name() for event in events}
    product = next(event for event in events if event.name() == "aten::mm")
    assert product.shapes()[:2] == [[2, 3], [3, 5]], f"shapes of a product: {product.shapes()}"
    assert product.dtypes()[:2] == ["c10::BFloat16"] * 2, f"dtypes of a product: {product.dtypes()}"
    wanted = {
        *("aten::exp_", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_attention_math", "aten::_softmax", "aten::_softmax_backward_data"),
        *("aten::cross_entropy_loss", "aten::_foreach_addcdiv_", "aten::_fused_adamw_", "aten::addcdiv_"),
    }
    assert wanted <= names, f"the profiler has no {', '.join(sorted(wanted - names))}"
    assert any("backward" in name and "flash_attention" in name for name in names)
    assert any(name.startswith("Torch-Compiled Region") for name in names), "compiled code has another name"
    casts = {dtype for event in events if event.name() == "aten::_to_copy" for dtype in event.dtypes()}
    floats = {dtype for event in events for dtype in event.dtypes()}
    assert "float" in floats, f"fp32 is none of {floats}"
    assert casts <= floats


def _float8_name() -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        torch.ones(2).to(torch.float8_e4m3fn).to(torch.float32)
    events = profiled.profiler.kineto_results.events()
    seen = {dtype for event in events if event.name() == "aten::_to_copy" for dtype in event.dtypes()}
    assert "c10::Float8_e4m3fn" in seen, f"casts to float8 and back: {seen}"


def _dynamo_counters() -> None:
    from torch._dynamo.utils import counters

    def count(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 3 - 1

    before = counters["stats"]["unique_graphs"]
    torch.compile(count, backend="eager")(torch.ones(3))
    assert counters["stats"]["unique_graphs"] == before + 1, dict(counters["stats"])


def _ddp_optimizer() -> None:
    assert torch._dynamo.config.optimize_ddp is not False, "DDP's layers are whole by now: leave it out"


def _saved_operators() -> None:
    from slm_toolkit.run.model.model import _ALWAYS_SAVED, _MATMULS

    for name in (*_MATMULS, *_ALWAYS_SAVED):
        namespace, _, operator = name.partition("::")
        if namespace in ("aten", "_c10d_functional"):  # flash_attn's and flex's are there with them
            assert hasattr(getattr(torch.ops, namespace), operator), (
                f"torch.ops.{namespace} has no {operator}"
            )


KERNELS = (
    Leaning(
        "torch: the function under AdamW",
        ("adamw",),
        "step master weights in optimizer.py, and skip a step whose gradients are no numbers",
        "run/engine/optimizer.py: its call of torch.optim.adamw.adamw",
        _adamw,
    ),
    Leaning(
        "torch: a fused optimizer asked to leave a step out",
        ("found_inf",),
        "skip a step whose gradients are no numbers without waiting for the device",
        "run/engine/engine.py: `_step_if_finite`",
        _left_out,
    ),
    Leaning(
        "torch: operators on lists of tensors",
        (
            "_foreach_norm",
            "_foreach_mul_",
            "_foreach_lerp_",
            "_foreach_lerp",
            "_foreach_sign_",
            "_foreach_copy_",
            "_foreach_add_",
            "_foreach_sub_",
        ),
        "clip and copy in few kernels",
        "run/engine/optimizer.py: torch's new names, or a loop",
        _foreach,
    ),
    Leaning(
        "torch: the profiler's events and operators' names",
        ("kineto_results",),
        "say in probe.py and step_breakdown.py which kernels and dtypes ran",
        "run/observe/probe.py: `_operators` and the tables of names above it",
        _kineto,
    ),
    Leaning(
        "torch: the profiler's name of float8",
        ("c10::Float8",),
        "say in probe.py that products were in float8",
        "run/observe/probe.py: `_float8`",
        _float8_name,
    ),
    Leaning(
        "torch: dynamo's counters",
        ("torch._dynamo.utils",),
        "count graphs, so that steps which compile are not timed",
        "run/observe/measure.py: num_compiled_graphs",
        _dynamo_counters,
    ),
    Leaning(
        "torch: dynamo cuts graphs under DDP",
        ("_dynamo", "optimize_ddp"),
        "compile a layer whole under DDP",
        "run/model/model.py: build_model",
        _ddp_optimizer,
    ),
    Leaning(
        "torch: operators whose results selective checkpointing keeps",
        ("_ALWAYS_SAVED",),
        "name them in run/model/model.py",
        "run/model/model.py: _MATMULS and _ALWAYS_SAVED",
        _saved_operators,
    ),
)
