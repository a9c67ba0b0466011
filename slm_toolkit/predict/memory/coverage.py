"""Flags that no closed form of memory or time covers: an estimate says so instead of guessing."""

import dataclasses

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.adapters import unknown_targets

_ATTENTION = (  # transformers 5.23's names; all but eager keep no scores
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
    *("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"),  # and not sdpa_math, which keeps scores in its own way
)


def unknown_to_estimates(config: RunConfig) -> list[str]:
    """A sentence for each flag of `config` that estimates know nothing of."""
    found = []
    if config.attn_implementation not in _ATTENTION:
        found.append(
            f"--attn_implementation {config.attn_implementation}: no closed form for it, "
            f"there are {', '.join(_ATTENTION)}"
        )
    if config.use_liger_kernel:
        found.append(
            "--use_liger_kernel: no closed form for it; --norm_kernel fused --mlp_kernel fused keep as much"
        )
    if config.fp8 != "none":
        found.append(f"--fp8 {config.fp8}: no closed form for it; a GPU measures it")
    if config.tf32:
        found.append("--tf32: no closed form for its speed; its memory is that without the flag")
    if config.torch_compile_mode != "default":
        found.append(
            f"--torch_compile_mode {config.torch_compile_mode}: no closed form for it; without the flag it "
            "is for the default mode"
        )
    if config.fsdp_prefetch:
        found.append(f"--fsdp_prefetch {config.fsdp_prefetch}: no closed form for it; --rehearse N tells")
    if config.packing not in ("auto", "concat"):
        found.append(
            f"--packing {config.packing}: no closed form for it: the mask that keeps documents apart, and "
            "the share of padding, are not known before the documents are; --trace_memory tells"
        )
    if config.peft != "none" and config.torch_compile:
        found.append(
            f"--torch_compile with --peft {config.peft}: no closed form for what compiled adapters keep; a "
            "GPU measures it"
        )
    if problem := unknown_targets(config):
        found.append(problem)
    return found


def unlike_the_model(spec: ModelSpec, seq_len: int) -> list[str]:
    """What of a model's own configuration the closed forms leave out, as sentences."""
    found = []
    if spec.sliding_window is not None and spec.sliding_window < seq_len:
        found.append(
            f"{spec.name}: sliding_window {spec.sliding_window}: estimated as if every token attended to all "
            f"{seq_len}"
        )
    if spec.gated_ffn and spec.hidden_act not in ("silu", "swish"):
        found.append(f"{spec.name}: hidden_act {spec.hidden_act}: estimated as silu")
    if spec.attention_dropout:
        found.append(f"{spec.name}: attention_dropout {spec.attention_dropout:g}: estimated without dropout")
    return found


def known_to_estimates(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The nearest config that estimates cover, and what of `config` they leave out, as sentences."""
    found = unknown_to_estimates(config)
    if not found:
        return config, []
    changes = {"fp8": "none", "tf32": False, "torch_compile_mode": "default", "fsdp_prefetch": 0}
    if config.attn_implementation not in _ATTENTION:
        changes["attn_implementation"] = "sdpa"
    if config.use_liger_kernel:
        changes.update(use_liger_kernel=False, norm_kernel="fused", mlp_kernel="fused")
    return dataclasses.replace(config, **changes), found
