"""AdamW and Muon over master weights, and the loss scale of --numerics fp16."""

import math
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.engine import optimizer
from slm_toolkit.run.engine.engine import build_optimizer
from slm_toolkit.run.engine.muon import MOMENTUM, MUON_MOMENTUM, is_muon
from slm_toolkit.run.engine.optimizer import MOMENTS, AdamWWithMasterWeights, LossScale
from slm_toolkit.strategy.strategy import find_strategy

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": False, "foreach": True}
OF_MUON = {"lr": 1e-2, "weight_decay": 0.1}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        param.grad = gradient.to(param.dtype).clone()
        optimizer.step()


def some(*shape: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).bfloat16().float() for _ in range(count)]


def adamw(*params: torch.nn.Parameter, max_grad_norm: float = 0.0, **options: Any) -> AdamWWithMasterWeights:
    return AdamWWithMasterWeights(list(params), max_grad_norm=max_grad_norm, **{**OPTIONS, **options})


def muon(param: torch.nn.Parameter, *, max_grad_norm: float = 0.0) -> AdamWWithMasterWeights:
    groups, dtype = [{"params": [param], "momentum": MUON_MOMENTUM}], torch.bfloat16
    return AdamWWithMasterWeights(
        groups, max_grad_norm=max_grad_norm, muon_dtype=dtype, fused=False, **OF_MUON
    )


def test_the_first_step_of_adamw_by_hand() -> None:
    # Adam's first step moves a weight by lr against its sign: 1 - 0.1 * 0.5 * 1 (decay) - 0.1 * sign
    param = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    made = adamw(param, lr=0.1, weight_decay=0.5, eps=1e-12)
    train(param, made, [torch.tensor([3.0, -4.0])])
    assert torch.allclose(made.state[param]["master"], torch.tensor([0.85, 1.05]))
    assert made.grad_norm.item() == 5.0  # 3-4-5


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
@pytest.mark.parametrize("by_muon", [False, True])
def test_masters_move_as_torchs_optimizers_in_fp32_do(shape: tuple[int, int], by_muon: bool) -> None:
    start, *gradients = some(*shape, count=11)
    low, full = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    if by_muon:
        ours, theirs = muon(low), torch.optim.Muon([full], adjust_lr_fn="match_rms_adamw", **OF_MUON)
    else:
        ours = adamw(low)
        theirs = torch.optim.AdamW([full], **OPTIONS)
    train(low, ours, gradients)
    train(full, theirs, gradients)
    state = ours.state[low]
    assert torch.equal(state["master"], full.detach())
    assert torch.equal(low, full.bfloat16())
    # Muon: 8 bytes per parameter, not AdamW's 12
    assert sorted(state) == (["master", MOMENTUM] if by_muon else ["exp_avg", "exp_avg_sq", "master", "step"])
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize(("made", "kind"), [(adamw, "exp_avg"), (muon, MOMENTUM)])
def test_gradients_are_clipped_to_the_norm_before_they_enter_the_moments(made: Any, kind: str) -> None:
    large, found = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), []  # norm 5
    for max_grad_norm, gradient in ((1.0, large), (0.0, large / 5)):
        param = torch.nn.Parameter(torch.ones(2, 2))
        ours = made(param, max_grad_norm=max_grad_norm)
        train(param, ours, [gradient])
        found.append(ours.state[param][kind])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_parameters_that_are_updated_in_chunks_are_those_updated_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, found = (90, 5, 20), []
    for chunk in (2**25, 30):  # the second: 90; 5 and 20
        monkeypatch.setattr(optimizer, "CHUNK_ELEMENTS", chunk)
        params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in sizes]
        made = adamw(*params, max_grad_norm=0.5)
        for step in range(3):
            for param in params:
                param.grad = some(param.numel(), count=1 + step)[step].bfloat16()
            made.step()
        found.append([state[kind] for state in made.state.values() for kind in ("master", *MOMENTS)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_the_layers_matrices_and_adamw_the_rest(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48, tie_word_embeddings=tied))
    groups = build_optimizer(model, RunConfig(optim="muon", max_grad_norm=1.0), find_strategy("ddp"))
    names = {param: name for name, param in model.named_parameters()}
    by_muon, matrices, vectors = (
        [names[param] for param in group["params"]] for group in groups.param_groups
    )
    assert [is_muon(group) for group in groups.param_groups] == [True, False, False]
    assert len(by_muon) == 2 * 7
    assert all(name.startswith("model.layers.") and "proj" in name for name in by_muon)
    assert matrices == ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    assert len(vectors) == 2 * 2 + 1
    assert [group["weight_decay"] for group in groups.param_groups] == [0.1, 0.1, 0.0]


def test_a_group_without_parameters_is_left_out() -> None:
    """As under LoRA. DeepSpeed alone would leave it out, and its rows would be marked."""
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48))
    for param in model.parameters():
        param.requires_grad = param.dim() == 2
    groups = build_optimizer(model, RunConfig(), find_strategy("ddp")).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1]


def test_the_loss_scale_follows_the_rule_of_torchs_scaler_down_to_one() -> None:
    told: list[float] = []
    scale, random = LossScale("cpu", tells=told.append), Random(0)
    weight = torch.nn.Parameter(torch.ones(1))
    sgd, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu", growth_interval=3)
    scale.set_growth_interval(3)
    for _ in range(200):
        is_bad = random.random() < 0.2
        scale.count_step(torch.tensor(is_bad))
        scaler.scale(weight * (math.inf if is_bad else 1e-3)).sum().backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        assert scale.state_dict() == scaler.state_dict()
    assert told[0] == 2.0**16
    assert told[-1] == scale.get_scale()
    for _ in range(80):
        scale.count_step(torch.tensor(True))
    assert scale.get_scale() == 1.0
    scale.load_state_dict({**scaler.state_dict(), "scale": 8.0})
    assert told[-1] == 8.0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_the_optimizer_divides_by_the_loss_scale(fused: bool, max_grad_norm: float) -> None:
    """eps is 1, so that the update depends on the gradient's size; the norm of (3, 4) / 4 is 5 / 4."""
    clip = 0.4 if max_grad_norm else 1.0
    gradient = 0.75 * clip  # AdamW's first update: lr g / (|g| + eps), and lr times 0.1 of decay
    wanted = 0.5 * (1 - 0.1 * 0.1) - 0.1 * gradient / (gradient + 1)
    for scale in (1.0, 4.0):
        weight = torch.nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float16))
        options = {"lr": 0.1, "fused": fused, "foreach": None if fused else True, "eps": 1.0}
        made = adamw(weight, max_grad_norm=max_grad_norm, **options)
        if scale != 1:
            made.loss_scale = LossScale("cpu")
            made.loss_scale.value.fill_(scale)
        train(weight, made, [torch.tensor([0.75, 1.0]) * scale])
        assert made.grad_norm.item() == 1.25
        assert made.state[weight]["master"][0].item() == pytest.approx(wanted, rel=1e-5)
        assert torch.equal(weight, made.state[weight]["master"].half())


@pytest.mark.parametrize("kind", ["fused", "foreach", "muon"])
def test_a_gradient_that_is_not_finite_changes_only_the_loss_scale(kind: str) -> None:
    weight = torch.nn.Parameter(torch.tensor([[0.5, -0.25]], dtype=torch.float16))
    options = {"fused": True, "foreach": None} if kind == "fused" else {}
    made = (muon if kind == "muon" else adamw)(weight, max_grad_norm=1.0, **options)
    made.loss_scale = LossScale("cpu")
    train(weight, made, [torch.tensor([[1.0, math.inf]])])
    assert weight.tolist() == [[0.5, -0.25]]
    assert made.loss_scale.get_scale() == 2.0**15
    assert not math.isfinite(made.grad_norm.item())
    train(weight, made, [torch.tensor([[1.0, 1.0]])])
    assert weight[0, 0] < 0.5
    assert made.state[weight].get("step", 1) == 1
