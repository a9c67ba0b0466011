"""The families of models: counted as transformers builds them, and refused where that is unknown."""

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import FAMILIES, kernel_problems, with_kernels_of
from slm_toolkit.model.from_config import spec_from_config
from slm_toolkit.model.model_spec import ModelSpec, layer_tensors
from slm_toolkit.model.names import find_model
from slm_toolkit.run.kernels.layer_kernels import FusedRMSNorm, decoder_layers
from slm_toolkit.run.model.model import build_model, hf_config

MODELS = ROOT / "bench" / "data" / "models"
TODAY = (
    *("qwen3-2m", "gemma2-2m", "gemma3-2m", "smollm3-2m"),
    *("olmo2-3m", "granite-2m", "phi3-2m", "falcon3-2m"),
)
SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
SMALL |= {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QWEN = {"sliding_window": 16, "num_key_value_heads": 4}


def spec_of(model_type: str, **keys: object) -> ModelSpec:
    config = {**SMALL, "model_type": model_type, **keys}
    return spec_from_config(config, name=model_type, path=model_type)


@pytest.mark.parametrize("name", TODAY)
def test_a_layers_parameters_are_those_that_transformers_builds_in_its_order(name: str) -> None:
    spec = find_model(str(MODELS / name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(spec, seq_len=32))
    assert spec.num_params == sum(param.numel() for param in model.parameters())
    built = [
        (key.split(".")[-2], param.numel()) for key, param in decoder_layers(model)[0].named_parameters()
    ]
    assert [(tensor.name, tensor.num_elements) for tensor in layer_tensors(spec)] == built


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_of_absent_keys_are_those_of_transformers_configurations(model_type: str) -> None:
    family = FAMILIES[model_type]
    switch = {family.window_switch: True} if family.window_switch else {}
    default = AutoConfig.for_model(model_type, **switch)
    assert family.tied == default.tie_word_embeddings
    assert family.activation == getattr(default, family.activation_key)
    for key, value in family.defaults.items():
        assert value == getattr(default, key), key


@pytest.mark.parametrize(
    ("model_type", "keys", "says"),
    [
        ("gpt2", {}, "'gpt2' is not supported\nhint: there are llama, qwen2"),
        ("llama", {"num_experts": 8}, "num_experts 8: a llama with this is not trained here"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmo2", {"sliding_window": 64}, "sliding_window 64"),
        ("qwen2", {"mlp_bias": True, "num_experts": 8}, "mlp_bias True, num_experts 8"),
        ("llama", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("llama", {"attention_bias": "yes"}, "attention_bias"),
        ("llama", {"num_attention_heads": 7}, "7 heads"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized already .*\nhint: .*qlora"),
    ],
)
def test_a_model_that_is_not_known_is_refused(model_type: str, keys: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        spec_of(model_type, **keys)
    assert "hint:" in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("gemma2", {"sliding_window": 16}, (16, 2)),  # every second of 4 layers
        ("gemma3_text", {"num_hidden_layers": 13}, (4096, 11)),  # all but the sixth and the twelfth
        ("smollm3", {"sliding_window": 16, "use_sliding_window": True}, (16, 1)),  # the fourth has no RoPE
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, **QWEN}, (16, 3)),
        ("phi3", {"sliding_window": 16}, (16, 4)),
        ("mistral", {"num_key_value_heads": 4}, (4096, 4)),
    ],
)
def test_windows_are_those_of_transformers(model_type: str, keys: dict, expected: tuple) -> None:
    spec = spec_of(model_type, **keys)
    assert (spec.sliding_window, spec.num_window_layers) == expected
    config = {**SMALL, "model_type": model_type, **keys}
    built = AutoConfig.for_model(**config)
    kinds = getattr(built, "layer_types", None) or ["sliding_attention"] * built.num_hidden_layers
    num_windows = kinds.count("sliding_attention") if built.sliding_window is not None else 0
    assert spec.num_window_layers == num_windows


def test_a_kernel_that_computes_another_function_is_refused_or_replaced() -> None:
    fused = RunConfig(kernels="loss+norm")
    eager, no_loss, no_norm = "use --attn_implementation eager", "leave loss out", "leave norm out"
    expected = {
        "gemma2-2m": [eager, no_loss, no_norm],
        "gemma3-2m": [no_norm],
        "olmo2-3m": [no_norm],
        "granite-2m": [no_loss],
    }
    for name in TODAY:
        spec = find_model(str(MODELS / name))
        for problem, remedy in zip(kernel_problems(spec, fused), expected.get(name, []), strict=True):
            assert remedy in problem
        assert kernel_problems(spec, with_kernels_of(spec, fused)) == []


@pytest.mark.parametrize("name", ["qwen3-2m", "smollm3-2m"])
def test_fused_kernels_are_put_into_copies_of_llamas_code_and_change_no_loss(name: str) -> None:
    spec, tokens = find_model(str(MODELS / name)), torch.arange(64).view(2, 32)
    losses = {}
    for kernel in ("plain", "norm"):
        config = RunConfig(seq_len=32, numerics="fp32", kernels=kernel)
        model = build_model(spec, config)
        losses[kernel] = model(input_ids=tokens, labels=tokens).loss.item()
    layer = decoder_layers(model)[0]
    assert type(layer.input_layernorm) is FusedRMSNorm
    assert losses["norm"] == pytest.approx(losses["plain"], rel=1e-6)


def test_a_norm_of_another_function_is_not_fused() -> None:
    config = RunConfig(seq_len=32, numerics="fp32", kernels="norm")
    with pytest.raises(ValueError, match="no norm that computes like LlamaRMSNorm"):
        build_model(find_model(str(MODELS / "olmo2-3m")), config)


@pytest.mark.parametrize("name", ["gemma3-2m", "olmo2-3m", "phi3-2m"])
def test_recomputation_changes_no_gradient(name: str) -> None:
    spec, tokens = find_model(str(MODELS / name)), torch.arange(128).view(2, 64)
    gradients = []
    for mode in ("none", "selective_op"):
        model = build_model(spec, RunConfig(seq_len=64, numerics="fp32", gradient_checkpointing=mode))
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)
