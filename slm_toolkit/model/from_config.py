"""Make a ModelSpec from a Hugging Face config.json."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slm_toolkit.base.typed_files import Positive, converted
from slm_toolkit.base.user_files import check_name, json_of, read_text
from slm_toolkit.model.families import FAMILIES, Family
from slm_toolkit.model.model_spec import ModelSpec

# estimates loop over layers
MOST_LAYERS = 10**5
_Size = Annotated[int, Meta(ge=1, le=10**9)]
_HINT = "is it the config.json of a language model?"


class _Rope(msgspec.Struct):
    rope_theta: Positive | None = None


class _HfConfig(msgspec.Struct):
    """The keys of a config.json that decide the shape, or that no estimate and no training here obeys."""

    num_hidden_layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    hidden_size: _Size
    num_attention_heads: _Size
    intermediate_size: _Size
    vocab_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: _Size | None = None
    rope_parameters: _Rope | None = None
    rope_theta: Positive | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    attention_dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None
    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    max_window_layers: int = 28
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: _Size = 4
    sliding_window_pattern: _Size = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    quantization_config: Any = None
    use_bidirectional_attention: Any = None
    resid_pdrop: Any = None


def spec_from_config_file(path: Path) -> ModelSpec:
    """Return the ModelSpec of a Hugging Face config.json on disk; weights in its folder are ignored."""
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="give a Hugging Face config.json")
    name = os.path.basename(os.path.realpath(path.parent)) if path.name == "config.json" else path.stem
    return spec_from_config(config, name=check_name(name, "a model called"), path=str(path))


def spec_from_config(config: object, name: str, path: str) -> ModelSpec:
    """Return the ModelSpec of a Hugging Face configuration. Raises ValueError if it can't be trained."""
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object\nhint: give a Hugging Face config.json")
    model_type = config.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported\nhint: there are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    try:
        hf = converted({**family.defaults, **config}, _HfConfig)
    except ValueError as error:
        raise ValueError(f"{path}: {error}\nhint: {_HINT}") from None
    _check_honoured(hf, model_type, path)
    heads = hf.num_attention_heads
    kv_heads, head_dim = hf.num_key_value_heads or heads, hf.head_dim or hf.hidden_size // heads
    if heads % kv_heads or not head_dim or (hf.hidden_size % heads and family.heads_divide_width):
        raise ValueError(
            f"{path}: {heads} heads, {kv_heads} key-value heads, hidden_size {hf.hidden_size} don't divide\n"
            "hint: transformers refuses such a model"
        )
    window, num_window_layers = _sliding_window(hf, family, model_type)
    rope = hf.rope_parameters or _Rope()
    attention_bias = "attention_bias" in family.bias_keys and bool(hf.attention_bias)
    return ModelSpec(
        name,
        hf.num_hidden_layers,
        hf.hidden_size,
        heads,
        kv_heads,
        head_dim,
        hf.intermediate_size,
        hf.vocab_size,
        tied=family.tied if hf.tie_word_embeddings is None else hf.tie_word_embeddings,
        qkv_bias=family.has_qkv_bias or attention_bias,
        output_bias=attention_bias,
        ffn_bias="mlp_bias" in family.bias_keys and bool(hf.mlp_bias),
        sliding_window=window,
        num_window_layers=num_window_layers,
        hidden_act=getattr(hf, family.activation_key) or family.activation,
        attention_dropout=hf.attention_dropout or 0.0,
        model_type=model_type,
        max_position_embeddings=hf.max_position_embeddings or 2048,
        rope_theta=rope.rope_theta or hf.rope_theta or 10_000.0,
        path=path,
        norms=family.norms,
        qk_norm=family.qk_norm,
        norm_scales_in_fp32=family.norm_scales_in_fp32,
        fused_projections=family.fused_projections,
        attention_softcap=family.is_gemma and bool(hf.attn_logit_softcapping),
        after_head=_after_head(hf, family, model_type),
    )


def _after_head(hf: _HfConfig, family: Family, model_type: str) -> str:
    """Return what the model does with the head's logits, as in ModelSpec."""
    if model_type == "granite":
        return "scaling"
    return "softcap" if family.is_gemma and hf.final_logit_softcapping is not None else "nothing"


def _sliding_window(hf: _HfConfig, family: Family, model_type: str) -> tuple[int | None, int]:
    """Return the window that transformers' class of this model_type sets, and the number of its layers."""
    num_layers, window = hf.num_hidden_layers, hf.sliding_window
    is_off = family.window_switch is not None and not getattr(hf, family.window_switch)
    if family.windows == "none" or is_off or window is None:
        return None, 0
    if hf.layer_types is not None:
        num_windows = hf.layer_types.count("sliding_attention")
    elif family.windows == "all":
        num_windows = num_layers
    elif model_type == "smollm3":  # the layers without RoPE
        has_rope = hf.no_rope_layers or [(i + 1) % hf.no_rope_layer_interval for i in range(num_layers)]
        num_windows = sum(not rope for rope in has_rope)
    elif family.is_gemma:  # all but every second or sixth layer
        pattern = 2 if model_type == "gemma2" else hf.sliding_window_pattern
        num_windows = num_layers - num_layers // pattern
    else:  # Qwen: the layers from max_window_layers on
        num_windows = max(0, num_layers - hf.max_window_layers)
    return (window, num_windows) if num_windows else (None, 0)


def _check_honoured(hf: _HfConfig, model_type: str, path: str) -> None:
    """Raise ValueError for a key that changes the model but that training from this file would ignore."""
    if hf.quantization_config is not None:
        raise ValueError(
            f"{path}: quantization_config: weights that are quantized already can't be trained\n"
            "hint: give the unquantized model; --peft qlora quantizes it and trains an adapter"
        )
    family = FAMILIES[model_type]
    known = {"full_attention", "sliding_attention"} if family.windows == "layer_types" else {"full_attention"}
    built = {"attention_bias": family.has_qkv_bias, "mlp_bias": False}
    unlike = [
        key
        for key, value in built.items()
        if key not in family.bias_keys and getattr(hf, key) not in (None, value)
    ]
    unlike += [key for key in ("num_experts", "num_local_experts") if getattr(hf, key) not in (None, 0, 1)]
    unlike += [key for key in ("use_bidirectional_attention", "resid_pdrop") if getattr(hf, key)]
    if family.windows == "none" and hf.sliding_window is not None:
        unlike.append("sliding_window")
    if set(hf.layer_types or ()) - known:
        unlike.append("layer_types")
    if unlike:
        values = ", ".join(f"{key} {getattr(hf, key)!r}" for key in unlike)
        raise ValueError(
            f"{path}: {values}: a {model_type} with this is not trained here\n"
            "hint: correct model_type, remove the key, or choose another model"
        )
