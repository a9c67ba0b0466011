"""What the ranks of a run tell each other beside their gradients."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def gather_to_all(value: Any) -> list[Any]:
    """`value` of every rank, in order of rank; in a rehearsal of rank 0 alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def rank_0_first(work: Callable[[], Result]) -> Result:
    """`work` on rank 0, then on the first rank of each other machine, then on the rest: who comes later finds
    caches, on a disk that the machines share or on each one's own. A ValueError of one is raised on all."""
    if not torch.distributed.is_initialized():
        return work()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    turn = 0 if torch.distributed.get_rank() == 0 else 1 if is_first else 2
    result = None
    for going in range(3):
        problem = None
        if going == turn:
            try:
                result = work()
            except ValueError as error:
                problem = str(error)
        if found := next((problem for problem in gather_to_all(problem) if problem), None):
            raise ValueError(found)
    return result
