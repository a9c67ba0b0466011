"""Adds peft's adapters (small trained weights) to a frozen model; --peft qlora also quantizes the model."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.kernels.layer_kernels import decoder_layers


def quantize(model: PreTrainedModel) -> None:
    """Quantize the decoder layers' linear weights to 4 bits (NF4, 8-bit scales), in place, and freeze them.

    The 4-bit values are stored in bf16 tensors, which FSDP and DeepSpeed can shard and cast (they fail with
    bitsandbytes' default, uint8). Quantization runs on this rank's GPU, if there is one.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    kind = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
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
                **kind,
            )
        in_4_bits.weight = Params4bit(
            module.weight.data.bfloat16(),
            requires_grad=False,
            module=in_4_bits,
            **kind,
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
    Raises ValueError if peft is too old for transformers, or no module matches --lora_target_modules.
    """
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
        raise ValueError(
            f"--lora_target_modules {names}: embedding and head are tied, or the head is part of the loss\n"
            "hint: choose only modules of the decoder layers"
        )
    # an absolute path, because the adapter may be loaded from any working folder
    is_folder = base is not None and Path(base).expanduser().exists()
    adapter.base_model_name_or_path = str(Path(base).expanduser().resolve()) if is_folder else base
