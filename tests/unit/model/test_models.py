"""Shapes and parameter counts, against the paper, published sizes and transformers' own count."""

import json
from pathlib import Path

import pytest
import torch
from conftest import SMALL_LLAMA, slm_here
from transformers import AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.model import build_model, hf_config

# Paper, appendix B, table 2.
PRINTED = {
    "slm-100m": 130_569_920,
    "slm-500m": 526_550_016,
    "slm-1b": 970_458_240,
    "slm-2b": 1_969_027_008,
}
# Model cards of the published models.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
}


@pytest.mark.parametrize(("name", "num_params"), (PRINTED | PUBLISHED).items())
def test_a_preset_has_its_published_number_of_parameters(name: str, num_params: int) -> None:
    assert PRESETS[name].num_params == num_params


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_builds_as_many_parameters_as_the_spec_counts(name: str) -> None:
    spec = PRESETS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(spec, seq_len=128))
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_params
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    assert max(own) == spec.largest_layer_params


@pytest.mark.parametrize("name", PRINTED)
def test_the_fit_gives_the_papers_shapes_at_the_papers_sizes(name: str) -> None:
    fitted, table = find_model(f"{name[:-1]}.0{name[-1]}"), PRESETS[name]
    shape = ("num_layers", "hidden_size", "num_heads", "ffn_size", "num_params")
    assert [getattr(fitted, key) for key in shape] == [getattr(table, key) for key in shape]


def test_a_size_between_the_papers_follows_the_fit() -> None:
    # x = 0.7: 1951.37 * 0.7^0.353 = 1720.5 -> nearest multiple of 96 is 18 * 96 = 1728 = 27 heads of 64;
    # 18.93 * 0.7^0.318 = 16.9 -> 17 layers; int(2.7 * 1728) = 4665.
    spec = find_model("slm-700m")
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.ffn_size) == (17, 1728, 27, 4665)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("slm-9x", "unknown model"),
        ("slm-20m", "the paper's fit covers"),
        ("no/such/folder", "unknown model"),
    ],
)
def test_an_unknown_model_is_an_error_with_a_hint(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        find_model(name)
    assert "hint:" in str(error.value)


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        ({}, 0),
        # 2 layers of 128, 4 heads of 32, 2 of keys and values, FFN 256
        ({"attention_bias": True}, 2 * (128 + 2 * 64 + 128)),  # q, k and v, output
        ({"mlp_bias": True}, 2 * (256 + 256 + 128)),  # gate, up, down
        ({"model_type": "qwen2"}, 2 * (128 + 2 * 64)),
        ({"model_type": "mistral", "sliding_window": 16, "hidden_act": "gelu"}, 0),
        ({"head_dim": 16, "tie_word_embeddings": True}, -2 * (2 * 128 * 64 + 2 * 128 * 32) - 100 * 128),
    ],
)
def test_a_config_json_is_counted_as_training_from_it_builds_it(
    tmp_path: Path, change: dict, extra: int
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 100} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = find_model(str(tmp_path))
    # q and output 128 x 128, k and v 128 x 64, three FFN matrices 128 x 256, two norms; beside them one norm,
    # two vocabularies
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert spec.num_params == 2 * layer + 128 + 2 * 100 * 128 + extra
    model = build_model(spec, RunConfig(seq_len=32, numerics="fp32"))
    assert sum(param.numel() for param in model.parameters()) == spec.num_params
    loss = model(input_ids=torch.arange(32)[None], labels=torch.arange(32)[None]).loss
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert (model.config.hidden_act, spec.hidden_act) == (change.get("hidden_act", "silu"),) * 2


def test_an_estimate_says_what_of_a_models_config_it_leaves_out(tmp_path: Path) -> None:
    config = {**SMALL_LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--model", str(tmp_path), "--gpu", "l4", "--seq_len", "1024", "--strategy", "single")
    said = slm_here("estimate", *words).err
    assert "sliding_window 512: sdpa and eager attention compute all 1024 tokens" in said
