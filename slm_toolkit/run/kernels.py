"""Put the kernels that a run asks for in place of transformers' own."""

import functools

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.layer_kernels import FusedRMSNorm
from slm_toolkit.run.loss_kernels import LossHead, fused_logits_loss, give_labels_to_head, loss_of_head

_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm")


def use_kernels(
    model: PreTrainedModel, *, loss_kernel: str, norm_kernel: str, compiled: bool = False
) -> None:
    """Put the kernels asked for into `model`, in place: names in the state dict stay, tied weights too.

    `compiled`: what a fused loss does between its matrix products is left to torch.compile.
    Raises ValueError where the model's head or norms are not what the kernels compute.
    """
    if loss_kernel == "fused_logits":
        model.loss_function = functools.partial(fused_logits_loss, compiled=compiled)
    elif loss_kernel == "fused_linear":
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(
                f"--loss_kernel fused_linear: the head of {type(model).__name__} is {head}, no plain matrix\n"
                "hint: --loss_kernel fused_logits works with every head"
            )
        head.__class__ = LossHead
        head.compiled = compiled
        model.register_forward_pre_hook(give_labels_to_head, with_kwargs=True)
        model.loss_function = loss_of_head
    if norm_kernel == "fused":
        norms = [module for module in model.modules() if type(module).__name__ in _NORMS]
        if not norms:
            raise ValueError(
                f"--norm_kernel fused: {type(model).__name__} has none of {', '.join(_NORMS)}\n"
                "hint: --norm_kernel hf"
            )
        for module in norms:
            module.__class__ = FusedRMSNorm
