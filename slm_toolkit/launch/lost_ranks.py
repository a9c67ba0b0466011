"""What a rank writes when it is lost or asked where it is, for `slm compare` to read."""

import faulthandler
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from slm_toolkit.record.run_record import RUN_DIR_VARIABLE, STACK_FILES

KILLED_OR_CRASHED = "was killed or crashed"
"of a process that ended without a word; who started it knows by which signal"
_WAITING = re.compile(
    r"torch/distributed/|torch/autograd/graph\.py|torch/cuda/(streams|__init__)\.py|deepspeed/comm/|"
    r"slm_toolkit/run/lookout\.py"
)
"files whose innermost frames wait for other ranks: collectives, those of a backward, the GPU's own"


def waits_for_others(frames: Sequence[str]) -> bool:
    """Whether a stack, `file:line in function`, innermost first, is that of a rank in a collective."""
    return any(_WAITING.search(frame) for frame in frames[:2])


def place_of(frames: Sequence[str]) -> str:
    """The innermost frame, with the last two parts of its path."""
    path, _, rest = frames[0].rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{rest}"


def answer_signals() -> None:
    """In a process that `slm compare` started; elsewhere nothing happens."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is None or not hasattr(signal, "SIGUSR1"):  # Windows
        return
    before, between, after = STACK_FILES.split("*")
    name = f"{before}{os.environ.get('RANK', '0')}{between}{os.getpid()}{after}"
    # stays open: written to from within a signal handler; one thread only, the one that trains
    file = os.open(Path(run_dir, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
