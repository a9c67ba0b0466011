"""What `train` says of a rank it has lost, and `compare` reads: how it ended, where it hung."""

import re
from collections.abc import Sequence
from pathlib import Path

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
