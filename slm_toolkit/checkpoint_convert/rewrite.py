"""Write the weights of a checkpoint, of any strategy, as a Hugging Face model."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from slm_toolkit.model.names import find_model
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, delete
from slm_toolkit.run.checkpoint.files import damage
from slm_toolkit.run.checkpoint.start import by_order, checkpoint_in
from slm_toolkit.run.engine.training_state import WEIGHTS
from slm_toolkit.run.model.model import hf_config


def write_model(source: Path, output: Path) -> str:
    """Write the fp32 weights of a checkpoint, or of a run's newest, as a new folder; describe the checkpoint.

    Raises ValueError if the checkpoint can't be read, or contains no whole model.
    """
    from transformers.utils import logging

    if output.exists():
        raise ValueError(f"{output} exists, and nothing is overwritten\nhint: give another --output")
    of_run = source.parent if source.name == CHECKPOINTS_DIR else source
    newest = by_order(of_run / CHECKPOINTS_DIR)
    checkpoint = checkpoint_in(newest[-1] if newest else source)
    path, manifest = checkpoint.path, checkpoint.manifest
    if problem := damage(path, manifest.files):
        raise ValueError(f"{problem}\nhint: convert another checkpoint")
    model = _empty_model(path, manifest.run, manifest.num_elements, has_adapter=manifest.frozen is not None)
    weights = {
        name: checkpoint.read(f"{WEIGHTS}/{name}", 0, param.numel()).float().reshape(param.shape)
        for name, param in model.named_parameters()
    }
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    model.config.dtype = torch.float32
    logging.disable_progress_bar()
    unfinished = output.parent / f".{output.name}.unfinished"
    delete(unfinished)
    try:
        model.save_pretrained(unfinished)
        unfinished.rename(output)
    except SafetensorError as error:  # it hides an error of the disk
        raise ValueError(f"can't write {output}: {error}\nhint: check its disk") from None
    finally:
        delete(unfinished)
    num_parameters, writer = sum(manifest.num_elements.values()), manifest.written_by
    return (
        f"{path}: step {manifest.step}, {num_parameters:,} parameters, written under {writer['strategy']} x "
        f"{writer['num_processes']}"
    )


def _empty_model(
    path: Path, run: dict[str, Any], num_elements: dict[str, int], *, has_adapter: bool
) -> torch.nn.Module:
    """Return the checkpoint's model on the meta device. Raises ValueError if its parameters are others."""
    from transformers import AutoModelForCausalLM

    if has_adapter or run["pad_widths"]:
        raise ValueError(
            f"{path} contains {'an adapter' if has_adapter else 'padded weights'}\n"
            "hint: resume its run with --save_final_model true, which writes the model"
        )
    spec = find_model(run["model"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(spec, seq_len=spec.max_position_embeddings))
    if {name: param.numel() for name, param in model.named_parameters()} != num_elements:
        raise ValueError(
            f"{path} is not of the model that {run['model']} is now\n"
            "hint: give that file or folder the content that the run began with"
        )
    return model
