"""What transformers builds for each model_type: norms, biases, windows, and the defaults of absent keys.

Read from the configuration and modeling files of transformers 5.23.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec, padded_spec


@dataclass(frozen=True)
class Family:
    """The models of one model_type."""

    norms: str = "before"
    "as in ModelSpec"
    qk_norm: str = "none"
    "as in ModelSpec"
    norm_scales_in_fp32: bool = False
    fused_projections: bool = False
    has_qkv_bias: bool = False
    "query, key and value always carry a bias"
    bias_keys: tuple[str, ...] = ()
    "the keys that add biases; another model_type ignores them"
    windows: str = "none"
    "which layers have a sliding window: none, all, or those of layer_types"
    window: int | None = None
    "sliding_window if the key is absent"
    window_switch: str | None = None
    "a key that must be true for windows"
    tied: bool = False
    kv_heads: int | None = None
    "num_key_value_heads if the key is absent; None: as many as heads"
    head_dim: int | None = None
    "None: hidden_size / heads"
    heads_divide_width: bool = True
    "transformers refuses a hidden_size that is no multiple of the heads"
    activation_key: str = "hidden_act"
    activation: str = "silu"


_BIASES = ("attention_bias", "mlp_bias")
_GEMMA = Family(
    norms="both",
    norm_scales_in_fp32=True,
    bias_keys=("attention_bias",),
    windows="layer_types",
    window=4096,
    tied=True,
    kv_heads=4,
    head_dim=256,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
)
FAMILIES: dict[str, Family] = {
    "llama": Family(bias_keys=_BIASES),
    "qwen2": Family(
        has_qkv_bias=True,
        windows="layer_types",
        window=4096,
        window_switch="use_sliding_window",
        kv_heads=32,
    ),
    "mistral": Family(windows="all", window=4096, kv_heads=8),
    "qwen3": Family(
        qk_norm="head",
        bias_keys=("attention_bias",),
        windows="layer_types",
        window=4096,
        window_switch="use_sliding_window",
        kv_heads=32,
        head_dim=128,
        heads_divide_width=False,
    ),
    "gemma2": _GEMMA,
    "gemma3_text": dataclasses.replace(_GEMMA, qk_norm="head"),
    "smollm3": Family(
        bias_keys=_BIASES, windows="layer_types", window_switch="use_sliding_window", tied=True, kv_heads=4
    ),
    "olmo2": Family(
        norms="after", qk_norm="all_heads", norm_scales_in_fp32=True, bias_keys=("attention_bias",)
    ),
    "granite": Family(bias_keys=_BIASES),
    "phi3": Family(fused_projections=True, windows="all"),
}

_NOT_TRAINED = {
    "use_bidirectional_attention": "the model would attend to later tokens",
    "resid_pdrop": "dropout of the residual stream has no closed form",
}
"keys of a config.json that no estimate and no training here obeys, if they are set"


def ignored_keys(config: Mapping[str, Any], model_type: str) -> list[str]:
    """Return the keys of a config.json that transformers' classes of this model_type would ignore."""
    family = FAMILIES[model_type]
    ignored = []
    for key in _BIASES:
        built = family.has_qkv_bias and key == "attention_bias"
        if key not in family.bias_keys and config.get(key, built) not in (None, built):
            ignored.append(key)
    ignored += [key for key in ("num_experts", "num_local_experts") if config.get(key) not in (None, 0, 1)]
    if family.windows == "none" and config.get("sliding_window") is not None:
        ignored.append("sliding_window")
    known = {"full_attention", "sliding_attention"} if family.windows == "layer_types" else {"full_attention"}
    if set(config.get("layer_types") or ()) - known:
        ignored.append("layer_types")
    return ignored


def unsupported_keys(config: Mapping[str, Any]) -> list[str]:
    """Return a clause for each key that changes the model in a way that this project does not know."""
    return [f"{key} {config[key]!r}: {why}" for key, why in _NOT_TRAINED.items() if config.get(key)]


def sliding_window(config: Mapping[str, Any], model_type: str) -> tuple[int | None, int]:
    """Return the window that transformers' class of this model_type sets, and the number of its layers."""
    family, num_layers = FAMILIES[model_type], config["num_hidden_layers"]
    window, kinds = config.get("sliding_window", family.window), config.get("layer_types")
    is_off = family.window_switch is not None and not config.get(family.window_switch)
    if family.windows == "none" or is_off or window is None:
        return None, 0
    if kinds is not None:
        num_windows = kinds.count("sliding_attention")
    elif family.windows == "all":
        num_windows = num_layers
    elif model_type == "smollm3":  # the layers without RoPE
        interval = config.get("no_rope_layer_interval", 4)
        has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
        num_windows = sum(not rope for rope in has_rope)
    elif model_type.startswith("gemma"):  # all but every second or sixth layer
        pattern = 2 if model_type == "gemma2" else config.get("sliding_window_pattern", 6)
        num_windows = num_layers - num_layers // pattern
    else:  # Qwen: the layers from max_window_layers on
        num_windows = max(0, num_layers - config.get("max_window_layers", 28))
    return (window, num_windows) if num_windows else (None, 0)


def after_head(config: Mapping[str, Any], model_type: str) -> str:
    """Return what the model does with the head's logits, as in ModelSpec; absent keys have defaults."""
    if model_type.startswith("granite"):
        return "scaling"
    cap = config.get("final_logit_softcapping", 30.0 if model_type == "gemma2" else None)
    return "softcap" if model_type.startswith("gemma") and cap is not None else "nothing"


def kernel_problems(spec: ModelSpec, config: RunConfig) -> list[str]:
    """Return a sentence for each kernel of the flags that would compute another model's function."""
    return [sentence for sentence, _ in _replaced_kernels(spec, config)]


def with_kernels_of(spec: ModelSpec, config: RunConfig) -> RunConfig:
    """Return the config with the kernels that the model has, in place of those that it does not have."""
    for _, change in _replaced_kernels(spec, config):
        parts = change.pop("leave_out", ())
        config = dataclasses.replace(config.without_kernels(*parts) if parts else config, **change)
    return config


def _replaced_kernels(spec: ModelSpec, config: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return a sentence and the flag's other value for each kernel that does not fit the model."""
    found: list[tuple[str, dict[str, Any]]] = []
    kernel = config.attn_implementation
    if spec.attention_softcap and kernel.startswith("sdpa"):
        sentence = (
            f"--attn_implementation {kernel}: {spec.name} caps its attention logits, and SDPA does not; use "
            "--attn_implementation eager (on a GPU, also flash_attention_2 or flex_attention)"
        )
        found.append((sentence, {"attn_implementation": "eager"}))
    of_head = f"changes the logits before the loss ({spec.after_head}), and the fused loss never has them"
    of_norm = (
        "has LayerNorm, and the fused norm is an RMSNorm"
        if spec.layer_norm
        else "multiplies by a norm's weight before it rounds, and the fused norm after it"
    )
    for part, differs, why in (
        ("loss", spec.after_head != "nothing", of_head),
        ("norm", spec.layer_norm or spec.norm_scales_in_fp32, of_norm),
    ):
        if differs and part in config.kernel_parts:
            sentence = f"--kernels {config.kernels}: {spec.name} {why}; leave {part} out"
            found.append((sentence, {"leave_out": (part,)}))
    if config.pad_widths and (reason := _why_not_padded(spec)) is not None:
        found.append((f"--pad_widths: {spec.name} {reason}; leave it out", {"pad_widths": False}))
    return found


def _why_not_padded(spec: ModelSpec) -> str | None:
    """Return why zeros in FFN or vocabulary would change the function, or can't be put there."""
    padded = padded_spec(spec)
    if spec.fused_projections and padded.ffn_size != spec.ffn_size:
        return "has gate and up in one matrix, which is not padded"
    if spec.after_head == "softcap" and padded.vocab_size != spec.vocab_size:
        return "caps its logits, so a padded token would have a probability"
    return None
