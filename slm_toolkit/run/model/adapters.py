"""Adds peft's adapters, small trained weights, to a frozen model, which --peft qlora holds in 4 bits."""

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

MERGED = "merged"
"the folder, inside the adapter's, of the base model with the adapter merged in"


def check_adapters(config: RunConfig) -> None:
    """Raises ValueError if a package that `--peft` needs is not installed, or too old for transformers."""
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
            f"--peft {config.peft}: transformers {version('transformers')} needs peft {MIN_PEFT_VERSION}, "
            f"this is {version('peft')}\nhint: pip install -U peft; while PyPI has none so new, "
            f'pip install "transformers<{version("transformers")}"'
        ) from None


def quantize(model: PreTrainedModel) -> None:
    """Quantize the decoder layers' linear weights to 4 bits (NF4, scales in 8), in place, and freeze them.

    Their storage is in bf16, which FSDP and DeepSpeed can shard and cast without knowing its content
    (bitsandbytes' default, uint8, stops both). They are quantized where they stay: on this rank's GPU, if
    there is one.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    for name, module in list(model.model.layers.named_modules()):
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
        setattr(model.model.layers.get_submodule(parent), child, in_4_bits)


def _without_scales(
    module: torch.nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *rest: Any
) -> None:
    """Do not load the scales of quantized weights: a checkpoint has the same weights, so the same scales."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}weight.")]:
        del state_dict[name]


def add_adapter(model: PreTrainedModel, config: RunConfig, *, base: str | None) -> None:
    """Freeze `model` and put trained adapters into it, in place; its class and its modules' names stay.

    `base`: the place of the frozen weights, which is saved with the adapter.
    Raises ValueError if peft does not fit, or finds none of the modules in --lora_target_modules.
    """
    check_adapters(config)
    from peft import IA3Config, LoraConfig

    names = config.lora_target_modules
    targets: Any = names if names == "all-linear" else [name.strip() for name in names.split(",")]
    if config.peft == "ia3":  # with None, peft takes its paper's modules for each architecture
        chosen = None if targets == "all-linear" else targets
        down = [name for name in chosen or () if name.endswith(("down_proj", "fc2"))]
        feedforward = None if chosen is None else down
        adapter: Any = IA3Config(
            task_type="CAUSAL_LM", target_modules=chosen, feedforward_modules=feedforward
        )
    else:
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
            "hint: all-linear, or names such as q_proj,v_proj"
        ) from None
    wrapped = ends != (model.get_input_embeddings(), model.get_output_embeddings())
    if wrapped and (model.config.tie_word_embeddings or config.loss_kernel == "fused_linear"):
        why = "tied: merged, both would change" if model.config.tie_word_embeddings else "part of the loss"
        raise ValueError(
            f"--lora_target_modules {names}: embedding and head are {why}\nhint: modules of the layers"
        )
    # a folder's whole path, since peft looks for it from wherever the adapter is loaded
    is_folder = base is not None and Path(base).expanduser().exists()
    adapter.base_model_name_or_path = str(Path(base).expanduser().resolve()) if is_folder else base


def save_merged(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], adapter_dir: Path) -> Path:
    """Write the base model with the adapter of `adapter_dir` merged in, in the dtype of the computation.

    `state_dict`: all of `model`, gathered. 4-bit weights are merged as dequantized: the adapter has learnt to
    correct those, not the weights before quantization. They are added in fp32, then rounded once.
    """
    from peft import PeftModel

    base = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state_dict.items()
        if not any(mark in name for mark in ("lora_", "ia3_", ".quant_", ".absmax", ".nested_"))
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
    """Name and fp32 weights of the modules whose weights are in 4 bits."""
    if find_spec("bitsandbytes") is None:
        return
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            gathered = state_dict[f"{name}.weight"].to(module.quant_state.absmax.device)
            weight = dequantize_4bit(gathered, module.quant_state)
            yield f"{name.replace('.base_layer', '')}.weight", weight.float().cpu()
