"""Put the kernels that a run asks for in place of transformers' own."""

import functools

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.layer_kernels import FusedMLP, FusedRMSNorm
from slm_toolkit.run.loss_kernels import LossHead, fused_logits_loss, give_labels_to_head, loss_of_head

_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm")
_MLPS = ("LlamaMLP", "Qwen2MLP", "MistralMLP")


def use_kernels(
    model: PreTrainedModel,
    *,
    loss_kernel: str,
    norm_kernel: str,
    mlp_kernel: str = "hf",
    compiled: bool = False,
) -> None:
    """Put the kernels asked for into `model`, in place: names in the state dict stay, tied weights too.

    `compiled`: what a fused loss does between its matrix products is left to torch.compile.
    Raises ValueError where the model's head, norms or MLPs are not what the kernels compute.
    """
    if mlp_kernel == "fused" and model.config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"--mlp_kernel fused: the activation of {type(model).__name__} is {model.config.hidden_act}, "
            "not silu\nhint: --mlp_kernel hf"
        )
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
    for flag, kernel, names, fused in (
        ("norm_kernel", norm_kernel, _NORMS, FusedRMSNorm),
        ("mlp_kernel", mlp_kernel, _MLPS, FusedMLP),
    ):
        if kernel != "fused":
            continue
        found = [module for module in model.modules() if type(module).__name__ in names]
        if not found:
            raise ValueError(
                f"--{flag} fused: {type(model).__name__} has none of {', '.join(names)}\nhint: --{flag} hf"
            )
        for module in found:
            module.__class__ = fused
