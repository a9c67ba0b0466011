"""Replaces a decoder layer's kernels by kernels that save less memory for backward, or are faster.

Byte counts below use e for the bytes of an element in the compute dtype: 2 in bf16, 4 in fp32.
"""

import dataclasses
from importlib.util import find_spec
from types import CodeType
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from slm_toolkit.config.run_config import FP8_MULTIPLE, RunConfig, fits_float8
from slm_toolkit.hardware.machine import has_compiler
from slm_toolkit.run.kernels.loss_kernels import (
    Arithmetic,
    LossHead,
    give_labels_to_head,
    loss_of_head,
)


class FusedRMSNorm(torch.nn.Module):
    """transformers' RMSNorm, but saves only the input in its own dtype for backward, and 4 bytes per row.

    transformers' RMSNorm saves, per element, an fp32 copy of the input (4 bytes) and the normalised input in
    its dtype: 6 bytes in bf16, 8 in fp32. This one saves 2 and 4, and its input is the residual stream, which
    mostly stays in memory anyway.
    On a GPU this is torch's kernel, which rounds once (transformers rounds twice) and needs no fp32 copies.
    Otherwise fp32 copies exist while it runs: up to 10 bytes per element in forward, 12 in backward.
    """

    weight: torch.nn.Parameter
    variance_epsilon: float
    is_plain = False
    "whether transformers' operations compute it after all"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.is_plain:
            return self.plain_forward(hidden_states)
        if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype:
            return functional.rms_norm(
                hidden_states, self.weight.shape, self.weight, eps=self.variance_epsilon
            )
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    """Normalises in fp32, rounds to the input's dtype, then multiplies by the weight, like transformers."""

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


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the list of decoder layers: the module list of the base model that has a layer's number."""
    num_layers = model.config.num_hidden_layers
    lists = [
        part
        for part in model.base_model.modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) == num_layers
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {num_layers} decoder layers\nhint: choose another model"
        )
    return lists[0]


def computes_like(module: torch.nn.Module, model_class: type) -> bool:
    """Return whether a module's forward is the same code as another class's.

    transformers copies the code of norms into the file of each architecture.
    """
    own, other = type(module).forward.__code__, model_class.forward.__code__
    return _parts_of(own) == _parts_of(other)


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    """Return what a function's code does, without its name and place."""
    return code.co_code, code.co_names, code.co_consts, code.co_varnames


def use_kernels(model: PreTrainedModel, config: RunConfig) -> None:
    """Put the configured kernels into `model`, in place. State dict names and tied weights stay the same.

    What computes the fused loss between its matrix products: see `_loss_arithmetic`.
    Raises ValueError if a kernel does not fit the model's head or norms.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    if config.fuses_loss:
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(
                f"--kernels {config.kernels}: the head of {type(model).__name__} is {head}, "
                f"not a plain matrix\nhint: --kernels {config.without_kernels('loss').kernels}"
            )
        head.__class__ = LossHead
        head.arithmetic = _loss_arithmetic(config)
        head.has_chunks_of_cpu = (
            not torch.cuda.is_available() and config.rehearse is None
        )  # which has a GPU's
        model.register_forward_pre_hook(give_labels_to_head, with_kwargs=True)
        model.loss_function = loss_of_head
    if config.fuses_norm:
        norms = [module for module in model.modules() if computes_like(module, LlamaRMSNorm)]
        if not norms:
            raise ValueError(
                f"--kernels {config.kernels}: {type(model).__name__} has no norm that computes "
                "like LlamaRMSNorm\nhint: --kernels loss"
            )
        for norm in norms:
            norm.plain_forward = norm.forward
            norm.__class__ = FusedRMSNorm


def _loss_arithmetic(config: RunConfig) -> Arithmetic:
    """Return what computes a fused loss between its matrix products. A rehearsal on a CPU imitates a GPU.

    torch.compile needs Triton on a GPU, so a run that compiles has Triton's loss, too.
    """
    if not (config.uses_triton or config.compiles):
        return "pytorch"
    if torch.cuda.is_available():
        return "triton"
    return "pytorch" if config.rehearse is None else "nothing"


_FP8_CAPABILITY = (8, 9)


def check_optional(config: RunConfig) -> None:
    """Raise ValueError if this machine lacks a package, or the compiler, that a flag of `config` needs."""
    adapters = {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}
    needed = {
        f"--fp8 {config.fp8}": ["torchao"] if config.fp8 != "none" else [],
        f"--peft {config.peft}": adapters.get(config.peft, []),
        f"--kernels {config.kernels}": ["triton"] if config.uses_triton and torch.cuda.is_available() else [],
    }
    for flag, packages in needed.items():
        if missing := [package for package in packages if find_spec(package) is None]:
            raise ValueError(f"{flag} needs {' and '.join(missing)}\nhint: pip install {' '.join(missing)}")
    if config.compiles and not has_compiler():
        raise ValueError(
            f"--kernels {config.kernels} needs a C++ compiler, and there is no g++ or clang++\n"
            f"hint: install one, or --kernels {config.without_kernels('compile', 'graphs').kernels}"
        )


def use_fp8(model: PreTrainedModel, config: RunConfig) -> None:
    """Make the decoder layers' linear modules multiply in float8, in place; weights and names stay.

    `config.fp8`: a torchao recipe, tensorwise or rowwise. Modules stay unchanged if a width is not a multiple
    of 16. On a CPU, and on a GPU without float8, the rounding is emulated: same losses, but no speedup. A
    rehearsal without a GPU computes nothing, so it allocates what a GPU with float8 would.
    Raises ValueError if no module fits.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    has_fp8 = (
        torch.cuda.get_device_capability() >= _FP8_CAPABILITY
        if torch.cuda.is_available()
        else config.rehearse is not None
    )
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.fp8), emulate=not has_fp8)
    layers = decoder_layers(model)
    if not any(fits_fp8(module) for module in layers.modules()):
        raise ValueError(
            f"--fp8 {config.fp8}: no width of {type(model).__name__} is a multiple of {FP8_MULTIPLE}\n"
            "hint: add --pad_widths, or choose a preset that ends in -hw"
        )
    convert_to_float8_training(layers, config=recipe, module_filter_fn=lambda module, _: fits_fp8(module))


def fits_fp8(module: torch.nn.Module) -> bool:
    if not isinstance(module, torch.nn.Linear):
        return False
    return fits_float8(module.in_features, module.out_features)
