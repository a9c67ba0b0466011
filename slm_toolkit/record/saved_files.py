"""What a run saves in its folder that a later run must not replace unasked: checkpoints, a model."""

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
"in a saved model's folder: the paths of the files that the run wrote there"
_FINISHED = re.compile(r"step_(\d+)|\.step_(\d+)\.replaced")


def finished(folder: Path) -> list[Path]:
    """The checkpoints of a folder, whole or since damaged, by step."""
    found = {path: match for path in folder.glob("*step_*") if (match := _FINISHED.fullmatch(path.name))}
    present = {path for path in found if not (folder / path.name.removesuffix(".replaced")[1:]).exists()}
    return sorted(present, key=lambda path: int(found[path][1] or found[path][2]))


def beside_model(model: Path, state: str) -> Path:
    """Where a model is while it is `unfinished` or being `deleted`, or once it is `replaced`."""
    return model.with_name(f".{MODEL_DIR}.{state}")


def saved_model(run_dir: Path) -> Path | None:
    """The folder of the final model that an earlier run saved; None if there is none."""
    model = run_dir / MODEL_DIR
    # a kill between two renames leaves the model under the second name
    places = (model, beside_model(model, "replaced"))
    return next((place for place in places if place.is_dir() and any(place.iterdir())), None)


def list_model_files(model: Path) -> None:
    """Write down which files a model that has just been saved consists of."""
    names = sorted(str(path.relative_to(model)) for path in _files(model))
    (model / MODEL_FILES).write_text(json.dumps({"files": [*names, MODEL_FILES]}) + "\n")


def check_replaceable(model: Path) -> None:
    """Raises ValueError where a saved model must not take the place of `model`: a link, or a folder with a
    file that no run wrote. Empty files are nothing to lose."""
    if model.is_symlink():
        raise ValueError(
            f"{model} is a link, and no run replaces what lies outside its own folder\n"
            "hint: remove the link; --output_dir on another disk puts the whole run there"
        )
    written = {model / name for name in _listed(model)}
    if kept := [path for path in _files(model) if path not in written and path.lstat().st_size]:
        raise ValueError(
            f"{kept[0]} was not written by a run, which would delete it to save its model\n"
            f"hint: move {model} away, or start with another --run_name"
        )


def delete_model(model: Path) -> None:
    """Delete a run's model, where there is one, so that a kill leaves no half of it under its name. Raises
    ValueError as `check_replaceable` does."""
    check_replaceable(model)
    if model.exists():
        deleted = beside_model(model, "deleted")
        delete(deleted)
        model.rename(deleted)
        delete(deleted)


def model_damage(model: Path) -> str | None:
    """What a saved model lacks; None where every file that was written is there and none is empty."""
    if not (files := _files(model)):
        return f"{model} is empty" if model.is_dir() else f"there is no {model}"
    if lost := [path for path in map(model.__truediv__, _listed(model)) if path not in files]:
        return f"{lost[0]} is missing"
    empty = [path for path in files if not path.lstat().st_size]
    return f"{empty[0]} is empty" if empty else None


def _listed(model: Path) -> list[str]:
    """The files of a model by its own list; none of one that lists nothing, as an older version wrote it."""
    try:
        names = json_of(read_text(model / MODEL_FILES, hint=""), MODEL_FILES, hint="")["files"]
        return [str(name) for name in names]
    except (ValueError, LookupError, TypeError):
        return []


def _files(model: Path) -> list[Path]:
    """All that is no folder in a model's folder, or in the place of it."""
    if model.is_dir():
        return sorted(path for path in model.rglob("*") if path.is_symlink() or not path.is_dir())
    return [model] if os.path.lexists(model) else []


def delete(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link, the link. What can't be removed stays."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_checkpoints(folder: Path) -> None:
    """Remove the checkpoints that a killed run left half written or half deleted."""
    leftovers = [*folder.glob(".step_*.unfinished"), *folder.glob(".step_*.deleted")]
    leftovers += [
        old for old in folder.glob(".step_*.replaced") if (folder / old.name.split(".")[1]).exists()
    ]
    for leftover in leftovers:
        delete(leftover)


def sweep(run_dir: Path) -> None:
    """Remove what a killed run left half written or half deleted, before a run trains in its folder."""
    sweep_checkpoints(run_dir / CHECKPOINTS_DIR)
    for state in ("unfinished", "deleted"):
        delete(beside_model(run_dir / MODEL_DIR, state))
    for pattern in (f".{RECORD_FILE}.*", Path(PROGRESS_FILE).with_suffix(".new").name):
        for path in run_dir.glob(pattern):
            delete(path)
