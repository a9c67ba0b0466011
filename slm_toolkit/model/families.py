"""What transformers builds for each model_type: norms, biases, windows, and the defaults of absent keys.

Read from the configuration and modeling files of transformers 5.23.
"""

import dataclasses
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
    window_switch: str | None = None
    "a key that must be true for windows"
    tied: bool = False
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    "transformers' values of absent keys of a config.json"
    heads_divide_width: bool = True
    "transformers refuses a hidden_size that is no multiple of the heads"
    activation_key: str = "hidden_act"
    activation: str = "silu"

    @property
    def is_gemma(self) -> bool:
        return self.norms == "both"


_BIASES = ("attention_bias", "mlp_bias")
_GEMMA = Family(
    norms="both",
    norm_scales_in_fp32=True,
    bias_keys=("attention_bias",),
    windows="layer_types",
    tied=True,
    defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
)
FAMILIES: dict[str, Family] = {
    "llama": Family(bias_keys=_BIASES),
    "qwen2": Family(
        has_qkv_bias=True,
        windows="layer_types",
        window_switch="use_sliding_window",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "mistral": Family(windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen3": Family(
        qk_norm="head",
        bias_keys=("attention_bias",),
        windows="layer_types",
        window_switch="use_sliding_window",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
        heads_divide_width=False,
    ),
    "gemma2": dataclasses.replace(
        _GEMMA,
        defaults={**_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": dataclasses.replace(_GEMMA, qk_norm="head"),
    "smollm3": Family(
        bias_keys=_BIASES,
        windows="layer_types",
        window_switch="use_sliding_window",
        tied=True,
        defaults={"num_key_value_heads": 4},
    ),
    "olmo2": Family(
        norms="after", qk_norm="all_heads", norm_scales_in_fp32=True, bias_keys=("attention_bias",)
    ),
    "granite": Family(bias_keys=_BIASES),
    "phi3": Family(fused_projections=True, windows="all"),
}


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
    of_norm = "multiplies by a norm's weight before it rounds, and the fused norm after it"
    for part, differs, why in (
        ("loss", spec.after_head != "nothing", of_head),
        ("norm", spec.norm_scales_in_fp32, of_norm),
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
