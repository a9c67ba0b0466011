"""The final model of a run, as a folder that Hugging Face's libraries load."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.run.adapters import save_merged


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
        hf_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        floats = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
        hf_model.config.dtype = floats.pop() if len(floats) == 1 else None
        with _in_place_of(folder) as beside:
            hf_model.save_pretrained(beside, state_dict=state_dict)
            written = [beside, save_merged(hf_model, state_dict, beside)] if merge else [beside]
            for place in written if tokenizer is not None else []:
                tokenizer.save_pretrained(place)
    accelerator.wait_for_everyone()
    return folder


@contextmanager
def _in_place_of(folder: Path) -> Iterator[Path]:
    """A folder to write into; when all is written it takes the place of an earlier run's."""
    folder = folder.resolve()  # a link stays one
    beside, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("unfinished", "replaced"))
    if replaced.exists() and not folder.exists():  # a kill between the two renames below
        replaced.rename(folder)
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(replaced)
    beside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
