"""Adds peft's adapters (small trained weights) to a frozen model; --peft qlora also quantizes the model."""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.kernels.layer_kernels import decoder_layers

MERGED = "merged"
"subfolder of the adapter's folder, with the base model into which the adapter is merged"


def check_adapters(config: RunConfig) -> None:
    """Raise ValueError if a package that `--peft` needs is not installed or too old for transformers."""
    needed = {"none": (), "qlora": ("peft", "bitsandbytes")}.get(config.peft, ("peft",))
    if missing := [package for package in needed if find_spec(package) is None]:
        raise ValueError(
            f"--peft {config.peft} needs {' and '.join(missing)}\nhint: pip install {' '.join(missing)}"
        )
    if not needed:
        return
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        raise ValueError(
            f"--peft {config.peft}: transformers needs peft {MIN_PEFT_VERSION}, but peft {version('peft')} "
            "is installed\nhint: pip install -U peft"
        ) from None


def quantize(model: PreTrainedModel) -> None:
    """Quantize the decoder layers' linear weights to 4 bits (NF4, 8-bit scales), in place, and freeze them.

    The 4-bit values are stored in bf16 tensors, which FSDP and DeepSpeed can shard and cast (they fail with
    bitsandbytes' default, uint8). Quantization runs on this rank's GPU, if there is one.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    for name, module in list(decoder_layers(model).named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        has_bias = module.bias is not None
        with torch.device("meta"):
            in_4_bits = Linear4bit(
                module.in_features,
                module.out_features,
                has_bias,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
                quant_storage=torch.bfloat16,
            )
        in_4_bits.weight = Params4bit(
            module.weight.data.bfloat16(),
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=torch.bfloat16,
            module=in_4_bits,
        ).to(device)
        in_4_bits.bias = module.bias
        parent, _, child = name.rpartition(".")
        in_4_bits.register_load_state_dict_pre_hook(_without_scales)
        setattr(decoder_layers(model).get_submodule(parent), child, in_4_bits)


def _without_scales(
    module: torch.nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *rest: Any
) -> None:
    """Drop the scales of quantized weights when loading: the checkpoint has the same weights and scales."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}weight.")]:
        del state_dict[name]


def add_adapter(model: PreTrainedModel, config: RunConfig, *, base: str | None) -> None:
    """Freeze `model` and add trained adapters, in place; its class and module names stay the same.

    `base`: the folder or hub id of the frozen weights; it is saved with the adapter.
    Raises ValueError if peft is missing or too old, or if no module matches --lora_target_modules.
    """
    check_adapters(config)
    from peft import LoraConfig

    names = config.lora_target_modules
    targets: Any = names if names == "all-linear" else [name.strip() for name in names.split(",")]
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
    )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    try:
        model.add_adapter(adapter)
    except ValueError as error:
        raise ValueError(
            f"--peft {config.peft} with --lora_target_modules {names}: {str(error).splitlines()[0]}\n"
            "hint: give all-linear, or names such as q_proj,v_proj"
        ) from None
    wrapped = ends != (model.get_input_embeddings(), model.get_output_embeddings())
    if wrapped and (model.config.tie_word_embeddings or config.fuses_loss):
        is_tied = model.config.tie_word_embeddings
        reason = "tied, so merging would change both" if is_tied else "part of the loss"
        raise ValueError(
            f"--lora_target_modules {names}: embedding and head are {reason}\n"
            "hint: choose only modules of the decoder layers"
        )
    # an absolute path, because the adapter may be loaded from any working folder
    is_folder = base is not None and Path(base).expanduser().exists()
    adapter.base_model_name_or_path = str(Path(base).expanduser().resolve()) if is_folder else base


def save_merged(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], adapter_dir: Path) -> Path:
    """Merge the adapter of `adapter_dir` into the base model, and write that model in the compute dtype.

    `state_dict`: all tensors of `model`, gathered. 4-bit weights are dequantized before merging, because the
    adapter was trained on these, not on the original weights. The sum is computed in fp32 and rounded once.
    """
    from peft import PeftModel

    base = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state_dict.items()
        if not any(mark in name for mark in ("lora_", ".quant_", ".absmax", ".nested_"))
    }
    base |= dict(_dequantized(model, state_dict))
    dtype = next(tensor.dtype for tensor in base.values() if tensor.is_floating_point())
    whole = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    loaded = whole.load_state_dict(
        {name: tensor.float() for name, tensor in base.items()}, strict=False, assign=True
    )
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    assert set(loaded.missing_keys) <= set(whole.all_tied_weights_keys), loaded.missing_keys
    whole.tie_weights()
    merged = PeftModel.from_pretrained(whole, adapter_dir).merge_and_unload().to(dtype)
    merged.save_pretrained(adapter_dir / MERGED)
    return adapter_dir / MERGED


def _dequantized(
    model: PreTrainedModel, state_dict: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and fp32 weights of each module with 4-bit weights."""
    if find_spec("bitsandbytes") is None:
        return
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            gathered = state_dict[f"{name}.weight"].to(module.quant_state.absmax.device)
            weight = dequantize_4bit(gathered, module.quant_state)
            yield f"{name.replace('.base_layer', '')}.weight", weight.float().cpu()
