"""Write a rank's failure into the run's record: only the first cause, and whether it is out of memory."""

import dataclasses
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from slm_toolkit.base.errors import OUT_OF_MEMORY, first_line
from slm_toolkit.record.files import read_record, write_record
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord

_LOOKED_AT = time.monotonic()
_AGE_SECONDS = max(0.0, time.time() - psutil.Process().create_time())
"how old this process was when this module was imported"


def seconds_since_start() -> float:
    """Return the age of this process. A change of the system's clock does not affect it."""
    return _AGE_SECONDS + time.monotonic() - _LOOKED_AT


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def record_mark(run_dir: Path) -> int | None:
    """Return a mark that changes each time the record in a run's folder is written; None if there is none.

    The mark is the file's date. Compare marks only for equality, because a clock may have been set back.
    """
    path = run_dir / RECORD_FILE
    return path.stat().st_mtime_ns if path.is_file() else None


def write_failure(record: RunRecord, error: Exception, run_dir: Path, *, mark: int | None) -> None:
    """Write why this rank failed, unless another rank has: that rank's failure caused this one.

    An out-of-memory error still replaces another failure. `mark`: the `record_mark` from before the launch.
    Writes nothing if the disk is full; the printed message remains.
    """
    status = "oom" if is_out_of_memory(error) else getattr(error, "status", "failed")
    first = record_mark(run_dir) == mark
    if first or (status == "oom" and read_record(run_dir / RECORD_FILE).status != "oom"):
        failed = dataclasses.replace(
            record, status=status, reason=first_line(error), seconds_total=seconds_since_start()
        )
        with suppress(OSError):
            write_record(failed, run_dir)
