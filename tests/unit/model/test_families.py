"""The families of models: counted as transformers builds them, and refused where that is unknown."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, slm_here
from transformers import AutoConfig, AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.fsdp_faults import _DECODER_LAYERS
from slm_toolkit.model.families import FAMILIES, TRAINABLE, kernel_problems, with_kernels_of
from slm_toolkit.model.from_config import check_trainable, spec_from_config
from slm_toolkit.model.model_spec import ModelSpec, flops_per_token, layer_tensors
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
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
MIXTURES = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 24, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 8},
    "granitemoe": {"num_local_experts": 8, "num_key_value_heads": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
}


def spec_of(model_type: str, **keys: object) -> ModelSpec:
    config = {**SMALL, "num_experts_per_tok": 2, "model_type": model_type, **keys}
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


_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
_SHAPE += ("intermediate_size", "vocab_size")
_QWEN3 = {"head_dim": 128, "tie_word_embeddings": True}
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8}
_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_LITE = {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
_LITE |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512}
_LITE |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


PUBLISHED_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "Qwen3-0.6B": ("qwen3", (28, 1024, 16, 8, 3072, 151_936), _QWEN3),
    "gemma-2-2b": ("gemma2", (26, 2304, 8, 4, 9216, 256_000), {}),
    "gemma-3-1b": ("gemma3_text", (26, 1152, 4, 1, 6912, 262_144), {}),
    "SmolLM3-3B": ("smollm3", (36, 2048, 16, 4, 11_008, 128_256), {}),
    "OLMo-2-0425-1B": ("olmo2", (16, 2048, 16, 16, 8192, 100_352), {}),
    "Phi-4-mini": ("phi3", (32, 3072, 24, 8, 8192, 200_064), {"tie_word_embeddings": True}),
    "granite-3.1-2b": ("granite", (40, 2048, 32, 8, 8192, 49_159), {"tie_word_embeddings": True}),
    "Qwen3-30B-A3B": ("qwen3_moe", (48, 2048, 32, 4, 6144, 151_936), _QWEN3_MOE),
    "OLMoE-1B-7B": ("olmoe", (16, 2048, 16, 16, 1024, 50_304), _OLMOE),
    "DeepSeek-V2-Lite": ("deepseek_v2", (27, 2048, 16, 16, 10_944, 102_400), _LITE),
}


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_models_of_published_sizes_have_the_parameters_that_transformers_builds(name: str) -> None:
    model_type, shape, keys = PUBLISHED_SHAPES[name]
    config = {**SMALL, **dict(zip(_SHAPE, shape, strict=True)), **keys, "model_type": model_type}
    spec = spec_from_config({"num_experts_per_tok": 2, **config}, name=name, path=name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert spec.num_params == sum(param.numel() for param in model.parameters())
    if spec.experts is not None:  # all experts of a layer are one tensor, its first dimension their number
        stacked = [param for name, param in model.named_parameters() if ".experts." in name]
        idle = 1 - spec.experts.num_per_token / spec.experts.num_experts
        assert stacked
        assert spec.num_params - spec.active_params == sum(param.numel() for param in stacked) * idle


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [  # rounded by their authors; read on 2026-11-25
        ("Qwen3-30B-A3B", 30.5, 3.3),  # https://apxml.com/models/qwen3-30b-a3b, which restates the model card
        ("OLMoE-1B-7B", 6.9, 1.3),  # https://labindex.ai/outputs/ai2/olmoe, of arXiv 2409.02060
        (
            "DeepSeek-V2-Lite",
            15.7,
            2.4,
        ),  # https://promptlayer.com/models/deepseek-v2-lite-fa0e, arXiv 2405.04434
    ],
)
def test_mixtures_have_their_published_active_parameters(
    name: str, billions: float, active_billions: float
) -> None:
    model_type, shape, keys = PUBLISHED_SHAPES[name]
    spec = spec_of(model_type, **dict(zip(_SHAPE, shape, strict=True)), **keys)
    assert spec.num_params == pytest.approx(billions * 1e9, abs=0.05e9)
    # a token reads one row of the embedding; DeepSeek's number only agrees without the other rows
    embedding = spec.embedding_params if name == "DeepSeek-V2-Lite" else 0
    assert spec.active_params - embedding == pytest.approx(active_billions * 1e9, abs=0.06e9)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_of_absent_keys_are_those_of_transformers_configurations(model_type: str) -> None:
    family, default = FAMILIES[model_type], type(AutoConfig.for_model(model_type))()
    assert family.tied == default.tie_word_embeddings
    assert family.activation == getattr(default, family.activation_key)
    if family.kv_heads is not None:
        assert family.kv_heads == default.num_key_value_heads
    if family.head_dim is not None:
        assert family.head_dim == default.head_dim
    if family.windows != "none":
        switch = {family.window_switch: True} if family.window_switch else {}
        assert family.window == AutoConfig.for_model(model_type, **switch).sliding_window
    if model_type == "gemma2":
        assert (default.attn_logit_softcapping, default.final_logit_softcapping) == (50.0, 30.0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_doctor_names_the_layer_that_transformers_wraps(model_type: str) -> None:
    config = AutoConfig.for_model(**{**SMALL, **MIXTURES.get(model_type, {}), "model_type": model_type})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(decoder_layers(model)[0]).__name__ == _DECODER_LAYERS[model_type]


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_and_latent_attention_are_counted_as_transformers_builds_them(model_type: str) -> None:
    keys = MIXTURES[model_type]
    spec = spec_of(model_type, **keys)
    config = {**SMALL, "num_experts_per_tok": 2, "model_type": model_type, **keys}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert spec.num_params == sum(param.numel() for param in model.parameters())
    with pytest.raises(ValueError, match="can be estimated, not trained here"):
        check_trainable(spec, RunConfig())


def test_a_tokens_flops_count_the_experts_that_it_passes() -> None:
    spec = spec_of("olmoe", num_experts=8)
    # a layer: attention 4 x 64 x 64 = 16,384; router 64 x 8 = 512; 2 of 8 experts of 3 x 64 x 96 = 18,432
    # the head 300 x 64 = 19,200; attention 12 x 4 layers x 64 x 128 tokens
    matmul = 4 * (16_384 + 512 + 2 * 18_432) + 19_200
    assert flops_per_token(spec, seq_len=128) == 6 * matmul + 12 * 4 * 64 * 128
    assert spec.num_params - spec.active_params == 4 * 6 * 18_432  # the six idle experts of each layer
    # the first of four layers has an ordinary FFN: 3 x 64 x 96; the others a shared expert 24 wide
    latent = spec_of("deepseek_v3", **MIXTURES["deepseek_v3"])
    assert latent.num_params - latent.active_params == 3 * 6 * 3 * 64 * 24


@pytest.mark.parametrize(
    ("model_type", "keys", "says"),
    [
        ("qwen3_moe", {**MIXTURES["qwen3_moe"], "mlp_only_layers": [0]}, "mlp_only_layers .*unknown here"),
        ("qwen3_moe", {**MIXTURES["qwen3_moe"], "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("olmoe", {}, "num_experts is None"),
        ("olmoe", {"num_experts": 1}, "num_experts_per_tok 2: there are 1 experts"),
        ("deepseek_v3", {**MIXTURES["deepseek_v3"], "v_head_dim": None}, "v_head_dim is None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attend to later tokens"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("phi3", {"attention_bias": True}, "transformers' phi3 ignores it"),
        ("olmo2", {"sliding_window": 64}, "transformers' olmo2 ignores it"),
        ("llama4", {}, "model_type 'llama4' is not supported"),
    ],
)
def test_a_model_that_is_not_known_is_refused(model_type: str, keys: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec_of(model_type, **keys)


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("gemma2", {"sliding_window": 16}, (16, 2)),  # every second of 4 layers
        ("gemma3_text", {"num_hidden_layers": 13}, (4096, 11)),  # all but the sixth and the twelfth
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}, (None, 0)),
        ("smollm3", {"sliding_window": 16}, (None, 0)),
        ("smollm3", {"sliding_window": 16, "use_sliding_window": True}, (16, 1)),  # the fourth has no RoPE
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, **QWEN}, (16, 3)),
        ("phi3", {"sliding_window": 16}, (16, 4)),
        ("phi3", {}, (None, 0)),
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
    fused = RunConfig(loss_kernel="fused_linear", norm_kernel="fused")
    expected = {
        "gemma2-2m": {"attn_implementation", "loss_kernel", "norm_kernel"},
        "gemma3-2m": {"norm_kernel"},
        "olmo2-3m": {"norm_kernel"},
        "granite-2m": {"loss_kernel"},
    }
    for name in TODAY:
        spec = find_model(str(MODELS / name))
        problems = kernel_problems(spec, fused)
        assert {problem.split(" ")[0].removeprefix("--") for problem in problems} == expected.get(name, set())
        assert kernel_problems(spec, with_kernels_of(spec, fused)) == []


@pytest.mark.parametrize("name", ["qwen3-2m", "smollm3-2m"])
def test_fused_kernels_are_put_into_copies_of_llamas_code_and_change_no_loss(name: str) -> None:
    spec, tokens = find_model(str(MODELS / name)), torch.arange(64).view(2, 32)
    losses = {}
    for kernel in ("hf", "fused"):
        config = RunConfig(seq_len=32, numerics="fp32", norm_kernel=kernel)
        model = build_model(spec, config)
        losses[kernel] = model(input_ids=tokens, labels=tokens).loss.item()
    layer = decoder_layers(model)[0]
    assert type(layer.input_layernorm) is FusedRMSNorm
    if name == "qwen3-2m":
        assert type(layer.self_attn.q_norm) is FusedRMSNorm
    assert losses["fused"] == pytest.approx(losses["hf"], rel=1e-6)


def test_a_norm_of_another_function_is_not_fused() -> None:
    config = RunConfig(seq_len=32, numerics="fp32", norm_kernel="fused")
    with pytest.raises(ValueError, match="no norm that computes like LlamaRMSNorm"):
        build_model(find_model(str(MODELS / "olmo2-3m")), config)


def test_every_family_has_a_traced_model_or_can_only_be_estimated() -> None:
    traced = {find_model(str(MODELS / name)).model_type for name in TODAY} | {"qwen2", "mistral"}
    assert set(TRAINABLE) == traced
    assert set(FAMILIES) - set(TRAINABLE) == set(MIXTURES)


def test_an_estimate_names_a_mixtures_active_parameters(tmp_path: Path) -> None:
    config = {**SMALL, "num_experts_per_tok": 2, "model_type": "olmoe", "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = slm_here("estimate", "--model", str(tmp_path), "--strategy", "ddp", cwd=tmp_path)
    spec = spec_of("olmoe", num_experts=8)
    assert f"{spec.active_params:,} of {spec.num_params:,} parameters (2 of 8 experts)" in " ".join(
        (done.out + done.err).split()
    )


@pytest.mark.parametrize("name", ["gemma3-2m", "olmo2-3m", "phi3-2m"])
def test_recomputation_changes_no_gradient(name: str) -> None:
    spec, tokens = find_model(str(MODELS / name)), torch.arange(128).view(2, 64)
    gradients = []
    for mode in ("none", "selective_op"):
        model = build_model(spec, RunConfig(seq_len=64, numerics="fp32", gradient_checkpointing=mode))
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)
