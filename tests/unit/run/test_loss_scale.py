"""The loss scale of --numerics fp16: its rule, and what the optimizer does with it."""

import math
from random import Random

import pytest
import torch

from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights, LossScale


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_the_rule_of_torchs_scaler(seed: int) -> None:
    scale, random = LossScale("cpu"), Random(seed)
    scale.set_growth_interval(3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu", growth_interval=3)
    for _ in range(200):
        is_bad = random.random() < 0.2
        scale.count_step(torch.tensor(is_bad))
        scaler.scale(weight * (math.inf if is_bad else 1e-3)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scale.state_dict() == scaler.state_dict()


def test_it_halves_down_to_one_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale("cpu")
    seen = []
    for _ in range(18):
        scale.count_step(torch.tensor(True))
        seen.append(scale.get_scale())
    assert seen == [2.0**power for power in range(15, -1, -1)] + [1.0, 1.0]
    for _ in range(1999):
        scale.count_step(torch.tensor(False))
    assert scale.get_scale() == 1.0
    scale.count_step(torch.tensor(False))
    assert scale.get_scale() == 2.0


def test_its_state_is_that_of_torchs_scaler_and_an_engine_is_told() -> None:
    told: list[float] = []
    scale = LossScale("cpu", tells=told.append)
    scale.count_step(torch.tensor(True))
    scale.count_step(torch.tensor(False))
    state = scale.state_dict()
    assert state.keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    other = LossScale("cpu", tells=told.append)
    other.load_state_dict(state)
    assert (other.get_scale(), other._get_growth_tracker()) == (2.0**15, 1)
    assert told == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15]


def stepped(*, fused: bool, scaled: bool, max_grad_norm: float) -> tuple[torch.Tensor, float]:
    """One step of an fp16 weight with the gradient (3, 4) / 4; return its master and the norm."""
    weight = torch.nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float16))
    options = {"lr": 0.1, "fused": fused, "foreach": None if fused else True, "eps": 1.0}
    optimizer = AdamWWithMasterWeights([weight], max_grad_norm=max_grad_norm, **options)
    weight.grad = torch.tensor([0.75, 1.0], dtype=torch.float16)
    if scaled:
        optimizer.loss_scale = LossScale("cpu")
        optimizer.loss_scale.value.fill_(4.0)
        weight.grad *= 4
    optimizer.step()
    assert torch.equal(weight, optimizer.state[weight]["master"].half())
    return optimizer.state[weight]["master"].clone(), optimizer.grad_norm.item()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_the_optimizer_divides_by_it(fused: bool, max_grad_norm: float) -> None:
    """eps is 1, so that the update depends on the gradient's size; the norm is 5 / 4."""
    plain, plain_norm = stepped(fused=fused, scaled=False, max_grad_norm=max_grad_norm)
    scaled, norm = stepped(fused=fused, scaled=True, max_grad_norm=max_grad_norm)
    assert (norm, plain_norm) == (1.25, 1.25)
    assert torch.equal(plain, scaled)
    clip = 0.4 if max_grad_norm else 1.0
    gradient = 0.75 * clip  # AdamW's first update: lr g / (|g| + eps), and lr times 0.01 of decay
    assert plain[0].item() == pytest.approx(
        0.5 * (1 - 0.1 * 0.01) - 0.1 * gradient / (gradient + 1), rel=1e-5
    )


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_overflows_changes_only_the_scale(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float16))
    options = {"lr": 0.1, "fused": fused, "foreach": None if fused else True}
    optimizer = AdamWWithMasterWeights([weight], max_grad_norm=1.0, **options)
    optimizer.loss_scale = LossScale("cpu")
    weight.grad = torch.tensor([1.0, math.inf], dtype=torch.float16)
    optimizer.step()
    assert weight.tolist() == [0.5, -0.25]
    assert optimizer.loss_scale.get_scale() == 2.0**15
    assert not math.isfinite(optimizer.grad_norm.item())
    weight.grad = torch.tensor([1.0, 1.0], dtype=torch.float16)
    optimizer.step()
    assert weight[0] < 0.5
    assert optimizer.state[weight]["step"].item() == 1
