"""Rewrite a checkpoint, of any strategy or by others: as a model, or for FSDP or DeepSpeed to load."""

import math
from pathlib import Path
from typing import Any

import torch

from slm_toolkit.model.names import find_model
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE
from slm_toolkit.run.checkpoint.foreign import ForeignReader
from slm_toolkit.run.checkpoint.resume import Checkpoint, opened
from slm_toolkit.run.engine.training_state import MOMENTS, WEIGHTS
from slm_toolkit.run.model.model import hf_config


def write_model(checkpoint: Path, output: Path, *, model: str | None) -> dict[str, Any]:
    """Write the weights as a Hugging Face model folder; of mixed precision, the fp32 masters.

    `model`: its name or folder; None: as in the checkpoint. Returns facts about what was written.
    Raises ValueError if the checkpoint can't be read or belongs to another model.
    """
    from transformers.utils import logging

    source = opened(checkpoint)
    empty = _empty_model(source, model)
    empty.load_state_dict(_whole(source, empty, WEIGHTS), assign=True, strict=False)
    empty.tie_weights()
    empty.config.dtype = torch.float32
    _new_folder(output)
    logging.disable_progress_bar()
    empty.save_pretrained(output)
    return _facts(source, output, "a Hugging Face model in fp32, without a tokenizer")


def write_for_fsdp(
    checkpoint: Path, output: Path, *, model: str | None, learning_rate: float | None
) -> dict[str, Any]:
    """Write weights and AdamW's state as accelerate's FSDP does, so that `Accelerator.load_state` reads them.

    The optimizer that loads it must be a torch AdamW with one group of parameters; it takes its options from
    the folder. `learning_rate`: None: the run's or DeepSpeed's own. Other parameters and errors as of
    `write_model`.
    """
    import torch.distributed.checkpoint as dcp

    source = opened(checkpoint)
    state, group = _state_and_group(source, model, learning_rate)
    moments = {
        name: {"step": _steps(source), **{kind: state[kind][name] for kind in MOMENTS}}
        for name in state[WEIGHTS]
    }
    optimizer = {"state": moments, "param_groups": [{**group, "params": list(moments)}]}
    _new_folder(output)
    for folder, content in (
        ("pytorch_model_fsdp_0", {"model": state[WEIGHTS]}),
        ("optimizer_0", {"optimizer": optimizer}),
    ):
        dcp.save(content, storage_writer=dcp.FileSystemWriter(output / folder), no_dist=True)
    return _facts(source, output, "for Accelerator.load_state under FSDP2, SHARDED_STATE_DICT")


def write_for_deepspeed(
    checkpoint: Path,
    output: Path,
    *,
    model: str | None,
    learning_rate: float | None,
    num_processes: int | None,
) -> dict[str, Any]:
    """Write a universal checkpoint: DeepSpeed reads it under ZeRO-1, 2 and 3 with `load_universal: true`.

    `num_processes`: ranks that will load it under ZeRO-3, which wants a file for each; None: as many as wrote
    the checkpoint. Other parameters, optimizer and errors as of `write_for_fsdp`. Its layout is read by
    deepspeed/checkpoint/universal_checkpoint.py and `load_hp_checkpoint_state_from_checkpoint_dir_stage3` of
    0.19.8.
    """
    import deepspeed

    source = opened(checkpoint)
    state, group = _state_and_group(source, model, learning_rate)
    manifest = source.manifest
    num_ranks = num_processes or manifest.written_by["num_processes"]
    _new_folder(output)
    folder = output / "pytorch_model"
    for name in state[WEIGHTS]:
        (folder / "zero" / name).mkdir(parents=True)
        for kind, file in ((WEIGHTS, "fp32"), *((kind, kind) for kind in MOMENTS)):
            torch.save({"param": state[kind][name]}, folder / "zero" / name / f"{file}.pt")
        torch.save(_steps(source), folder / "zero" / name / "step.pt")
    of_zero3 = {"state": {0: {"step": _steps(source)}}, "param_groups": [group]}
    of_all = {"ds_version": deepspeed.__version__, "param_groups": [group]}
    torch.save({**of_all, "optimizer_state_dict": of_zero3}, folder / "zero" / "optimizer_state.pt")
    described = {
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "frozen_param_shapes")),
        **{"module": {}, "buffer_names": [], "shared_params": {}, "frozen_param_fragments": None},
        "param_shapes": [{name: tensor.shape for name, tensor in state[WEIGHTS].items()}],
        **{"global_steps": manifest.step, "skipped_steps": manifest.step - manifest.optimizer_steps},
        **{"dp_world_size": num_ranks, "mp_world_size": 1, "ds_config": {}},
        "ds_version": deepspeed.__version__,
    }
    for name in ("mp_rank_00", *(f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(num_ranks))):
        torch.save(described, folder / f"{name}_model_states.pt")
    (output / "latest_universal").write_text(folder.name)
    return _facts(source, output, "for DeepSpeed with checkpoint: {load_universal: true}")


def _state_and_group(
    source: Checkpoint, model: str | None, learning_rate: float | None
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return all tensors by kind and parameter, and the options of a torch AdamW as a group of its state."""
    options = _adamw_options(source)
    if learning_rate is not None:
        options["lr"] = learning_rate
    if "lr" not in options:
        raise ValueError(
            f"{source.path} does not say the learning rate, with which its next reader goes on\n"
            "hint: give it as --learning_rate"
        )
    empty = _empty_model(source, model)
    adamw = torch.optim.AdamW([torch.zeros(1)], **options).state_dict()["param_groups"][0]
    return {kind: _whole(source, empty, kind) for kind in (WEIGHTS, *MOMENTS)}, adamw


def _steps(source: Checkpoint) -> torch.Tensor:
    return torch.tensor(float(source.manifest.optimizer_steps))


def _adamw_options(source: Checkpoint) -> dict[str, Any]:
    """Return AdamW's options as far as the checkpoint, or the record of its run, has them."""
    if isinstance(source.reader, ForeignReader):
        return dict(source.reader.adamw)
    record = source.path.parent.parent / RECORD_FILE
    if not record.is_file():
        return {}
    config = read_record(record).config
    betas = (config.adam_beta1, config.adam_beta2)
    more = {"eps": config.adam_epsilon, "weight_decay": config.weight_decay}
    return {"lr": config.learning_rate, "betas": betas, **more}


def _empty_model(source: Checkpoint, name: str | None) -> torch.nn.Module:
    """Return the checkpoint's model on the meta device. Raises ValueError if its parameters are others."""
    from transformers import AutoModelForCausalLM

    run, path = source.manifest.run, source.path
    if source.manifest.frozen is not None or run.get("pad_widths"):
        what = "padded weights" if run.get("pad_widths") else "an adapter"
        raise ValueError(
            f"{path} contains {what}\nhint: resume it with --max_steps {source.manifest.step} and "
            "--save_final_model true, which writes the model"
        )
    name = name or run.get("model")
    if name is None:
        raise ValueError(
            f"{path} does not say which model it is of\nhint: give its name or folder as --model"
        )
    spec = find_model(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(spec, seq_len=spec.max_position_embeddings))
    sizes, found = _sizes(model), source.manifest.num_elements
    if differing := sorted(name for name, size in sizes.items() if found.get(name) != size):
        more = (
            f", {differing[0]} and {len(differing) - 1} more differ" if differing[1:] else f", {differing[0]}"
        )
        raise ValueError(f"{path} is not of {name}{more}\nhint: give its own model as --model")
    return model


def _sizes(model: torch.nn.Module) -> dict[str, int]:
    return {name: math.prod(param.shape) for name, param in model.named_parameters()}


def _whole(source: Checkpoint, model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Return all tensors of one kind in fp32, by parameter."""
    return {
        name: source.reader.read(f"{kind}/{name}", 0, param.numel()).float().reshape(param.shape)
        for name, param in model.named_parameters()
    }


def _new_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{output} exists, and nothing is overwritten\nhint: give another --output"
        ) from None


def _facts(source: Checkpoint, output: Path, what: str) -> dict[str, Any]:
    written_by = source.manifest.written_by
    return {
        "source": str(source.path),
        "written_by": written_by["strategy"],
        "num_processes": written_by["num_processes"],
        "step": source.manifest.step,
        "num_parameters": sum(source.manifest.num_elements.values()),
        "output": str(output),
        "is": what,
    }
