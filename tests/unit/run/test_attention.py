"""The attention ladder: each kernel computes the same, and the one asked for is the one that runs."""

import json

import torch
from conftest import slm_here
from transformers import AutoModelForCausalLM, MistralConfig

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.model import build_model, transformers_name


def gradients(kernel: str) -> torch.Tensor:
    config = RunConfig(model="slm-1m", seq_len=64, numerics="fp32", attn_implementation=kernel)
    model = build_model(find_model("slm-1m"), config)
    tokens = torch.arange(128).view(2, 64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def test_every_kernel_of_a_cpu_gives_the_same_gradients() -> None:
    wanted = gradients("eager")
    for kernel in ("sdpa", "sdpa_math", "sdpa_flash"):
        torch.testing.assert_close(gradients(kernel), wanted, rtol=1e-3, atol=1e-6)


def test_estimates_know_all_but_the_backend_that_keeps_scores() -> None:
    known = ("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
    done = slm_here(
        "estimate", "--json", "--model", "slm-100m", "--gpu", "a100-40gb", "--attn_implementation", *known
    )
    assert done.code == 0, done.err
    peaks = {(row["strategy"], row["peak_allocated_bytes"]) for row in json.loads(done.out)}
    assert len(peaks) == len({strategy for strategy, _ in peaks})
    assert slm_here("estimate", "--model", "slm-100m", "--attn_implementation", "sdpa_math").code == 2


def test_windows_keep_their_mask() -> None:
    """A model that sees the last tokens only must not lose that with the mask that plain SDPA lacks."""
    config = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 4}
    windowed = MistralConfig(**config, **heads)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 64  # out of sight of the last token
    for kernel in ("eager", "sdpa", "sdpa_math"):
        torch.manual_seed(0)
        name = transformers_name(kernel, windowed)
        model = AutoModelForCausalLM.from_config(windowed, attn_implementation=name)
        logits, logits_of_changed = model(tokens).logits, model(changed).logits
        assert not torch.equal(logits[0, 1], logits_of_changed[0, 1])
        torch.testing.assert_close(logits[0, -1], logits_of_changed[0, -1], rtol=0, atol=1e-6)
