"""Registers attention with transformers: SDPA without building a mask, on the backend of the flag."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
"values of --attn_implementation; sdpa itself takes the fastest backend that fits"
_ON_CPU = ("sdpa_math", "sdpa_flash")


def transformers_name(kernel: str, config: PretrainedConfig, *, documents_apart: bool = False) -> str:
    """The name by which transformers knows the attention; registers SDPA and its backends under our names.

    If every layer of `config` attends to all earlier tokens, which batches without padding allow,
    transformers gets no mask function: to find out whether it needs a mask, it would read position ids off
    the device in every forward, and the host would wait for the GPU. `documents_apart`: sequences hold
    several documents that must not see each other, so transformers has to find out.
    Raises ValueError if this machine's PyTorch has no such backend for training.
    """
    if kernel != "sdpa" and kernel not in SDPA_BACKENDS:
        return kernel
    if kernel in SDPA_BACKENDS and kernel not in _ON_CPU and not torch.cuda.is_available():
        raise ValueError(f"--attn_implementation {kernel} needs a GPU\nhint: a CPU has {', '.join(_ON_CPU)}")
    if kernel == "sdpa_flash" and documents_apart and torch.cuda.is_available():
        raise ValueError(
            "--attn_implementation sdpa_flash takes no mask on a GPU, which keeps packed documents apart\n"
            "hint: sdpa, or flash_attention_2"
        )
    backend = SDPA_BACKENDS.get(kernel)
    # with "flash" in the name, transformers would look for a package
    name = f"causal_{'sdpa' if backend is None else f'backend_{backend.value}'}"
    if documents_apart or _has_windows(config):
        name = f"masked_{name}"
        AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(name, partial(_attention, backend))
    return name


def _has_windows(config: PretrainedConfig) -> bool:
    """Whether some layers see only a part of the sequence."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or getattr(config, "sliding_window", None) is not None


def _attention(backend: SDPBackend | None, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    held: AbstractContextManager = nullcontext() if backend is None else sdpa_kernel(backend)
    with held:
        return sdpa_attention_forward(*args, **kwargs)
