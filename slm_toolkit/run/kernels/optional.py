"""Kernels of optional packages: Liger's in Triton, torchao's float8 matrix products."""

import dataclasses
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from slm_toolkit.base.extras import pip_install
from slm_toolkit.config.run_config import FP8_MULTIPLE, RunConfig

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
