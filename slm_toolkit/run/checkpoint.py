"""Checkpoints of a run: written beside and renamed, the newest kept, and the final Hugging Face model."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator


def save_checkpoint(accelerator: Accelerator, run_dir: Path, step: int, *, keep: int) -> Path:
    """Write `run_dir`/checkpoints/step_<step> after `step` steps; only the newest `keep` stay."""
    folder = run_dir / "checkpoints"
    final = folder / f"step_{step}"
    beside = folder / f".step_{step}.unfinished"
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(beside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        for old in checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def checkpoints(run_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step_*"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written. Raises ValueError for a folder that is none."""
    found = re.fullmatch(r"step_(\d+)", checkpoint.name)
    if found is None:
        raise ValueError(
            f"{checkpoint} is no checkpoint\nhint: they are named runs/<run>/checkpoints/step_<k>"
        )
    return int(found[1])


def find_checkpoint(asked: str, run_dir: Path) -> Path:
    """The folder that --resume_from_checkpoint means. Raises ValueError where there is none."""
    if asked == "latest":
        found = checkpoints(run_dir)
        if not found:
            raise ValueError(f"no checkpoint under {run_dir}/checkpoints\nhint: --save_steps writes them")
        return found[-1]
    folder = Path(asked).expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(
            f"no such checkpoint: {asked}\nhint: they are runs/<run>/checkpoints/step_<k>, or say latest"
        )
    step_of(folder)
    return folder


def save_model(accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any, folder: Path) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, in the dtype computed with."""
    state_dict = accelerator.get_state_dict(model)  # a collective: shards are gathered to rank 0
    if accelerator.is_main_process:
        hf_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        floats = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
        hf_model.config.dtype = floats.pop() if len(floats) == 1 else None
        hf_model.save_pretrained(folder, state_dict=state_dict)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return folder
