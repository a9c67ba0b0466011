"""A run's folder: its lock, whether the run in it has ended, how it is emptied, the model saved in it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.base.safe_files import hold
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE
from slm_toolkit.record.saved_files import (
    CHECKPOINTS_DIR,
    beside_model,
    check_replaceable,
    delete,
    delete_model,
    finished,
    list_model_files,
    saved_model,
    sweep_checkpoints,
    sync,
)
from slm_toolkit.run.checkpoint.files import remove
from slm_toolkit.run.model.adapters import save_merged


def has_ended(run_dir: Path, identity: str | None = None) -> bool:
    """Whether the folder holds the record of a finished run; with `identity`, of that very run."""
    try:
        record = read_record(run_dir / RECORD_FILE)
    except ValueError:  # there is none, or it has another version
        return False
    return record.status == "ok" and identity in (None, record.identity)


def check_writable(run_dir: Path) -> None:
    """Raises ValueError if the run's folder, or a file in it, can't be made; leaves nothing behind."""
    there = next(place for place in (run_dir, *run_dir.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"can't write into {run_dir}: {error.strerror}\nhint: --output_dir and --run_name say where"
        ) from None


_LOCK_FILE = ".train.lock"
_held: dict[Path, IO[str]] = {}
"locks that this process holds until it ends"


def hold_run(run_dir: Path) -> None:
    """Keep other trainings out of a run's folder until this process ends; call it on rank 0.

    Raises ValueError if another training holds the folder.
    """
    _hold(run_dir, "is training in", "--run_name trains in another folder")


def hold_swap_folder(folder: Path) -> None:
    """Keep other trainings from swapping to `folder` as `hold_run` does: they'd write to the same files."""
    _hold(folder, "swaps its tensors to", "name another nvme_path in the DeepSpeed JSON")


def _hold(folder: Path, does: str, way_out: str) -> None:
    if folder in _held:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _held[folder] = hold(folder / _LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"{error.strerror} {does} {folder}\nhint: wait until it has ended, or end it; {way_out}"
        ) from None
    except OSError as error:
        where = folder / _LOCK_FILE
        raise ValueError(f"can't write {where}: {error.strerror}\nhint: is it a link?") from None


def remove_earlier_run(run_dir: Path, accelerator: Accelerator) -> None:
    """For --overwrite_output_dir: delete record, checkpoints and model of the earlier run. Every rank must
    call it, once the new run is set up and before it writes anything. Raises ValueError on rank 0.

    The record is deleted first, or a run that is killed after that would count as ended; the newest
    checkpoint is deleted last, so that after a kill the old run's newest is still there.
    """
    accelerator.wait_for_everyone()  # until no rank reads the folder
    if accelerator.is_main_process:
        try:
            (run_dir / RECORD_FILE).unlink(missing_ok=True)
            for checkpoint in finished(run_dir / CHECKPOINTS_DIR):
                remove(checkpoint)
            sweep_checkpoints(run_dir / CHECKPOINTS_DIR)
            while (model := saved_model(run_dir)) is not None:
                delete_model(model)
        except OSError as error:
            raise ValueError(
                f"--overwrite_output_dir can't delete {error.filename}: {error.strerror}\n"
                "hint: another --run_name starts in a new folder"
            ) from None
    accelerator.wait_for_everyone()


# The final model of a run, as a folder that Hugging Face's libraries load.


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
