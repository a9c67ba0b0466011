"""What the ranks of a run tell each other beside their gradients."""

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
    """`work` on rank 0, then on the others, who find its caches; a ValueError of rank 0 is raised on all."""
    distributed = torch.distributed.is_initialized()
    if distributed and torch.distributed.get_rank() > 0:
        if error := next((error for error in gather_to_all(None) if error), None):
            raise ValueError(error)
        return work()
    try:
        result = work()
    except ValueError as error:
        gather_to_all(str(error))
        raise
    gather_to_all(None)
    return result
