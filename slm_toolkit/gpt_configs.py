"""Config.json of GPT-2, GPT-NeoX (Pythia) and MPT, which estimates know and the trainer does not run."""

from collections.abc import Mapping
from typing import Any

from slm_toolkit.model_checks import check_kinds, check_layers, is_size
from slm_toolkit.models import ModelSpec

GPT_TYPES = ("gpt2", "gpt_neox", "mpt")


def gpt_spec(config: Mapping[str, Any], *, name: str, path: str) -> ModelSpec:
    """Two-matrix FFN, LayerNorm. Raises ValueError with all keys that are missing or make no sense."""
    model_type = config["model_type"]
    layers, hidden, heads, positions = _KEYS[model_type]
    required = (layers, hidden, heads, "vocab_size")
    bad = [key for key in required if not is_size(config.get(key))]
    if not bad and config[hidden] % config[heads]:
        bad = [hidden, heads]
    if bad:
        raise ValueError(
            f"{path}: {', '.join(bad)} must be positive whole numbers that go together\n"
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
        raise ValueError(f"{path}: expansion_ratio makes an FFN {ffn_size:,} wide\nhint: usual is 4")
    has_biases = not _told(config, "no_bias", model_type == "mpt")
    in_attention = has_biases and (model_type != "gpt_neox" or _told(config, "attention_bias", True))
    return ModelSpec(
        name,
        config[layers],
        width,
        config[heads],
        config[heads],
        width // config[heads],
        ffn_size,
        config["vocab_size"],
        tied=_told(config, "tie_word_embeddings", model_type != "gpt_neox"),
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


def check_trainable(spec: ModelSpec) -> None:
    """Raises ValueError for a model that only estimates know."""
    if spec.model_type in GPT_TYPES:
        raise ValueError(
            f"model_type {spec.model_type!r} can be estimated, not trained here\n"
            "hint: Llama-like models are: llama, qwen2, mistral"
        )


_KEYS = {  # layers, hidden size, heads, positions
    "gpt2": ("n_layer", "n_embd", "n_head", "n_positions"),
    "gpt_neox": (*("num_hidden_layers", "hidden_size", "num_attention_heads"), "max_position_embeddings"),
    "mpt": ("n_layers", "d_model", "n_heads", "max_seq_len"),
}


def _told(config: Mapping[str, Any], key: str, default: bool) -> bool:
    return default if config.get(key) is None else config[key]


def position_problem(spec: ModelSpec, seq_len: int) -> str | None:
    """Why a model with learned positions can't have sequences of this length; None where it can."""
    if not 0 < spec.learned_positions < seq_len:
        return None
    most = spec.learned_positions
    return f"--seq_len {seq_len}: {spec.name} has {most} learned positions, --seq_len {most} at most"
