"""Kernels of a decoder layer that keep less for backward than transformers' own, and how they get there.

In the counts of bytes below, e are the bytes of an element of the compute dtype: 2 in bf16, 4 in fp32.
"""

import dataclasses
import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from slm_toolkit.base.errors import pip_install
from slm_toolkit.config.run_config import FP8_MULTIPLE, RunConfig
from slm_toolkit.run.kernels.loss_kernels import (
    LossHead,
    fused_logits_loss,
    give_labels_to_head,
    loss_of_head,
)


class FusedRMSNorm(torch.nn.Module):
    """transformers' RMSNorm, which keeps its input in its own dtype for backward, and 4 bytes per row.

    transformers' own keeps, per element, an fp32 copy of the input (4 bytes) and the normalised input in its
    dtype: 6 bytes in bf16, 8 in fp32. Here 2 and 4, of the residual stream, which mostly lives anyway.
    On a GPU this is torch's own kernel, which rounds once where transformers rounds twice and needs no fp32
    copies. Elsewhere they exist while it runs: up to 10 bytes per element in forward, 12 in backward.
    """

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype:
            return functional.rms_norm(
                hidden_states, self.weight.shape, self.weight, eps=self.variance_epsilon
            )
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class FusedMLP(torch.nn.Module):
    """transformers' gated MLP, which keeps gate and up for backward, and not the SiLU of the gate.

    Per token of an FFN width f, their product for the down projection included: 3 f e bytes, transformers'
    own 4 f e. Backward computes the SiLU again, and to the last bit the same.
    """

    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    down_proj: torch.nn.Module

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


class _SwiGLU(torch.autograd.Function):
    """SiLU(gate) x up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        silu = functional.silu(gate)
        # compiled by torch 2.11, an in-place product in forward has no gradient
        return silu * up if torch.compiler.is_compiling() else silu.mul_(up)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = functional.silu(gate).mul_(upstream)
        grad_silu = upstream * up
        grad_gate = torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=grad_silu)
        return grad_gate, grad_up


class _RMSNorm(torch.autograd.Function):
    """Normalised in fp32, rounded to the input's dtype, then times the weight, as transformers does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = hidden.float()
        rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, rstd)
        return weight * (wide * rstd).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """With x̂ = x·rstd and g = upstream·weight: dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ upstream·x̂."""
        hidden, weight, rstd = ctx.saved_tensors
        normed = hidden.float() * rstd
        rows = tuple(range(hidden.dim() - 1))
        grad_weight = (upstream * normed.to(hidden.dtype)).sum(dim=rows).to(weight.dtype)
        wide = (upstream * weight).float()
        projection = (wide * normed).mean(dim=-1, keepdim=True)
        grad_hidden = wide.sub_(normed.mul_(projection)).mul_(rstd)
        return grad_hidden.to(hidden.dtype), grad_weight, None


_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm")
_MLPS = ("LlamaMLP", "Qwen2MLP", "MistralMLP")


def use_kernels(model: PreTrainedModel, config: RunConfig) -> None:
    """Put the kernels asked for into `model`, in place: names in the state dict stay, tied weights too.

    With --torch_compile, what a fused loss does between its matrix products is left to torch.compile.
    Raises ValueError where the model's head, norms or MLPs are not what the kernels compute.
    """
    if config.mlp_kernel == "fused" and model.config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"--mlp_kernel fused: the activation of {type(model).__name__} is {model.config.hidden_act}, "
            "not silu\nhint: --mlp_kernel hf"
        )
    if config.loss_kernel == "fused_logits":
        model.loss_function = functools.partial(
            fused_logits_loss, compiled=config.torch_compile, chunks=config.loss_chunks
        )
    elif config.loss_kernel == "fused_linear":
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(
                f"--loss_kernel fused_linear: the head of {type(model).__name__} is {head}, no plain matrix\n"
                "hint: --loss_kernel fused_logits works with every head"
            )
        head.__class__ = LossHead
        head.compiled, head.chunks = config.torch_compile, config.loss_chunks
        model.register_forward_pre_hook(give_labels_to_head, with_kwargs=True)
        model.loss_function = loss_of_head
    for flag, kernel, names, fused in (
        ("norm_kernel", config.norm_kernel, _NORMS, FusedRMSNorm),
        ("mlp_kernel", config.mlp_kernel, _MLPS, FusedMLP),
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


# Kernels of optional packages: Liger's in Triton, torchao's float8 matrix products.

_WITHOUT_LIGER = "hint: --norm_kernel fused, --mlp_kernel fused and --torch_compile need nothing"
_FP8_CAPABILITY = (8, 9)


def check_optional(config: RunConfig) -> None:
    """Raises ValueError if this machine lacks the GPU or the package that a flag of `config` needs."""
    if config.tf32 and not torch.cuda.is_available():
        raise ValueError("--tf32 needs a GPU\nhint: --numerics aligned computes in bf16 on a CPU, too")
    if config.use_liger_kernel:
        if not torch.cuda.is_available():
            raise ValueError(f"--use_liger_kernel needs a GPU: its kernels are Triton's\n{_WITHOUT_LIGER}")
        if find_spec("liger_kernel") is None:
            raise ValueError(f"--use_liger_kernel needs Liger\nhint: {pip_install('liger')}")
    if config.fp8 != "none" and find_spec("torchao") is None:
        raise ValueError(f"--fp8 {config.fp8} needs torchao\nhint: {pip_install('fp8')}")


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's RMSNorm, RoPE and SwiGLU into `model`, in place; the loss stays `--loss_kernel`'s.

    Raises ValueError for an architecture that it does not know.
    """
    from transformers.integrations.liger import apply_liger_kernel  # imports much

    before = {type(module).forward for module in model.modules()}
    loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    apply_liger_kernel(model, {"rope": True, "rms_norm": True, "swiglu": True, **loss})
    after = {getattr(module.forward, "__func__", None) for module in model.modules()}
    if after <= before:
        raise ValueError(f"--use_liger_kernel: Liger knows no {type(model).__name__}\n{_WITHOUT_LIGER}")


def use_fp8(model: PreTrainedModel, recipe: str) -> None:
    """Let the decoder layers' linear modules multiply in float8, in place; weights and names stay.

    `recipe`: torchao's, tensorwise or rowwise. Widths that are no multiple of 16 stay as they are. On a CPU,
    and on a GPU without float8, the rounding is emulated: right losses, no speed.
    Raises ValueError where no width is a multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FP8_CAPABILITY
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not has_fp8)
    layers = model.model.layers
    if not any(fits_fp8(module) for module in layers.modules()):
        raise ValueError(
            f"--fp8 {recipe}: no width of {type(model).__name__} is a multiple of {FP8_MULTIPLE}\n"
            "hint: a preset that ends in -hw"
        )
    convert_to_float8_training(layers, config=config, module_filter_fn=lambda module, _: fits_fp8(module))


def fits_fp8(module: torch.nn.Module) -> bool:
    if not isinstance(module, torch.nn.Linear):
        return False
    return module.in_features % FP8_MULTIPLE == 0 and module.out_features % FP8_MULTIPLE == 0
