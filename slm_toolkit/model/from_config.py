"""Make a ModelSpec from a Hugging Face config.json. GPTs can only be estimated."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slm_toolkit.base.user_files import check_name, json_of, read_text
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import (
    FAMILIES,
    after_head,
    ignored_keys,
    kernel_problems,
    sliding_window,
    unsupported_keys,
)
from slm_toolkit.model.model_spec import ModelSpec

LARGEST_SIZE, MOST_LAYERS = 10**9, 10**5

_KIND = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    str: ("a string", lambda value: isinstance(value, str)),
    int: ("a whole number above 0", lambda value: is_size(value)),
    float: (
        "a number above 0",
        lambda value: isinstance(value, float | int) and value is not True and value > 0,
    ),
}


def check_kinds(config: Mapping[str, Any], path: str, **kinds: type) -> None:
    """Raise ValueError for the first key whose value has the wrong type; absent keys are allowed."""
    for key, kind in kinds.items():
        expected, is_kind = _KIND[kind]
        if config.get(key) is not None and not is_kind(config[key]):
            raise ValueError(f"{path}: {key} is {config[key]!r}\nhint: it must be {expected}")


def check_layers(num_layers: int, path: str) -> None:
    """Raise ValueError for more layers than the estimates can loop over."""
    if num_layers > MOST_LAYERS:
        raise ValueError(f"{path}: {num_layers:,} layers\nhint: at most {MOST_LAYERS:,}")


def is_size(value: object) -> bool:
    """Return whether a value can be a dimension or a count: a whole number from 1 to LARGEST_SIZE."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE


GPT_TYPES = ("gpt2", "gpt_neox", "mpt")


def gpt_spec(config: Mapping[str, Any], *, name: str, path: str) -> ModelSpec:
    """Return the ModelSpec of a GPT: an FFN of two matrices, LayerNorm.

    Raise one ValueError that names all required keys that are missing or invalid.
    """
    model_type = config["model_type"]
    layers, hidden, heads, positions = _KEYS[model_type]
    required = (layers, hidden, heads, "vocab_size")
    bad = [key for key in required if not is_size(config.get(key))]
    if not bad and config[hidden] % config[heads]:
        bad = [hidden, heads]
    if bad:
        raise ValueError(
            f"{path}: {', '.join(bad)} must be positive whole numbers, and heads must divide the width\n"
            f"hint: is it a {model_type} model?"
        )
    kinds = {positions: int, "n_inner": int, "intermediate_size": int, "tie_word_embeddings": bool}
    check_kinds(
        config,
        path,
        **kinds,
        **{"attn_config": dict, "expansion_ratio": float, "no_bias": bool, "attention_bias": bool},
    )
    check_layers(config[layers], path)
    width = config[hidden]
    alibi = (config.get("attn_config") or {}).get("alibi", True)  # transformers' default for MPT
    learned = model_type == "gpt2" or (model_type == "mpt" and not alibi)
    ffn_size = {
        "gpt2": config.get("n_inner") or 4 * width,
        "gpt_neox": config.get("intermediate_size") or 4 * width,
        "mpt": int(min(width * (config.get("expansion_ratio") or 4), 1e18)),
    }[model_type]
    if not is_size(ffn_size):
        raise ValueError(
            f"{path}: expansion_ratio makes the FFN {ffn_size:,} wide\nhint: the usual ratio is 4"
        )
    has_biases = not _value_or(config, "no_bias", model_type == "mpt")
    in_attention = has_biases and (model_type != "gpt_neox" or _value_or(config, "attention_bias", True))
    return ModelSpec(
        name,
        config[layers],
        width,
        config[heads],
        config[heads],
        width // config[heads],
        ffn_size,
        config["vocab_size"],
        tied=_value_or(config, "tie_word_embeddings", model_type != "gpt_neox"),
        model_type=model_type,
        max_position_embeddings=config.get(positions) or 2048,
        source=path,
        path=path,
        gated_ffn=False,
        layer_norm=True,
        qkv_bias=in_attention,
        output_bias=in_attention,
        ffn_bias=has_biases,
        learned_positions=(config.get(positions) or 2048) if learned else 0,
    )


def check_trainable(spec: ModelSpec, config: RunConfig) -> None:
    """Raise ValueError for a model that can only be estimated, or whose kernels would be another model's."""
    if spec.model_type in GPT_TYPES:
        raise ValueError(
            f"model_type {spec.model_type!r} can be estimated, not trained here\n"
            f"hint: these can be trained: {', '.join(FAMILIES)}"
        )
    if problems := kernel_problems(spec, config):
        raise ValueError("\n".join(problems))


_KEYS = {  # layers, hidden size, heads, positions
    "gpt2": ("n_layer", "n_embd", "n_head", "n_positions"),
    "gpt_neox": (*("num_hidden_layers", "hidden_size", "num_attention_heads"), "max_position_embeddings"),
    "mpt": ("n_layers", "d_model", "n_heads", "max_seq_len"),
}


def _value_or(config: Mapping[str, Any], key: str, default: bool) -> bool:
    return default if config.get(key) is None else config[key]


def position_problem(spec: ModelSpec, seq_len: int) -> str | None:
    """Return an error if seq_len is larger than the number of learned positions, else None."""
    if not 0 < spec.learned_positions < seq_len:
        return None
    most = spec.learned_positions
    return f"--seq_len {seq_len}: {spec.name} has {most} learned positions, --seq_len {most} at most"


def spec_from_config_file(path: Path) -> ModelSpec:
    """Return the ModelSpec of a Hugging Face config.json on disk; weights in its folder are ignored."""
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="give a Hugging Face config.json")
    name = os.path.basename(os.path.realpath(path.parent)) if path.name == "config.json" else path.stem
    return spec_from_config(config, name=check_name(name, "a model called"), path=str(path))


_EXPERTS_OR_LATENT = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


def spec_from_config(config: object, name: str, path: str) -> ModelSpec:
    """Return the ModelSpec of a Hugging Face configuration.

    Raise one ValueError that names all required keys that are missing or invalid.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object\nhint: give a Hugging Face config.json")
    model_type = config.get("model_type", "llama")
    if model_type in GPT_TYPES:
        return gpt_spec(config, name=name, path=path)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        parts = "".join(f", {key} {config[key]!r}" for key in _EXPERTS_OR_LATENT if config.get(key))
        raise ValueError(
            f"{path}: model_type {model_type!r}{parts} is not supported\n"
            f"hint: {', '.join(FAMILIES)} can be trained; {', '.join(GPT_TYPES)} can only be estimated"
        )
    family = FAMILIES[model_type]
    required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    bad = [key for key in required if not is_size(config.get(key))]
    if bad:
        raise ValueError(
            f"{path}: {', '.join(bad)} must be positive whole numbers, at most {LARGEST_SIZE:,}\n"
            "hint: is it a language model?"
        )
    check_layers(config["num_hidden_layers"], path)
    _check_honoured(config, model_type, path)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", family.kv_heads) or heads
    head_dim = config.get("head_dim") or family.head_dim or config["hidden_size"] // heads
    if not (is_size(kv_heads) and is_size(head_dim)) or heads % kv_heads:
        raise ValueError(
            f"{path}: {heads} heads can't share {kv_heads} key-value heads\nhint: see num_key_value_heads"
        )
    if config["hidden_size"] % heads and family.heads_divide_width:
        raise ValueError(
            f"{path}: {heads} heads don't divide hidden_size {config['hidden_size']}\n"
            "hint: transformers refuses such a model"
        )
    rope = config.get("rope_parameters")
    check_kinds(
        {**config, "rope_parameters.rope_theta": rope.get("rope_theta") if isinstance(rope, dict) else None},
        path,
        **{"tie_word_embeddings": bool, "rope_parameters": dict, "max_position_embeddings": int},
        **{"rope_theta": float, "rope_parameters.rope_theta": float, family.activation_key: str},
    )
    rope = rope or {}
    window, num_window_layers = sliding_window(config, model_type)
    attention_bias = "attention_bias" in family.bias_keys and bool(config.get("attention_bias"))
    return ModelSpec(
        name,
        config["num_hidden_layers"],
        config["hidden_size"],
        heads,
        kv_heads,
        head_dim,
        config["intermediate_size"],
        config["vocab_size"],
        tied=_value_or(config, "tie_word_embeddings", family.tied),
        qkv_bias=family.has_qkv_bias or attention_bias,
        output_bias=attention_bias,
        ffn_bias="mlp_bias" in family.bias_keys and bool(config.get("mlp_bias")),
        sliding_window=window,
        num_window_layers=num_window_layers,
        hidden_act=config.get(family.activation_key) or family.activation,
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        model_type=model_type,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        source=path,
        path=path,
        norms=family.norms,
        qk_norm=family.qk_norm,
        norm_scales_in_fp32=family.norm_scales_in_fp32,
        fused_projections=family.fused_projections,
        attention_softcap=bool(_softcap(config, model_type)),
        after_head=after_head(config, model_type),
    )


def _softcap(config: Mapping[str, Any], model_type: str) -> float | None:
    default = {"gemma2": 50.0}.get(model_type)
    return config.get("attn_logit_softcapping", default) if model_type.startswith("gemma") else None


def _check_honoured(config: dict[str, Any], model_type: str, path: str) -> None:
    """Raise ValueError for a key that changes the model but that training from this file would ignore."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: quantization_config: weights that are quantized already can't be trained\n"
            "hint: give the unquantized model; --peft qlora quantizes it and trains an adapter"
        )
    kinds = {"attention_bias": bool, "mlp_bias": bool, "use_sliding_window": bool, "sliding_window": int}
    check_kinds(config, path, **kinds)
    layer_types, dropout = config.get("layer_types") or [], config.get("attention_dropout") or 0.0
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ValueError(
            f"{path}: layer_types is {layer_types!r}\nhint: it must be a list with one string per layer"
        )
    if not isinstance(dropout, float | int) or not 0 <= dropout < 1:
        raise ValueError(f"{path}: attention_dropout is {dropout!r}\nhint: it must be at least 0 and below 1")
    if type(config.get("max_window_layers", 0)) is not int:
        raise ValueError(
            f"{path}: max_window_layers is {config['max_window_layers']!r}\nhint: it must be a whole number"
        )
    if unsupported := unsupported_keys(config):
        raise ValueError(f"{path}: {unsupported[0]}\nhint: remove the key, or choose another model")
    ignored = ignored_keys(config, model_type)
    if ignored:
        values = ", ".join(f"{key} {config[key]!r}" for key in ignored)
        raise ValueError(
            f"{path}: {values}: transformers' {model_type} ignores it and would train a different model\n"
            "hint: correct model_type, or remove the key"
        )
