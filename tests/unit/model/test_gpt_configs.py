"""GPT-like config.json: parameters as transformers counts them; estimated, not trained."""

from pathlib import Path

import pytest
import torch
from conftest import slm_here
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, MptConfig, PretrainedConfig

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model

CONFIGS = {
    "gpt2": GPT2Config(),  # 124,439,808 parameters as published
    "gpt_neox": GPTNeoXConfig(
        num_hidden_layers=6, hidden_size=512, num_attention_heads=8, intermediate_size=2048, vocab_size=50304
    ),  # Pythia 70M, 70,426,624 as published
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path) -> None:
    assert spec_of(CONFIGS[name], tmp_path).num_params == {"gpt2": 124_439_808, "gpt_neox": 70_426_624}[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert spec_of(CONFIGS[name], tmp_path).num_params == sum(p.numel() for p in model.parameters())


def test_an_mpt_with_biases_and_learned_positions_has_llm_foundrys_parameters(tmp_path: Path) -> None:
    config = MptConfig(
        d_model=768, n_heads=12, n_layers=12, vocab_size=50368, max_seq_len=1024, no_bias=False,
        attn_config={"alibi": False},
    )  # fmt: skip
    assert spec_of(config, tmp_path).num_params == 124_525_056  # llm-foundry's table, MPT-125m at 1024


def test_it_is_estimated_and_not_trained(tmp_path: Path) -> None:
    CONFIGS["gpt2"].save_pretrained(tmp_path)
    done = slm_here("estimate", "--model", str(tmp_path), "--gpu", "l4", "--strategy", "ddp", "--json")
    assert done.code == 0
    done = slm_here("compare", "--model", str(tmp_path))
    assert done.code == 2
    assert "can be estimated, not trained here\nhint: " in done.err


def test_no_sequence_is_longer_than_learned_positions(tmp_path: Path) -> None:
    CONFIGS["gpt2"].save_pretrained(tmp_path)
    says = f"--seq_len 8192: {tmp_path.name} has 1024 learned positions, --seq_len 1024 at most"
    for verb in ("estimate", "doctor", "recommend"):
        done = slm_here(verb, "--model", str(tmp_path), "--seq_len", "8192", "--gpu", "h100-80gb")
        assert (done.code, f"error: {says}" in done.err) == (2, True), done.err
    longest = slm_here(
        "estimate", "--model", str(tmp_path), "--seq_len", "1024", "--gpu", "l4", "--strategy", "ddp"
    )
    assert longest.code == 0, longest.err


def test_a_gpt_neox_without_attention_bias_is_counted_without(tmp_path: Path) -> None:
    config = GPTNeoXConfig(**{**CONFIGS["gpt_neox"].to_dict(), "attention_bias": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert spec_of(config, tmp_path).num_params == sum(p.numel() for p in model.parameters())


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12, "n_head": true}')
    with pytest.raises(ValueError, match="n_embd, n_head, vocab_size must be positive whole numbers"):
        find_model(str(tmp_path))


def spec_of(config: PretrainedConfig, folder: Path) -> ModelSpec:
    config.save_pretrained(folder)
    return find_model(str(folder))
