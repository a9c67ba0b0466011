"""A run's folder: lock it, see whether its run has ended, empty it, save the final model in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
    put_in_place,
    remove,
    saved_model,
    sweep_checkpoints,
    sync,
)

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def has_ended(run_dir: Path, identity: str | None = None) -> bool:
    """Return True if the folder contains the record of a finished run; with `identity`, of that very run."""
    try:
        record = read_record(run_dir / RECORD_FILE)
    except ValueError:  # no record, or one of another version
        return False
    return record.status == "ok" and identity in (None, record.identity)


def check_writable(run_dir: Path) -> None:
    """Raise ValueError if the run's folder, or a file in it, can't be created. Leaves no file behind."""
    existing = next(place for place in (run_dir, *run_dir.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"can't write into {run_dir}: {error.strerror}\n"
            "hint: choose another folder with --output_dir or --run_name"
        ) from None


_LOCK_FILE = ".train.lock"
_held: dict[Path, IO[str]] = {}
"locks that this process holds until it ends"


def hold_run(run_dir: Path) -> None:
    """Lock a run's folder against other trainings until this process ends. Call it on rank 0.

    Raises ValueError if another training has locked the folder.
    """
    _hold(run_dir, "is training in", "train in another folder with --run_name")


def hold_swap_folder(folder: Path) -> None:
    """Lock the swap folder like `hold_run`, because two trainings would write to the same files."""
    _hold(folder, "swaps its tensors to", "name another nvme_path in the DeepSpeed JSON")


def _hold(folder: Path, does: str, way_out: str) -> None:
    if folder in _held:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _held[folder] = hold(folder / _LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"{error.strerror} {does} {folder}\nhint: wait until it has ended, or stop it, or {way_out}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"can't write {folder / _LOCK_FILE}: {error.strerror}\nhint: check whether it is a link"
        ) from None


def remove_earlier_run(run_dir: Path, accelerator: Accelerator) -> None:
    """Delete the earlier run's record, checkpoints and model, for --overwrite_output_dir.

    Every rank must call it, after the new run is set up and before it writes anything. Raises ValueError on
    rank 0. The record is deleted first: otherwise, after a kill, the earlier run would count as ended. The
    newest checkpoint is deleted last, so that after a kill the earlier run can still resume from it.
    """
    accelerator.wait_for_everyone()  # until no rank reads the folder any more
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
                "hint: use another --run_name to start in a new folder"
            ) from None
    accelerator.wait_for_everyone()


# Save the final model of a run as a folder that Hugging Face's libraries load.


def check_apart(source: Path, target: Path) -> None:
    """Raise ValueError if the run would save its model over the weights that it starts from."""
    if source.resolve().is_relative_to(target):
        raise ValueError(
            f"--model {source} would be overwritten: this run saves its final model there\n"
            "hint: use another --run_name or --output_dir, or --save_final_model false"
        )


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: Any,
    folder: Path,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, in the dtype of the computation.

    A model with an adapter is written as peft's adapter folder.
    """
    from slm_toolkit.run.model.padding import config_without_padding, without_padding

    state_dict = accelerator.get_state_dict(model)  # a collective: shards are gathered to rank 0
    if accelerator.is_main_process:
        hf_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        state_dict = dict(without_padding(hf_model, state_dict.items()))
        floats = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
        hf_model.config.dtype = floats.pop() if len(floats) == 1 else None
        with _in_place_of(folder) as unfinished, config_without_padding(hf_model):
            hf_model.save_pretrained(unfinished, state_dict=state_dict)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
    accelerator.wait_for_everyone()
    return folder


@contextmanager
def _in_place_of(model: Path) -> Iterator[Path]:
    """Yield a folder to write into; once it is on disk, it replaces the `model` of an earlier run.

    Raises RunEnded if the existing folder was not written by a run.
    """
    unfinished, replaced = (beside_model(model, state) for state in ("unfinished", "replaced"))
    try:
        check_replaceable(model)
        check_replaceable(replaced)
    except ValueError as error:
        raise RunEnded(str(error)) from None
    if replaced.exists() and not model.exists():  # an earlier run was killed between the two renames below
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
    put_in_place(unfinished, model)
