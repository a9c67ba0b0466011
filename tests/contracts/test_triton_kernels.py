"""The Triton kernels: their numbers on a GPU or in Triton's interpreter, their code for GPUs."""

import json
import os
import re
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import run

TRITON = os.environ.get("SLM_TRITON")  # a folder with Triton, which PyTorch's build for CPUs lacks
pytestmark = pytest.mark.skipif(
    TRITON is None and find_spec("triton") is None,
    reason="no Triton here: pip install --target FOLDER triton, and set SLM_TRITON to it",
)

HERE = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
STEPS = """
import json, torch
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
from slm_toolkit.run.kernels.adamw_kernel import BLOCK, AdamWKernel

def largest(ours, theirs):
    assert ours.isfinite().all()
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1e-3)).max())

errors = {}
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    torch.manual_seed(0)
    start = [torch.randn(shape).to(dtype) for shape in ((48, 16), (5,), (BLOCK,), (1, 2 * BLOCK + 7))]
    def made(kernel):
        params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        groups = [
            {"params": params[:1], "weight_decay": 0.1},  # all sizes and addresses are aligned
            {"params": params[1:], "weight_decay": 0.0},
        ]
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "max_grad_norm": 1.0, "fused": True}
        return params, AdamWWithMasterWeights(groups, kernel=kernel, **options)
    pairs = (theirs, torchs), (ours, kernels) = made(None), made(AdamWKernel())
    for step in range(5):
        gradients = [torch.randn(tensor.shape).to(dtype) for tensor in start]
        if step == 2:
            gradients[1][0] = float("inf")  # such a step changes nothing
        for params, optimizer in pairs:
            for param, gradient in zip(params, gradients):
                param.grad = gradient.clone()
            optimizer.step()
    for param, other in zip(ours, theirs):
        mine, torchs_own = kernels.state[param], torchs.state[other]
        for name in torchs_own:
            error = largest(mine[name], torchs_own[name])
            errors[name] = max(errors.get(name, 0), error)
        assert int(mine["step"]) == 4
        if dtype == torch.float32:
            errors["fp32 weight"] = max(errors.get("fp32 weight", 0), largest(param.detach(), other.detach()))
        elif param.is_cuda or dtype == torch.float16:
            assert torch.equal(param, mine["master"].to(dtype))
        else:  # the interpreter cuts where a GPU rounds to nearest
            cut = (mine["master"].view(torch.int32) & -65536).view(torch.float32)
            assert torch.equal(param.float(), cut)
print(json.dumps(errors))
"""

LOSSES = """
import json, torch
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
from slm_toolkit.run.kernels import loss_kernels
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX, LossHead, _chunk_losses_
from slm_toolkit.run.kernels.loss_triton import BLOCK, triton_chunk_losses_

def largest(ours, theirs):
    assert ours.isfinite().all()
    return float((ours.detach().float() - theirs.detach().float()).abs().max() / theirs.abs().max())

errors = {}
for dtype in (torch.bfloat16, torch.float32):
    for vocab, padding in ((384, 0), (BLOCK, 0), (2 * BLOCK + 5, 0), (BLOCK + 64, 60)):
        torch.manual_seed(vocab)
        logits = (4 * torch.randn(5, vocab)).to(dtype)
        logits[0, 7], targets = 60, torch.randint(vocab - padding, (5,))  # one probability is almost 1
        targets[0], targets[2] = 7, IGNORE_INDEX
        if padding:
            logits[:, -padding:] = -torch.inf
        exact, num_items = logits.clone().float(), torch.tensor(3.0)
        wanted = _chunk_losses_(exact, targets, num_items, with_gradient=True)
        unchanged = logits.clone()
        for with_gradient in (False, True):
            losses = triton_chunk_losses_(logits, targets, num_items, with_gradient=with_gradient)
            assert with_gradient or torch.equal(logits, unchanged)
            assert losses[2] == 0
            errors["loss"] = max(errors.get("loss", 0), largest(losses, wanted))
        assert not logits[2].any() and not (padding and logits[:, -padding:].any())
        name = f"gradient in {dtype}"
        errors[name] = max(errors.get(name, 0), largest(logits, exact))
hidden = torch.randn(1, 50, 64, requires_grad=True)
head, labels = LossHead(64, 384, bias=False), torch.randint(384, (1, 50))
loss_kernels.tokens_of_chunk = lambda *_, **__: 16  # three chunks, and one of two tokens
found = []
for head.arithmetic in ("pytorch", "triton"):
    head.labels = labels
    loss = head(hidden)
    found.append([loss, *torch.autograd.grad(loss, [hidden, head.weight])])
errors["head"] = max(map(largest, *found))
print(json.dumps(errors))
"""

CODE = """
import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slm_toolkit.run.kernels import adamw_kernel

names = adamw_kernel._update.arg_names
signature = {name: "*i64" for name in names[:2]}
signature |= {name: "*fp32" for name in names[2:5]} | {name: "fp32" for name in names[5:11]}
for is_aligned in (True, False):
    constants = {"GRADIENT": tl.bfloat16, "WEIGHT": tl.bfloat16, "CLIPS": True, "ROUNDS": True}
    constants |= {"ALIGNED": is_aligned, "BLOCK": adamw_kernel.BLOCK}
    source = ASTSource(
        adamw_kernel._update, signature | {name: "constexpr" for name in constants}, constexprs=constants
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    print(json.dumps([adamw_kernel.BLOCK // (8 * 32), len(done.asm["cubin"]), done.asm["ptx"]]))
"""


def answers(script: str, **env: str) -> list:
    if TRITON is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (TRITON, os.environ.get("PYTHONPATH"))))
    done = run(sys.executable, "-c", script, env=env)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_five_steps_are_those_of_pytorchs_operations() -> None:
    (errors,) = answers(STEPS, **HERE)
    assert errors.pop("step") == 0
    assert errors.keys() == {"master", "exp_avg", "exp_avg_sq", "fp32 weight"}
    assert max(errors.values()) < 5e-6  # a few roundings of fp32; PyTorch fuses products with sums


def test_the_code_for_an_h200_moves_28_bytes_per_parameter_and_rounds_to_nearest() -> None:
    aligned, other = answers(CODE)
    widths = {"b16": 2, "b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16, "v2.b64": 16}

    def moved_by(code: str) -> list[tuple[str, int]]:
        found = re.findall(r"@%p\d+ (ld|st)\.global\.((?:v\d\.)?b\d+)", code)
        return [(kind, widths[width]) for kind, width in found]

    for elements, binary_size, code in (aligned, other):
        assert binary_size > 0
        moved = moved_by(code)
        assert sum(width for _, width in moved) == 28 * elements
        assert sum(width for kind, width in moved if kind == "ld") == 14 * elements
        assert "cvt.rn.bf16" in code
    assert "ld.global.v4.b32" in aligned[2]
    assert "ld.global.v4.b32" not in other[2]


def test_losses_and_gradients_are_those_of_pytorchs_operations() -> None:
    (errors,) = answers(LOSSES, **HERE)
    assert errors.pop("gradient in torch.bfloat16") < 2**-7  # the interpreter cuts where a GPU rounds
    assert errors.keys() == {"loss", "gradient in torch.float32", "head"}
    assert max(errors.values()) < 1e-6
