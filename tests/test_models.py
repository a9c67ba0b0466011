"""Shapes and parameter counts, against the paper, published sizes and transformers' own count."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slm_toolkit.model_names import find_model
from slm_toolkit.models import PRESETS
from slm_toolkit.run.model import hf_config

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


@pytest.mark.parametrize("name", ["slm-1m", "slm-3m", "slm-10m", "slm-30m"])
def test_small_models_are_named_by_their_true_size(name: str) -> None:
    millions = int(name.removeprefix("slm-").removesuffix("m"))
    assert abs(PRESETS[name].num_params / 1e6 - millions) / millions < 0.08


@pytest.mark.parametrize("name", ["slm-100m", "slm-500m", "slm-1b", "slm-2b"])
def test_the_fit_gives_the_papers_shapes_at_the_papers_sizes(name: str) -> None:
    nominal = {"slm-100m": "slm-100.0m", "slm-500m": "slm-500.0m", "slm-1b": "slm-1.0b", "slm-2b": "slm-2.0b"}
    fitted, table = find_model(nominal[name]), PRESETS[name]
    shape = ("num_layers", "hidden_size", "num_heads", "ffn_size", "num_params")
    assert [getattr(fitted, key) for key in shape] == [getattr(table, key) for key in shape]


def test_a_size_between_the_papers_follows_the_fit() -> None:
    # x = 0.7: 1951.37 * 0.7^0.353 = 1720.5 -> nearest multiple of 96 is 18 * 96 = 1728 = 27 heads of 64;
    # 18.93 * 0.7^0.318 = 16.9 -> 17 layers; int(2.7 * 1728) = 4665.
    spec = find_model("slm-700m")
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.ffn_size) == (17, 1728, 27, 4665)


def test_a_config_json_gives_the_same_model_as_its_preset(tmp_path: Path) -> None:
    hf_config(PRESETS["qwen2.5-0.5b"], seq_len=128).save_pretrained(tmp_path)
    assert find_model(str(tmp_path)).num_params == PUBLISHED["qwen2.5-0.5b"]
    assert find_model(str(tmp_path / "config.json")).num_kv_heads == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("slm-9x", "unknown model"),
        ("slm-1k", "unknown model"),
        ("slm-20m", "the paper's fit serves"),
        ("no/such/folder", "unknown model"),
    ],
)
def test_an_unknown_model_is_an_error_with_a_hint(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        find_model(name)
    assert "hint:" in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "wide"}, "hidden_size must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_attention_heads": 7}, "heads"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"model_type": "bert"}, "not supported"),
    ],
)
def test_a_config_json_that_makes_no_sense_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
    config |= {"intermediate_size": 256, "vocab_size": 100} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        find_model(str(tmp_path))
