"""A rank's failure as a record: out of memory told from the rest, a cause from what it caused."""

import dataclasses
import re
import time
from pathlib import Path

import torch

from slm_toolkit.record import RECORD_FILE, RunRecord
from slm_toolkit.record_files import read_record, write_record

OUT_OF_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE
)
"how CUDA, NCCL, cuBLAS, cuDNN and the CPU's allocator say it when it is not torch.OutOfMemoryError"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def write_failure(record: RunRecord, error: Exception, run_dir: Path, *, started: float) -> None:
    """Write why this rank failed, unless another rank of this launch did: its end broke ours off."""
    status = "oom" if is_out_of_memory(error) else "failed"
    path = run_dir / RECORD_FILE
    first = not path.is_file() or path.stat().st_mtime < started
    if first or (status == "oom" and read_record(path).status != "oom"):
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        seconds = time.time() - started
        write_record(
            dataclasses.replace(record, status=status, reason=reason, seconds_total=seconds), run_dir
        )
