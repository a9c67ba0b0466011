"""Fused losses, the fused norm and selective checkpointing compute what transformers does, and keep less."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_models import ALL, error, made, two_micro_steps
from torch.utils._python_dispatch import TorchDispatchMode

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.kernels import loss_kernels
from slm_toolkit.run.kernels.layer_kernels import use_kernels
from slm_toolkit.run.model.model import enable_checkpointing


@pytest.mark.parametrize(
    "flags",
    [
        {"kernels": "loss"},
        {"gradient_checkpointing": "selective_layer"},
        ALL,
    ],
    ids=str,
)
def test_losses_and_gradients_are_transformers(flags: dict[str, str], tied: str) -> None:
    for model in ("slm-1m", tied):
        loss, grads = two_micro_steps(made(model, **flags))
        wanted_loss, wanted = two_micro_steps(made(model))
        assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
        assert error(grads, wanted) < 1e-5


def test_in_bf16_they_are_no_farther_from_fp32_than_transformers() -> None:
    exact = two_micro_steps(made())[1]
    plain, fused = (two_micro_steps(made(numerics="aligned", **flags))[1] for flags in ({}, ALL))
    assert error(fused, exact) < 1.2 * error(plain, exact)


def test_chunks_of_any_number_of_tokens_have_the_same_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted_loss, wanted = two_micro_steps(made(kernels="loss"))
    for num_tokens, elements in ((1, 384), (13, 7 * 384), (64, 7 * 384)):  # of 64 in a micro-step; V is 384
        monkeypatch.setattr(loss_kernels, "tokens_of_chunk", lambda *_, n=num_tokens, **__: n)
        monkeypatch.setattr("slm_toolkit.config.loss_chunks._ELEMENTS", elements)
        loss, grads = two_micro_steps(made(kernels="loss"))
        assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
        assert error(grads, wanted) < 1e-6


def test_without_gradients_or_labels_logits_are_logits() -> None:
    tokens = torch.arange(64).view(1, 64)
    plain, model = made().eval(), made(**ALL).eval()
    with torch.no_grad():
        wanted = plain(input_ids=tokens, labels=tokens)
        torch.testing.assert_close(model(input_ids=tokens).logits, wanted.logits)
        torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, wanted.loss)
    assert model.state_dict().keys() == plain.state_dict().keys()


class Counted(TorchDispatchMode):
    """Operators by name, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[op.name().partition(".")[0]] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "num_matmuls", "num_attentions"),
    [  # slm-1m has 4 layers of 7 linear layers; of `down`, the last, nobody needs the result again
        ("full", 4 * 6, 4),
        ("selective_layer", 2 * 6, 2),
        ("selective_op", 4 * 3, 0),  # key, output, up
    ],
)
def test_backward_computes_again_what_was_not_saved(mode: str, num_matmuls: int, num_attentions: int) -> None:
    def in_backward(mode: str) -> Counter[str]:
        tokens = torch.arange(64).view(1, 64)
        loss = made(gradient_checkpointing=mode)(input_ids=tokens, labels=tokens).loss
        with Counted() as counted:
            loss.backward()
        return counted.seen

    again = in_backward(mode) - in_backward("none")
    assert again["aten::mm"] == num_matmuls
    assert again["aten::_scaled_dot_product_flash_attention_for_cpu"] == num_attentions


@pytest.mark.parametrize("mode", ["full", "selective_op"])
def test_an_engines_hooks_of_a_layer_run_once_though_it_is_computed_again(mode: str) -> None:
    """As FSDP2's do, which gather; transformers 5.17 ran them again in backward."""
    model, seen = made(gradient_checkpointing=mode), []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("layer"))
    model.model.layers[0].mlp.act_fn.register_forward_pre_hook(lambda *_: seen.append("inside"))
    tokens = torch.arange(64).view(1, 64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert seen == ["layer", "inside", "inside"]


def test_a_head_that_is_no_plain_matrix_is_refused() -> None:
    model = made()
    model.lm_head = torch.nn.Linear(128, 384, bias=True)
    with pytest.raises(ValueError, match="not a plain matrix\nhint: --kernels plain"):
        use_kernels(model, RunConfig(kernels="loss"))


class InPlace(torch.nn.Module):
    """A layer that adds its bias to a saved product, and uses the product as it was, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x.matmul(self.linear.weight.t())
        with torch.no_grad():
            before = product.clone()
        product += self.linear.bias
        return (product.exp() + before).sin()


def test_a_saved_result_that_changes_in_place_is_saved_as_it_was() -> None:
    """DeepSpeed's linear layer adds its bias so under ZeRO-3; backward then had it added twice."""
    inputs, gradients = torch.randn(4, 8, generator=torch.manual_seed(1)), []
    for mode in ("none", "selective_op"):
        layer = InPlace()
        model = SimpleNamespace(base_model=torch.nn.ModuleList([layer]))
        model.config = SimpleNamespace(num_hidden_layers=1)
        enable_checkpointing(model, mode, compiled=False)
        gradients.append(torch.autograd.grad(layer(inputs).square().sum(), list(layer.parameters())))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
