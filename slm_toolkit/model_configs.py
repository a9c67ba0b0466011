"""Hugging Face's config.json of a model, read and checked."""

from pathlib import Path

from slm_toolkit.gpt_configs import GPT_TYPES, gpt_spec
from slm_toolkit.model_checks import LARGEST_SIZE, check_kinds, check_layers, is_size
from slm_toolkit.models import ModelSpec
from slm_toolkit.user_files import check_name, json_of, read_text


def spec_from_config_file(path: Path) -> ModelSpec:
    """ModelSpec of a Hugging Face config.json on disk; weights beside it don't count."""
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="give a Hugging Face config.json")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
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
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
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
        **{"rope_theta": float, "rope_parameters.rope_theta": float},
    )
    rope = rope or {}
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
        qkv_bias=model_type == "qwen2",
        model_type=model_type,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        source=path,
        path=path,
    )
