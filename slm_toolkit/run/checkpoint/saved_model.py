"""The final model of a run, as a folder that Hugging Face's libraries load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.record.saved_files import (
    beside_model,
    check_replaceable,
    delete,
    delete_model,
    list_model_files,
    sync,
)
from slm_toolkit.run.model.adapters import save_merged


def check_apart(source: Path, target: Path) -> None:
    """Raises ValueError if the run would save its model over the weights that it starts from."""
    if source.resolve().is_relative_to(target):
        raise ValueError(
            f"--model {source} lies where this run saves its model, which would be overwritten\n"
            "hint: another --run_name or --output_dir, or --save_final_model false"
        )


def save_model(
    accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any, folder: Path, *, merge: bool = False
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, in the dtype of the computation.

    For a model with an adapter, it is peft's folder of the adapter; `merge`: with the merged model in it.
    """
    state_dict = accelerator.get_state_dict(model)  # a collective: shards are gathered to rank 0
    if accelerator.is_main_process:
        hf_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        floats = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
        hf_model.config.dtype = floats.pop() if len(floats) == 1 else None
        with _in_place_of(folder) as unfinished:
            hf_model.save_pretrained(unfinished, state_dict=state_dict)
            written = [unfinished, save_merged(hf_model, state_dict, unfinished)] if merge else [unfinished]
            for place in written if tokenizer is not None else []:
                tokenizer.save_pretrained(place)
    accelerator.wait_for_everyone()
    return folder


@contextmanager
def _in_place_of(model: Path) -> Iterator[Path]:
    """A folder to write into; when all of it is on the disk it takes the place of an earlier run's model.

    Raises RunEnded where what is there now was not written by a run.
    """
    unfinished, replaced = (beside_model(model, state) for state in ("unfinished", "replaced"))
    try:
        check_replaceable(model)
        check_replaceable(replaced)
    except ValueError as error:
        raise RunEnded(str(error)) from None
    if replaced.exists() and not model.exists():  # a kill between the two renames below
        replaced.rename(model)
    delete(unfinished)
    unfinished.mkdir()
    try:
        yield unfinished
        list_model_files(unfinished)
        for written in (*unfinished.rglob("*"), unfinished):
            sync(written)
    except BaseException:
        delete(unfinished)
        raise
    delete_model(replaced)
    if model.exists():
        model.rename(replaced)
    unfinished.rename(model)
    sync(model.parent)
    delete_model(replaced)
