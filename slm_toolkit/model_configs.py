"""Hugging Face's config.json of a model, read and checked."""

import os
from pathlib import Path
from typing import Any

from slm_toolkit.gpt_configs import GPT_TYPES, gpt_spec
from slm_toolkit.model_checks import LARGEST_SIZE, check_kinds, check_layers, is_size
from slm_toolkit.models import ModelSpec
from slm_toolkit.user_files import check_name, json_of, read_text


def spec_from_config_file(path: Path) -> ModelSpec:
    """ModelSpec of a Hugging Face config.json on disk; weights beside it don't count."""
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="give a Hugging Face config.json")
    name = os.path.basename(os.path.realpath(path.parent)) if path.name == "config.json" else path.stem
    return spec_from_config(config, name=check_name(name, "a model called"), path=str(path))


def spec_from_config(config: object, name: str, path: str) -> ModelSpec:
    """ModelSpec from a Hugging Face configuration's keys; all that is missing is reported at once."""
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object\nhint: give a Hugging Face config.json")
    model_type = config.get("model_type", "llama")
    if model_type in GPT_TYPES:
        return gpt_spec(config, name=name, path=path)
    if model_type not in ("llama", "qwen2", "mistral"):
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported\n"
            "hint: Llama-like models are: llama, qwen2, mistral; gpt2, gpt_neox and mpt can be estimated"
        )
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
    kv_heads = config.get("num_key_value_heads", _KV_HEADS.get(model_type)) or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if not (is_size(kv_heads) and is_size(head_dim)) or heads % kv_heads:
        raise ValueError(
            f"{path}: {heads} heads can't share {kv_heads} key-value heads\nhint: see num_key_value_heads"
        )
    if config["hidden_size"] % heads:
        raise ValueError(
            f"{path}: {heads} heads don't divide hidden_size {config['hidden_size']}\n"
            "hint: transformers refuses such a model"
        )
    rope = config.get("rope_parameters")
    check_kinds(
        {**config, "rope_parameters.rope_theta": rope.get("rope_theta") if isinstance(rope, dict) else None},
        path,
        **{"tie_word_embeddings": bool, "rope_parameters": dict, "max_position_embeddings": int},
        **{"rope_theta": float, "rope_parameters.rope_theta": float, "hidden_act": str},
    )
    rope = rope or {}
    attention_bias = model_type == "llama" and bool(config.get("attention_bias"))
    return ModelSpec(
        name,
        config["num_hidden_layers"],
        config["hidden_size"],
        heads,
        kv_heads,
        head_dim,
        config["intermediate_size"],
        config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        ffn_bias=model_type == "llama" and bool(config.get("mlp_bias")),
        sliding_window=_sliding_window(config, model_type),
        hidden_act=config.get("hidden_act") or "silu",
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        model_type=model_type,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        source=path,
        path=path,
    )


_KV_HEADS = {"mistral": 8, "qwen2": 32}
"where the key is absent: transformers 5.23, MistralConfig and Qwen2Config"
_WINDOW = 4096
"where the key is absent: the same classes"


def _check_honoured(config: dict[str, Any], model_type: str, path: str) -> None:
    """Raises ValueError for a key that means something and that training from this file would ignore."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: quantization_config: weights that are quantized already can't be trained here\n"
            "hint: give the unquantized model; --peft qlora quantizes it and trains an adapter"
        )
    kinds = {"attention_bias": bool, "mlp_bias": bool, "use_sliding_window": bool, "sliding_window": int}
    check_kinds(config, path, **kinds)
    layer_types, dropout = config.get("layer_types") or [], config.get("attention_dropout") or 0.0
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ValueError(f"{path}: layer_types is {layer_types!r}\nhint: a list, of each layer's kind")
    if not isinstance(dropout, float | int) or not 0 <= dropout < 1:
        raise ValueError(f"{path}: attention_dropout is {dropout!r}\nhint: 0 to below 1")
    if type(config.get("max_window_layers", 0)) is not int:
        raise ValueError(
            f"{path}: max_window_layers is {config['max_window_layers']!r}\nhint: a whole number"
        )
    builds = {"llama": {}, "qwen2": {"attention_bias": True, "mlp_bias": False}}
    builds["mistral"] = {"attention_bias": False, "mlp_bias": False}
    ignored = [
        key for key, built in builds[model_type].items() if config.get(key, built) not in (None, built)
    ]
    ignored += [key for key in ("num_experts", "num_local_experts") if config.get(key) not in (None, 0, 1)]
    if model_type == "llama" and config.get("sliding_window") is not None:
        ignored.append("sliding_window")
    if set(layer_types) - {"full_attention", "sliding_attention" if model_type == "qwen2" else ""}:
        ignored.append("layer_types")
    if ignored:
        told = ", ".join(f"{key} {config[key]!r}" for key in ignored)
        raise ValueError(
            f"{path}: {told}: transformers' {model_type} ignores it, and would train another model\n"
            "hint: is model_type right? else remove the key"
        )


def _sliding_window(config: dict[str, Any], model_type: str) -> int | None:
    """As MistralConfig and Qwen2Config of transformers 5.23 make it."""
    window = config.get("sliding_window", _WINDOW)
    if model_type == "llama" or (model_type == "qwen2" and not config.get("use_sliding_window")):
        return None
    kinds = config.get("layer_types")
    if model_type == "qwen2" and kinds is None:
        return window if config.get("max_window_layers", 28) < config["num_hidden_layers"] else None
    return None if kinds is not None and "sliding_attention" not in kinds else window
