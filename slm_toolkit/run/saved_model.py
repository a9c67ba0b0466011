"""The final model of a run, as a folder that Hugging Face's libraries load."""

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.run.adapters import save_merged

MODEL_DIR = "model"
"in a run's folder: the final model, anew each time"


def check_apart(source: Path, target: Path) -> None:
    """Raises ValueError where the weights to start from lie where the run would write its own."""
    if source.resolve().is_relative_to(target):
        raise ValueError(
            f"--model {source} lies where this run saves its model, which would be overwritten\n"
            "hint: another --run_name or --output_dir, or --save_final_model false"
        )


def save_model(
    accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any, folder: Path, *, merge: bool = False
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, in the dtype computed with.

    Of a model with an adapter, peft's folder of the adapter; with `merge` the merged model in it, too.
    """
    state_dict = accelerator.get_state_dict(model)  # a collective: shards are gathered to rank 0
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of that name: not what this one saved
        hf_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        floats = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
        hf_model.config.dtype = floats.pop() if len(floats) == 1 else None
        hf_model.save_pretrained(folder, state_dict=state_dict)
        written = [folder, save_merged(hf_model, state_dict, folder)] if merge else [folder]
        for place in written if tokenizer is not None else []:
            tokenizer.save_pretrained(place)
    accelerator.wait_for_everyone()
    return folder
