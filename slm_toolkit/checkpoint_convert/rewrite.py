"""Rewrite a checkpoint, of any strategy or by others: as a model, or for FSDP or DeepSpeed to load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from slm_toolkit.config.run_config import rule_of
from slm_toolkit.model.names import find_model
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE
from slm_toolkit.record.saved_files import delete
from slm_toolkit.run.checkpoint.foreign import ForeignReader
from slm_toolkit.run.checkpoint.resume import Checkpoint, opened
from slm_toolkit.run.engine.optimizer import MOMENTS
from slm_toolkit.run.engine.training_state import WEIGHTS
from slm_toolkit.run.model.model import hf_config


def rewrite(
    checkpoint: Path,
    output: Path,
    *,
    form: str,
    model: str | None,
    learning_rate: float | None,
    num_processes: int | None,
) -> dict[str, Any]:
    """Write a checkpoint as a new folder `output`; return facts about it.

    `form`: hf_model, fsdp_checkpoint or ds_universal. `model`: its name or folder; None: as in the
    checkpoint. `learning_rate`: None: the run's or DeepSpeed's own. `num_processes`: ranks that will load it
    under ZeRO-3, which wants a file for each; None: as many as wrote the checkpoint. Raises ValueError if the
    checkpoint can't be read or belongs to another model.
    """
    with _new_folder(output) as folder:
        source = opened(checkpoint)
        written_by = source.manifest.written_by
        group = {} if form == "hf_model" else _adamw_group(source, learning_rate)
        empty = _empty_model(source, model)
        if form == "hf_model":
            _write_model(source, empty, folder)
        elif form == "fsdp_checkpoint":
            _write_for_fsdp(source, empty, folder, group)
        else:
            num_ranks = num_processes or written_by["num_processes"]
            _write_for_deepspeed(source, empty, folder, group, num_ranks)
    return {
        "source": str(source.path),
        "written_by": written_by["strategy"],
        "num_processes": written_by["num_processes"],
        "step": source.manifest.step,
        "num_parameters": sum(source.manifest.num_elements.values()),
        "output": str(output),
    }


def _write_model(source: Checkpoint, empty: torch.nn.Module, folder: Path) -> None:
    """Write the weights as a Hugging Face model folder; of mixed precision, the fp32 masters."""
    from transformers.utils import logging

    empty.load_state_dict(_whole(source, empty, WEIGHTS), assign=True, strict=False)
    empty.tie_weights()
    empty.config.dtype = torch.float32
    logging.disable_progress_bar()
    empty.save_pretrained(folder)


def _write_for_fsdp(source: Checkpoint, empty: torch.nn.Module, folder: Path, group: dict[str, Any]) -> None:
    """Write weights and AdamW's state as accelerate's FSDP does, so that `Accelerator.load_state` reads them.

    The optimizer that loads it must be a torch AdamW with one group of parameters. It takes its options from
    the folder: of several groups, those of the first.
    """
    import torch.distributed.checkpoint as dcp

    state = {kind: _whole(source, empty, kind) for kind in (WEIGHTS, *MOMENTS)}
    moments = {
        name: {"step": _steps(source), **{kind: state[kind][name] for kind in MOMENTS}}
        for name in state[WEIGHTS]
    }
    first_name = {id(param): name for name, param in empty.named_parameters()}
    weights = {  # a tied head has the tensor of the embedding
        name: state[WEIGHTS][first_name[id(param)]]
        for name, param in empty.named_parameters(remove_duplicate=False)
    }
    optimizer = {"state": moments, "param_groups": [{**group, "params": list(moments)}]}
    for part, content in (
        ("pytorch_model_fsdp_0", {"model": weights}),
        ("optimizer_0", {"optimizer": optimizer}),
    ):
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder / part), no_dist=True)


def _write_for_deepspeed(
    source: Checkpoint, empty: torch.nn.Module, new: Path, group: dict[str, Any], num_ranks: int
) -> None:
    """Write a universal checkpoint: DeepSpeed reads it under ZeRO-1, 2 and 3 with `load_universal: true`.

    Its layout is read by deepspeed/checkpoint/universal_checkpoint.py and
    `load_hp_checkpoint_state_from_checkpoint_dir_stage3` of 0.19.8.
    """
    import deepspeed

    folder, shapes = new / "pytorch_model", {}
    for name, param in empty.named_parameters():
        shapes[name] = param.shape
        (folder / "zero" / name).mkdir(parents=True)
        for kind, file in ((WEIGHTS, "fp32"), *((kind, kind) for kind in MOMENTS)):
            tensor = _tensor(source, kind, name, param)
            torch.save({"param": tensor}, folder / "zero" / name / f"{file}.pt")
        torch.save(_steps(source), folder / "zero" / name / "step.pt")
    of_zero3 = {"state": {0: {"step": _steps(source)}}, "param_groups": [group]}
    of_all = {"ds_version": deepspeed.__version__, "param_groups": [group]}
    torch.save({**of_all, "optimizer_state_dict": of_zero3}, folder / "zero" / "optimizer_state.pt")
    manifest = source.manifest
    unused = ("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "frozen_param_shapes")
    described = {
        **dict.fromkeys((*unused, "frozen_param_fragments")),
        "module": {},
        "buffer_names": [],
        "shared_params": {},
        "param_shapes": [shapes],
        "global_steps": manifest.step,
        "skipped_steps": manifest.step - manifest.optimizer_steps,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": deepspeed.__version__,
    }
    for name in ("mp_rank_00", *(f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(num_ranks))):
        torch.save(described, folder / f"{name}_model_states.pt")
    (new / "latest_universal").write_text(folder.name)


def _adamw_group(source: Checkpoint, learning_rate: float | None) -> dict[str, Any]:
    """Return AdamW's options as a group of torch's state. Raises ValueError if Muon trained it."""
    if (rule := rule_of(source.manifest.run.get("optim", "adamw"))) != "adamw":
        raise ValueError(
            f"{source.path} was trained with --optim {rule}; what is written here has AdamW's two moments\n"
            "hint: --to hf_model"
        )
    options = _adamw_options(source)
    if learning_rate is not None:
        options["lr"] = learning_rate
    if "lr" not in options:
        raise ValueError(
            f"{source.path} does not contain the learning rate, which the rewritten checkpoint needs\n"
            "hint: give it as --learning_rate"
        )
    return torch.optim.AdamW([torch.zeros(1)], **options).state_dict()["param_groups"][0]


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
    return {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }


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
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    found = source.manifest.num_elements
    if differing := sorted(each for each in {*sizes, *found} if sizes.get(each) != found.get(each)):
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(
            f"{path} is not of {name}; these parameters differ: {', '.join(differing[:3])}{more}\n"
            "hint: give its own model as --model"
        )
    return model


def _whole(source: Checkpoint, model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Return all tensors of one kind in fp32, by parameter."""
    return {name: _tensor(source, kind, name, param) for name, param in model.named_parameters()}


def _tensor(source: Checkpoint, kind: str, name: str, param: torch.Tensor) -> torch.Tensor:
    return source.reader.read(f"{kind}/{name}", 0, param.numel()).float().reshape(param.shape)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder beside `output`, which gets its name at the end. It is deleted if anything fails."""
    if output.exists():
        raise ValueError(f"{output} exists, and nothing is overwritten\nhint: give another --output")
    unfinished = output.parent / f".{output.name}.unfinished"
    delete(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(output)
    except (RuntimeError, SafetensorError, CheckpointException) as error:  # these hide an error of the disk
        said = str(error).strip().splitlines()
        raise ValueError(
            f"can't write {output}: {said[0] if said else type(error).__name__}\nhint: check its disk"
        ) from None
    finally:
        delete(unfinished)
