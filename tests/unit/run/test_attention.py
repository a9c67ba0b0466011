"""Attention: our sdpa without a mask computes what transformers' does, and keeps the masks of windows."""

import torch
from transformers import AutoModelForCausalLM, MistralConfig

from slm_toolkit.run.model.model import transformers_name


def test_windows_keep_their_mask() -> None:
    """A model that sees the last tokens only must not lose that with the mask that plain SDPA lacks."""
    config = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 4}
    windowed = MistralConfig(**config, **heads)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 64  # out of sight of the last token
    for kernel in ("eager", "sdpa"):
        torch.manual_seed(0)
        name = transformers_name(kernel, windowed)
        model = AutoModelForCausalLM.from_config(windowed, attn_implementation=name)
        logits, logits_of_changed = model(tokens).logits, model(changed).logits
        assert not torch.equal(logits[0, 1], logits_of_changed[0, 1])
        torch.testing.assert_close(logits[0, -1], logits_of_changed[0, -1], rtol=0, atol=1e-6)


def test_sdpa_without_a_mask_has_the_gradients_of_eager() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    config = MistralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, sliding_window=None)
    tokens, found = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)), []
    for kernel, name in (("eager", "eager"), ("sdpa", "causal_sdpa")):
        torch.manual_seed(0)
        assert transformers_name(kernel, config) == name
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)
