"""A rank's failure as a record: out of memory told from the rest, a cause from what it caused."""

import dataclasses
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from slm_toolkit.record.files import read_record, write_record
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord

_LOOKED_AT = time.monotonic()
_AGE_SECONDS = max(0.0, time.time() - psutil.Process().create_time())
"when this module was imported: of an interpreter that was starting"


def seconds_since_start() -> float:
    """Of the process; what the system's date does meanwhile changes nothing."""
    return _AGE_SECONDS + time.monotonic() - _LOOKED_AT


OUT_OF_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE
)
"how CUDA, NCCL, cuBLAS, cuDNN and the CPU's allocator say it when it is not torch.OutOfMemoryError"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def record_mark(run_dir: Path) -> int | None:
    """What tells the record that lies in a run's folder from any that is written later; None: there is none.

    Two dates of one file system: which is earlier does not matter, and a clock may have been set between.
    """
    path = run_dir / RECORD_FILE
    return path.stat().st_mtime_ns if path.is_file() else None


def write_failure(record: RunRecord, error: Exception, run_dir: Path, *, mark: int | None) -> None:
    """Write why this rank failed, unless another rank of this launch did: its end broke ours off.

    `mark`: of the record that lay there before. A full disk takes no record: what is said has to do.
    """
    status = "oom" if is_out_of_memory(error) else getattr(error, "status", "failed")
    first = record_mark(run_dir) == mark
    if first or (status == "oom" and read_record(run_dir / RECORD_FILE).status != "oom"):
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed = dataclasses.replace(
            record, status=status, reason=reason, seconds_total=seconds_since_start()
        )
        with suppress(OSError):
            write_record(failed, run_dir)
