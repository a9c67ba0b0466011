"""Checkpoints of a run: written beside and renamed, the newest kept, and the final Hugging Face model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.config import RunConfig
from slm_toolkit.run.adapters import save_merged
from slm_toolkit.strategy import Strategy

RUN_FILE = "run.json"
"in each checkpoint: what a run that goes on from it must have in common with the one that wrote it"


MODEL_DIR = "model"
"in a run's folder: the final model, anew each time"


def check_apart(source: Path, target: Path) -> None:
    """Raises ValueError where the weights to start from lie where the run would write its own."""
    if source.resolve().is_relative_to(target):
        raise ValueError(
            f"--model {source} lies where this run saves its model, which would be overwritten\n"
            "hint: another --run_name or --output_dir, or --save_final_model false"
        )


def run_description(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """What decides the shapes in a checkpoint and the batches that were already seen."""
    flags = (
        *(
            "model",
            "numerics",
            "optim",
            "seq_len",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        ),
        *("peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
        *("packing", "loss_on", "dataset_format", "eval_dataset", "validation_split_percentage"),
        "epoch_multiple",
        *("dataset", "dataset_config_name", "text_column", "tokenizer_name", "streaming", "seed"),
    )
    of_data = {"evaluates": config.eval_steps is not None}  # then some of the data is held out
    if config.streaming:
        of_data["eval_batches"] = config.eval_batches
    of_launch = {"engine": strategy.engine, "zero_stage": strategy.zero_stage, "num_processes": num_processes}
    return {**{flag: getattr(config, flag) for flag in flags}, **of_data, **of_launch}


def save_checkpoint(
    accelerator: Accelerator, run_dir: Path, step: int, description: dict[str, Any], *, keep: int
) -> Path:
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
        (beside / RUN_FILE).write_text(json.dumps(description))
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        for old in checkpoints(run_dir, description)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def checkpoints(run_dir: Path, description: dict[str, Any]) -> list[Path]:
    """The finished checkpoints of this very run, oldest first; those of another run in its folder are not."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if _written_by(path) == description]
    return sorted(found, key=lambda path: (path / RUN_FILE).stat().st_mtime_ns)


def _written_by(checkpoint: Path) -> dict[str, Any] | None:
    """The description of the run that wrote a checkpoint; None where it is not whole."""
    try:
        return json.loads((checkpoint / RUN_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written. Raises ValueError for a folder that is none."""
    found = re.fullmatch(r"step_(\d+)", checkpoint.name)
    if found is None:
        raise ValueError(
            f"{checkpoint} is no checkpoint\nhint: they are named runs/<run>/checkpoints/step_<k>"
        )
    return int(found[1])


def find_checkpoint(asked: str, run_dir: Path, description: dict[str, Any]) -> Path:
    """The folder that --resume_from_checkpoint means. Raises ValueError where there is none of this run."""
    if asked == "latest":
        found = checkpoints(run_dir, description)
        if not found:
            raise ValueError(
                f"no checkpoint under {run_dir}/checkpoints of a run with these flags\n"
                "hint: --save_steps writes them, --run_name names the folder"
            )
        return found[-1]
    folder = Path(asked).expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(
            f"no such checkpoint: {asked}\nhint: they are runs/<run>/checkpoints/step_<k>, or say latest"
        )
    step_of(folder)
    return folder


def check_resumable(checkpoint: Path, description: dict[str, Any]) -> None:
    """Raises ValueError where a checkpoint was written by a run that another would not continue."""
    written = _written_by(checkpoint)
    if written is None:
        raise ValueError(
            f"{checkpoint} has no readable {RUN_FILE}: it is not whole\nhint: resume from an earlier one"
        )
    differences = [
        f"{name} {written.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in description.items()
        if written.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} is of another run: {'; '.join(differences)}\n"
            "hint: give the flags and the YAML it was written with; lengths and learning rates may change"
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
