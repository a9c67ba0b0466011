"""ModelSpec: the shape of a Llama-like model and what follows from it, without torch.

The paper is Ashkboos et al., "Computational Bottlenecks of Training Small-scale Large Language Models"
(PMLR v262, arXiv 2410.19456); its appendix B gives the family and the fit behind it.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.user_files import check_name, is_dir, is_file, json_of, read_text, typed_path


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only model; what is trained here is Llama-like: RMSNorm, gated feed-forward, RoPE.

    The last four fields hold others' models (GPT-2, MPT), for estimates beside their published runs.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool = False
    "the input embedding and the output head share one matrix"
    qkv_bias: bool = False
    "query, key and value projections carry a bias (Qwen2)"
    model_type: str = "llama"
    "transformers' name of the architecture"
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    source: str = ""
    "where the shape comes from"
    path: str | None = None
    "a local folder or hub id (weights are loaded if there are any), or a config.json; used whole"
    gated_ffn: bool = True
    "three matrices, silu(gate) * up; False: two, with a GELU between"
    layer_norm: bool = False
    "LayerNorm with weight and bias in place of RMSNorm"
    linear_biases: bool = False
    "every projection of a layer carries a bias"
    learned_positions: int = 0
    "rows of a learned position embedding; 0: RoPE, ALiBi or none"

    @property
    def matmul_params_per_layer(self) -> int:
        """Weights of one layer that take part in a matrix product."""
        query_and_output = 2 * self.hidden_size * self.num_heads * self.head_dim
        key_and_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return query_and_output + key_and_value + self.num_ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def num_ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def params_per_layer(self) -> int:
        biases = 0
        if self.qkv_bias or self.linear_biases:
            biases += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.linear_biases:  # output and down, then up (and gate)
            biases += 2 * self.hidden_size + (self.num_ffn_matrices - 1) * self.ffn_size
        return self.matmul_params_per_layer + biases + 2 * self.norm_params

    @property
    def norm_params(self) -> int:
        return 2 * self.hidden_size if self.layer_norm else self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied matrix counted once."""
        vocabulary = (1 if self.tied else 2) * self.embedding_params
        positions = self.learned_positions * self.hidden_size
        return vocabulary + positions + self.num_layers * self.params_per_layer + self.norm_params

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest single module, as DeepSpeed's ZeRO-3 estimator means it."""
        projection = self.hidden_size * max(self.ffn_size, self.num_heads * self.head_dim)
        return max(self.embedding_params, projection)


def _paper(name: str, num_layers: int, hidden_size: int, ffn_size: int, source: str) -> ModelSpec:
    """A member of the paper's family: 32000 words, untied, full attention with heads of 64."""
    heads = hidden_size // 64
    return ModelSpec(name, num_layers, hidden_size, heads, heads, 64, ffn_size, 32_000, source=source)


def _byte_level(name: str, num_layers: int, hidden_size: int, ffn_size: int) -> ModelSpec:
    """A model for CPU work over ByT5's 384 byte-level tokens."""
    heads = hidden_size // 64
    return ModelSpec(name, num_layers, hidden_size, heads, heads, 64, ffn_size, 384, source="this project")


_PAPER = "paper, appendix B, table 2; heads and FFN recovered from its printed parameter counts"
_HW = "the paper's size with widths in multiples of 128"
_LITGPT = "litgpt config.py @26857050fe"

PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _paper("slm-100m", 9, 832, 2332, _PAPER),  # the paper prints 864; its 130,569,920 parameters say 832
        _paper("slm-500m", 15, 1536, 4147, _PAPER),
        _paper("slm-1b", 19, 1920, 5184, _PAPER),
        _paper("slm-2b", 24, 2496, 6739, _PAPER),
        _paper("slm-100m-hw", 9, 896, 2432, _HW),
        _paper("slm-500m-hw", 15, 1536, 4096, _HW),
        _paper("slm-1b-hw", 19, 1920, 5120, _HW),
        _paper("slm-2b-hw", 24, 2560, 6912, _HW),
        _byte_level("slm-1m", 4, 128, 384),  # 951,424 parameters
        _byte_level("slm-3m", 4, 256, 640),  # 3,213,568
        _byte_level("slm-10m", 8, 320, 864),  # 10,163,520
        _byte_level("slm-30m", 10, 512, 1344),  # 31,533,568
        ModelSpec(
            *("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            source=_LITGPT,
        ),
        ModelSpec(
            *("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            source=_LITGPT,
        ),
        ModelSpec(
            *("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=130_000.0,
            source=_LITGPT,
        ),
        ModelSpec("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32_000, source=_LITGPT),
        ModelSpec(
            *("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, True),
            max_position_embeddings=131_072,
            rope_theta=500_000.0,
            source=_LITGPT,
        ),
        ModelSpec(
            *("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151_936, True, True, "qwen2"),
            max_position_embeddings=32_768,
            rope_theta=1_000_000.0,
            source=_LITGPT,
        ),
        ModelSpec(
            *("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, True, True, "qwen2"),
            max_position_embeddings=32_768,
            rope_theta=1_000_000.0,
            source=_LITGPT,
        ),
    )
}

_LARGEST_SIZE, _MOST_LAYERS = 10**9, 10**5
SMALLEST_FIT_BILLIONS, LARGEST_FIT_BILLIONS = 0.05, 100.0


def spec_from_size(billions: float, name: str) -> ModelSpec:
    """A model of the paper's family for any nominal size, by the fit of its appendix B (figure 5).

    hidden = 1951.37 x^0.353 and layers = 18.93 x^0.318, x in billions. Layers are rounded; the width is the
    nearest multiple of 96, its FFN int(2.7 x width); the heads are 64 wide, what does not fill one is cut.
    As in the paper, the two vocabulary matrices come on top of the nominal size of a small model.
    """
    if not SMALLEST_FIT_BILLIONS <= billions <= LARGEST_FIT_BILLIONS:
        raise ValueError(
            f"model {name!r}: the paper's fit serves "
            f"{SMALLEST_FIT_BILLIONS:g}b to {LARGEST_FIT_BILLIONS:g}b\n"
            f"hint: smaller ones are {', '.join(small_models())}"
        )
    width = 96 * round(1951.37 * billions**0.353 / 96)
    num_layers = round(18.93 * billions**0.318)
    return _paper(name, num_layers, 64 * (width // 64), int(2.7 * width), "paper, appendix B, figure 5's fit")


def small_models() -> list[str]:
    """Names of the byte-level models that a CPU trains in seconds."""
    return [spec.name for spec in PRESETS.values() if spec.vocab_size == 384]


def find_model(name: str) -> ModelSpec:
    """The model a user means: a preset, `slm-<size>`, a local folder or config.json, or a hub id.

    A hub id's shape is asked of the hub (`load_hub_config` in transformers), all else needs no network.
    Raises ValueError with a hint where nothing of the kind exists.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if size := re.fullmatch(r"slm-(\d+(?:\.\d+)?)([mb])", name.lower()):
        return spec_from_size(float(size[1]) / (1000 if size[2] == "m" else 1), name.lower())
    path = typed_path(name)
    if is_dir(path):
        return dataclasses.replace(spec_from_config_file(path / "config.json"), path=str(path))
    if path.suffix == ".json" or is_file(path):
        return spec_from_config_file(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "/")):
        return _spec_from_hub(name)
    raise ValueError(
        f"unknown model {name!r}\nhint: one of {', '.join(PRESETS)}; any size as slm-700m; "
        "a folder or config.json; a hub id such as HuggingFaceTB/SmolLM2-135M"
    )


def spec_from_config_file(path: Path) -> ModelSpec:
    """ModelSpec of a Hugging Face config.json on disk; weights beside it don't count."""
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="give a Hugging Face config.json")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return _spec_from_config(config, name=check_name(name, "a model called"), path=str(path))


def _spec_from_hub(hub_id: str) -> ModelSpec:
    from transformers import AutoConfig  # 3 s: only where a hub id asks for it

    try:
        config = AutoConfig.from_pretrained(hub_id, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"can't get model {hub_id!r} from the hub: {str(error).splitlines()[0]}\n"
            f"hint: check the name and the network, or use a preset: {', '.join(PRESETS)}"
        ) from None
    return _spec_from_config(config.to_dict(), name=hub_id.split("/")[-1].lower(), path=hub_id)


def _spec_from_config(config: object, name: str, path: str) -> ModelSpec:
    """ModelSpec from a Hugging Face configuration's keys; all that is missing is reported at once."""
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object\nhint: give a Hugging Face config.json")
    model_type = config.get("model_type", "llama")
    if model_type in ("gpt2", "gpt_neox", "mpt"):
        from slm_toolkit.gpt_configs import gpt_spec

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
            f"{path}: {', '.join(bad)} must be positive whole numbers, at most {_LARGEST_SIZE:,}\n"
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


_KIND = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    int: ("a whole number above 0", lambda value: is_size(value)),
    float: (
        "a number above 0",
        lambda value: isinstance(value, float | int) and value is not True and value > 0,
    ),
}


def check_kinds(config: Mapping[str, Any], path: str, **kinds: type) -> None:
    """Raises ValueError with the first key that is there and is not of its kind."""
    for key, kind in kinds.items():
        said, is_kind = _KIND[kind]
        if config.get(key) is not None and not is_kind(config[key]):
            raise ValueError(f"{path}: {key} is {config[key]!r}\nhint: it is {said}")


def check_layers(num_layers: int, path: str) -> None:
    """Raises ValueError for more than can be counted one by one."""
    if num_layers > _MOST_LAYERS:
        raise ValueError(f"{path}: {num_layers:,} layers\nhint: at most {_MOST_LAYERS:,}")


def is_size(value: object) -> bool:
    """Whether it may be a dimension of a model, or how many there are of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_SIZE
