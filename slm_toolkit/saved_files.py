"""What a run saves in its folder that a later run must not replace unasked: checkpoints, a model."""

import re
from pathlib import Path

CHECKPOINTS_DIR, MODEL_DIR = "checkpoints", "model"
_FINISHED = re.compile(r"step_(\d+)|\.step_(\d+)\.replaced")


def finished(folder: Path) -> list[Path]:
    """The checkpoints of a folder, whole or since damaged, by step."""
    found = {path: match for path in folder.glob("*step_*") if (match := _FINISHED.fullmatch(path.name))}
    present = {path for path in found if not (folder / path.name.removesuffix(".replaced")[1:]).exists()}
    return sorted(present, key=lambda path: int(found[path][1] or found[path][2]))


def saved_model(run_dir: Path) -> Path | None:
    """The folder of the final model that an earlier run saved; None if there is none."""
    folder = (run_dir / MODEL_DIR).resolve()  # may be a link to another disk
    # a kill between two renames leaves the model under the second name
    places = (folder, folder.with_name(f".{folder.name}.replaced"))
    return next((place for place in places if place.is_dir() and any(place.iterdir())), None)
