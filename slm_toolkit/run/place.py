"""A run's folder: whether the run can be written there, and whether it has ended there before."""

import os
import tempfile
from pathlib import Path

from slm_toolkit.record import RECORD_FILE
from slm_toolkit.record_files import read_record


def has_ended(run_dir: Path, identity: str) -> bool:
    """Whether the record of the same run lies there, and is of one that did all its steps."""
    try:
        record = read_record(run_dir / RECORD_FILE)
    except ValueError:  # there is none, or of another version
        return False
    return record.status == "ok" and record.identity == identity


def check_writable(run_dir: Path) -> None:
    """Raises ValueError where a run's folder, or a file in it, can't be made; leaves nothing behind."""
    there = next(place for place in (run_dir, *run_dir.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"can't write into {run_dir}: {error.strerror}\nhint: --output_dir and --run_name say where"
        ) from None
