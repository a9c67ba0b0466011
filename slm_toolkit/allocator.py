"""Which memory allocator this process runs on: on a CPU it takes as much of a step's time as the kernels."""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT = "malloc"
_LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")
ADVICE = (
    "note: the C library's malloc maps large tensors anew at every step, which may take half of a CPU's "
    "time; `LD_PRELOAD=libtcmalloc_minimal.so.4` (Debian: libtcmalloc-minimal4) or THP_MEM_ALLOC_ENABLE=1 "
    "before the command does without"
)
"for who trains on a CPU under the default; measured in the README"


def advise(console: "Console") -> None:
    """Tell who is about to train on a CPU under the default."""
    if allocator() == DEFAULT:
        console.print(ADVICE, soft_wrap=True)


@cache
def allocator() -> str:
    """The C library's `malloc`, or a library put in its place, and PyTorch's settings where there are any.

    Children inherit all of it with the environment.
    """
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    found = next((name for name in _LIBRARIES if f"lib{name}" in loaded), DEFAULT)
    if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
        found += ", huge pages"
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return f"{found}, {settings}" if settings else found
