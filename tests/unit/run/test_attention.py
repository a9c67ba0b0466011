"""Attention: our sdpa without a mask computes what transformers' does, and keeps the masks of windows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from slm_toolkit.run.model.model import transformers_name

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def model_with(window: int | None, kernel: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, **HEADS, sliding_window=window)
    name = transformers_name(kernel, config)
    assert (name == "causal_sdpa") == (window is None and kernel == "sdpa")
    return AutoModelForCausalLM.from_config(config, attn_implementation=name)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_windows_keep_their_mask(kernel: str) -> None:
    """A model that sees the last tokens only must not lose that with the mask that plain SDPA lacks."""
    changed = TOKENS.clone()
    changed[0, 0] = (TOKENS[0, 0] + 1) % 64  # out of sight of the last token
    model = model_with(4, kernel)
    logits, logits_of_changed = model(TOKENS).logits, model(changed).logits
    assert not torch.equal(logits[0, 1], logits_of_changed[0, 1])
    torch.testing.assert_close(logits[0, -1], logits_of_changed[0, -1], rtol=0, atol=1e-6)


def test_sdpa_without_a_mask_has_the_gradients_of_eager() -> None:
    found = []
    for model in (model_with(None, "eager"), model_with(None, "sdpa")):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)
