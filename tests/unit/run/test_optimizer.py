"""AdamW over fp32 master weights."""

import pytest
import torch

from slm_toolkit.run.engine import optimizer
from slm_toolkit.run.engine.optimizer import MOMENTS, AdamWWithMasterWeights

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": False, "foreach": True}


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        param.grad = gradient.to(param.dtype)
        optimizer.step()


def some(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator).bfloat16().float() for _ in range(count)]


def test_the_first_step_by_hand() -> None:
    # Adam's first step moves a weight by lr against its sign: 1 - 0.1 * 0.5 * 1 (decay) - 0.1 * sign
    param = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    adamw = AdamWWithMasterWeights([param], max_grad_norm=0, lr=0.1, weight_decay=0.5, eps=1e-12)
    param.grad = torch.tensor([3.0, -4.0], dtype=torch.bfloat16)
    adamw.step()
    assert torch.allclose(adamw.state[param]["master"], torch.tensor([0.85, 1.05]))
    assert adamw.grad_norm.item() == 5.0  # 3-4-5
    assert param.dtype == torch.bfloat16
    assert torch.equal(param, adamw.state[param]["master"].bfloat16())


def test_masters_move_as_torchs_fp32_adamw_does() -> None:
    start = torch.ones(4, 3)
    low, full = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    ours = AdamWWithMasterWeights([low], max_grad_norm=0, **OPTIONS)
    train(low, ours, some(20))
    train(full, torch.optim.AdamW([full], **OPTIONS), some(20))
    assert torch.equal(ours.state[low]["master"], full.detach())


def test_many_steps_too_small_for_bf16_still_add_up() -> None:
    low = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    # 100 steps of 1e-4 make 0.01, bf16's step at 1 is 0.0039: rounding each step away would leave 1
    adamw = AdamWWithMasterWeights([low], max_grad_norm=0, lr=1e-4, weight_decay=0.0)
    train(low, adamw, [torch.ones(4, 3)] * 100)
    assert low.float().mean().item() == pytest.approx(0.99, abs=0.003)


def test_clipping_scales_all_gradients_to_the_norm_asked_for() -> None:
    clipped, scaled = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    ours = AdamWWithMasterWeights(
        [clipped], max_grad_norm=1.0, eps=1.0, lr=0.1
    )  # eps 1: scale matters to Adam
    theirs = torch.optim.AdamW([scaled], eps=1.0, lr=0.1)
    train(clipped, ours, [torch.tensor([3.0, 4.0])])
    train(scaled, theirs, [torch.tensor([0.6, 0.8])])
    assert torch.allclose(clipped, scaled, atol=1e-6)


def test_parameters_that_are_updated_in_chunks_are_those_updated_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, found = (90, 5, 20), []
    for chunk in (2**25, 30):  # the second: 90; 5 and 20
        monkeypatch.setattr(optimizer, "CHUNK_ELEMENTS", chunk)
        params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in sizes]
        adamw = AdamWWithMasterWeights(params, max_grad_norm=0.5, **OPTIONS)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            adamw.step()
        assert {int(state["step"]) for state in adamw.state.values()} == {3}
        found.append([state[kind] for state in adamw.state.values() for kind in ("master", *MOMENTS)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
