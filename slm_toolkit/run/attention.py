"""Attention kernels beside transformers' own: PyTorch's SDPA held to one of its backends."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
"values of --attn_implementation; sdpa itself takes the fastest that serves"
_ON_CPU = ("sdpa_math", "sdpa_flash")


def transformers_name(kernel: str) -> str:
    """What transformers is to be asked for: a backend is made known to it under a name of ours.

    Raises ValueError where this machine's PyTorch has no such backend for training.
    """
    backend = SDPA_BACKENDS.get(kernel)
    if backend is None:
        return kernel
    if kernel not in _ON_CPU and not torch.cuda.is_available():
        raise ValueError(f"--attn_implementation {kernel} needs a GPU\nhint: a CPU has {', '.join(_ON_CPU)}")
    name = f"sdpa_backend_{backend.value}"  # with "flash" in it, transformers would look for a package
    AttentionInterface.register(name, _held_to(backend))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _held_to(backend: SDPBackend) -> Any:
    def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        with sdpa_kernel(backend):
            return sdpa_attention_forward(*args, **kwargs)

    return attention
