"""Muon in one process: torch.optim.Muon's arithmetic, clipping before the momentum, and who gets it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.engine.engine import build_optimizer
from slm_toolkit.run.engine.muon import MOMENTUM, MUON_MOMENTUM, is_muon, orthogonalize
from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
from slm_toolkit.strategy.strategy import find_strategy

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def some(*shape: int, count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def ours(param: torch.nn.Parameter, *, max_grad_norm: float = 0.0) -> AdamWWithMasterWeights:
    group = {"params": [param], "momentum": MUON_MOMENTUM}
    options = {"lr": 1e-2, "weight_decay": 0.1, "fused": False}
    return AdamWWithMasterWeights([group], max_grad_norm=max_grad_norm, muon_dtype=torch.bfloat16, **options)


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        param.grad = gradient.to(param.dtype).clone()
        optimizer.step()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_ten_steps_are_those_of_torchs_muon(shape: tuple[int, int]) -> None:
    (start,) = some(*shape)
    own, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    train(own, ours(own), some(*shape, count=10))
    options = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    train(theirs, torch.optim.Muon([theirs], **options), some(*shape, count=10))
    assert torch.equal(own, theirs)


def test_bf16_weights_follow_masters_that_move_in_fp32() -> None:
    (start,) = some(24, 40)
    low, full = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.bfloat16().float())
    gradients = [gradient.bfloat16() for gradient in some(24, 40, count=5)]
    optimizer = ours(low)
    train(low, optimizer, gradients)
    train(full, ours(full), gradients)
    state = optimizer.state[low]
    assert torch.equal(state["master"], full)
    assert torch.equal(low, state["master"].bfloat16())
    assert sorted(state) == ["master", MOMENTUM]  # 8 bytes per parameter, not AdamW's 12
    assert state[MOMENTUM].dtype == torch.float32


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_all_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    (matrix,) = some(*shape)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    # the quintic's fixed interval, by its coefficients: 0.68 to 1.13
    assert values.min() > 0.65
    assert values.max() < 1.16


def test_gradients_are_clipped_before_they_enter_the_momentum() -> None:
    clipped, scaled = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    large = torch.tensor([[3.0, 0.0], [0.0, 4.0]])  # norm 5
    one, other = ours(clipped, max_grad_norm=1.0), ours(scaled)
    train(clipped, one, [large])
    train(scaled, other, [large / 5])
    assert torch.allclose(one.state[clipped][MOMENTUM], other.state[scaled][MOMENTUM], atol=1e-6)
    assert one.grad_norm.item() == 5.0


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = ours(param)
    train(param, optimizer, [torch.full((2, 2), float("nan"))])
    assert torch.equal(param, torch.ones(2, 2))
    assert MOMENTUM not in optimizer.state[param]


@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_the_layers_matrices_and_adamw_the_rest(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48, tie_word_embeddings=tied))
    optimizer = build_optimizer(model, RunConfig(optim="muon", max_grad_norm=1.0), find_strategy("ddp"))
    names = {param: name for name, param in model.named_parameters()}
    by_muon, matrices, vectors = (
        [names[param] for param in group["params"]] for group in optimizer.param_groups
    )
    assert [is_muon(group) for group in optimizer.param_groups] == [True, False, False]
    assert len(by_muon) == 2 * 7
    assert all(name.startswith("model.layers.") and "proj" in name for name in by_muon)
    assert matrices == ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    assert len(vectors) == 2 * 2 + 1
    assert all("norm" in name for name in vectors)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_a_group_without_parameters_is_left_out() -> None:
    """As under LoRA. DeepSpeed alone would leave it out, and its rows would be marked."""
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48))
    for param in model.parameters():
        param.requires_grad = param.dim() == 2
    optimizer = build_optimizer(model, RunConfig(), find_strategy("ddp"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
