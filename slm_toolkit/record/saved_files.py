"""Find, check, replace and delete the checkpoints and the model that a run saved in its folder."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from slm_toolkit.base.user_files import json_of, read_text
from slm_toolkit.record.run_record import PROGRESS_FILE, RECORD_FILE

CHECKPOINTS_DIR, MODEL_DIR = "checkpoints", "model"
MODEL_FILES = "slm_toolkit.json"
"file in a saved model's folder that lists the files written by the run"
_FINISHED = re.compile(r"step_(\d+)|\.step_(\d+)\.replaced")


def finished(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder in order of step; they may have been damaged since."""
    matches = {path: match for path in folder.glob("*step_*") if (match := _FINISHED.fullmatch(path.name))}
    present = {path for path in matches if not (folder / path.name.removesuffix(".replaced")[1:]).exists()}
    return sorted(present, key=lambda path: int(matches[path][1] or matches[path][2]))


def beside_model(model: Path, state: str) -> Path:
    """Return the path of a model in another state: `unfinished` or `replaced`."""
    return model.with_name(f".{MODEL_DIR}.{state}")


def saved_model(run_dir: Path) -> Path | None:
    """Return the folder of the model that an earlier run saved; None if there is none."""
    model = run_dir / MODEL_DIR
    # a run killed between two renames leaves the model under the second name
    places = (model, beside_model(model, "replaced"))
    return next((place for place in places if place.is_dir() and any(place.iterdir())), None)


def list_model_files(model: Path) -> None:
    """Write the list of a newly saved model's files into its folder."""
    names = sorted(str(path.relative_to(model)) for path in _files(model))
    (model / MODEL_FILES).write_text(json.dumps({"files": [*names, MODEL_FILES]}) + "\n")


def check_replaceable(model: Path) -> None:
    """Raise ValueError if a saved model must not replace `model`.

    That is the case for a link, and for a folder with a file that no run wrote. Empty files don't count.
    """
    if model.is_symlink():
        raise ValueError(
            f"{model} is a link, and a run never replaces files outside its own folder\n"
            "hint: remove the link; to put the whole run on another disk, use --output_dir"
        )
    written = {model / name for name in _listed(model)}
    present = [model] if model.is_file() else _files(model)
    if kept := [path for path in present if path not in written and path.lstat().st_size]:
        raise ValueError(
            f"{kept[0]} was not written by a run, and saving the model would delete it\n"
            f"hint: move {model} away, or use another --run_name"
        )


def delete_model(model: Path) -> None:
    """Delete a run's model, if there is one. Raises ValueError as `check_replaceable` does."""
    check_replaceable(model)
    if model.exists():
        remove(model)


def model_damage(model: Path) -> str | None:
    """Return what is missing from a saved model; None if all its files exist and none is empty."""
    if not (files := _files(model)):
        return f"there is no model in {model}"
    if lost := [path for path in map(model.__truediv__, _listed(model)) if path not in files]:
        return f"{lost[0]} is missing"
    empty = [path for path in files if not path.lstat().st_size]
    return f"{empty[0]} is empty" if empty else None


def _listed(model: Path) -> list[str]:
    """Read a model's own list of files; empty for a model without a list, as older versions wrote it."""
    try:
        names = json_of(read_text(model / MODEL_FILES, hint=""), MODEL_FILES, hint="")["files"]
        return [str(name) for name in names]
    except (ValueError, LookupError, TypeError):
        return []


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.is_symlink() or not path.is_dir())


def delete(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (not its target). Ignores failures."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint or a model. Rename it first, so that a kill leaves no half of it under its name."""
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.deleted")
    delete(doomed)
    folder.rename(doomed)
    delete(doomed)


def put_in_place(finished_folder: Path, final: Path) -> None:
    """Rename a folder to its final name. An older folder of this name stays until then, even after a kill."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        delete(replaced)
        final.rename(replaced)
    finished_folder.rename(final)
    sync(final.parent)
    delete(replaced)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_checkpoints(folder: Path) -> None:
    """Remove checkpoints that a killed run left half written or half deleted."""
    leftovers = [*folder.glob(".step_*.unfinished"), *folder.glob(".step_*.deleted")]
    leftovers += [
        old for old in folder.glob(".step_*.replaced") if (folder / old.name.split(".")[1]).exists()
    ]
    for leftover in leftovers:
        delete(leftover)


def sweep(run_dir: Path) -> None:
    """Remove files that a killed run left half written or half deleted; called before a run trains here."""
    sweep_checkpoints(run_dir / CHECKPOINTS_DIR)
    of_model = (f".{MODEL_DIR}.unfinished", f".{MODEL_DIR}.*deleted")
    for pattern in (*of_model, f".{RECORD_FILE}.*", Path(PROGRESS_FILE).with_suffix(".new").name):
        for path in run_dir.glob(pattern):
            delete(path)
