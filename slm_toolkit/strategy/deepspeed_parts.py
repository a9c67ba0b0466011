"""Name the parts of a DeepSpeed JSON that slm_toolkit does not run, with the reason for each.

Without this, they would change nothing, or more than the strategy, and estimates would not count them. The
reasons are from deepspeed 0.19.8: runtime/engine.py, runtime/zenflow, runtime/superoffload and
runtime/tensor_parallel. None was tried on a GPU.
"""

from collections.abc import Mapping
from typing import Any

from slm_toolkit.strategy.settings import value_at

_PARTS = {
    "compile.deepcompile": "DeepCompile begins when a script calls engine.compile(), and slm_toolkit does "
    "not call it, so nothing would be compiled: remove it; --kernels compiled compiles the layers",
    "tensor_parallel.autotp_size": "slm_toolkit does not run tensor parallelism, and would count the tokens "
    "of a group once per rank: remove it",
    "zero_optimization.zenflow": "ZenFlow applies most gradients some steps later, so its losses are not "
    "those of other strategies: remove it; without it, this is ZeRO-Offload",
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload has an AdamW of its own on the host "
    "and needs an NVIDIA GPU; nobody has run it here: remove it; without it, this is ZeRO-Offload",
}
"reasons by path in the JSON"


def part_problems(deepspeed: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each part that a JSON turns on and slm_toolkit does not run."""
    return [
        f"the DeepSpeed JSON has {path}: {why}"
        for path, why in _PARTS.items()
        if _is_on(value_at(deepspeed, path.split(".")))
    ]


def _is_on(value: Any) -> bool:
    """Return whether a switch is on, a section is there, or a number of ranks is above one."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value > 1 if is_number else value is True or isinstance(value, Mapping)
