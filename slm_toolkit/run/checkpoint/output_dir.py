"""A run's folder: its lock, whether the run in it has ended, and how it is emptied."""

import os
import tempfile
from pathlib import Path
from typing import IO

from accelerate import Accelerator

from slm_toolkit.base.safe_files import hold
from slm_toolkit.record.files import read_record
from slm_toolkit.record.run_record import RECORD_FILE
from slm_toolkit.record.saved_files import (
    CHECKPOINTS_DIR,
    delete_model,
    finished,
    saved_model,
    sweep_checkpoints,
)
from slm_toolkit.run.checkpoint.files import remove


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
    if run_dir in _held:
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _held[run_dir] = hold(run_dir / _LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"{error.strerror} is training in {run_dir}\n"
            "hint: wait until it has ended, or end it; --run_name trains in another folder"
        ) from None
    except OSError as error:
        where = run_dir / _LOCK_FILE
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
