"""Errors of a run that are nobody's bug, in a line: a folder that can't be written, data that went bad."""

import os
import shutil
import tempfile
from pathlib import Path

from slm_toolkit.base.errors import DISK_FULL, SAYS_DISK_FULL
from slm_toolkit.run.data.bad_data import BadData, first_line

_LITTLE_BYTES = 2**20


def one_line(error: BaseException, run_dir: Path | None) -> str | None:
    """What to say of it, with a hint on a second line; None for a bug, whose traceback says more."""
    if isinstance(error, BadData):  # of a DataLoader's worker after the worker's traceback
        return str(error).rpartition(f"{BadData.__module__}.{BadData.__name__}: ")[2]
    chain, cause = [], error
    while cause is not None and not any(cause is link for link in chain):  # pynvml's errors can't be compared
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    full = next((link for link in chain if _is_disk_full(link)), None)
    if full is not None:
        return _no_room(full, run_dir)
    barred = next((link for link in chain if run_dir is not None and _is_of(link, run_dir)), None)
    return barred and (
        f"can't write {barred.filename}: {barred.strerror}\n"
        f"hint: is {run_dir} still there, and its disk writable?"
    )


def _is_of(error: BaseException, run_dir: Path) -> bool:
    """Whether it is the system's, about a file in the run's folder."""
    names = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    return any(isinstance(name, str) and Path(name).is_relative_to(run_dir) for name in names)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL
    return SAYS_DISK_FULL.search(str(error)) is not None


def _no_room(error: BaseException, run_dir: Path | None) -> str:
    """A write names no file, but its disk is one that is full now: the run's, of caches, of scratch files."""
    named, reason = (error.filename, error.strerror) if isinstance(error, OSError) else (None, None)
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = [Path(named)] if named else [run_dir or Path.cwd(), cache, Path(tempfile.gettempdir())]
    free = [(_free_bytes(place), place) for place in places]
    full = [found for found in free if found[0] < _LITTLE_BYTES]
    free_bytes, place = (full or free)[0]
    return (
        f"no room to write {'' if named else 'under '}{place} ({free_bytes:,} bytes free now): "
        f"{reason or first_line(error)}\n"
        "hint: free some, or --output_dir on another disk, with fewer checkpoints kept (--save_total_limit)"
    )


def _free_bytes(place: Path) -> int:
    folder = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return shutil.disk_usage(folder).free
