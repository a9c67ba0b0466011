"""Whether all ranks of a run hold the same weights, by checksums of every tensor that several ranks hold."""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from slm_toolkit.run.peers.step_exchange import gather_to_all

_MOST_NAMES = 5
"in a record: a fault of the exchange of gradients moves every tensor"


def weights_of_ranks(model: torch.nn.Module, *, step: int) -> dict[str, Any]:
    """What the ranks hold after `step`: every rank must call it, all get the same.

    num_compared: tensors that several ranks hold, parameters and buffers. num_different: of those, how many
    are not equal, bit by bit, on all of them; different: the names of the first. A shard that only one rank
    holds can't differ from anything; of hybrid sharding, the copies of a shard are compared.
    """
    of_ranks = gather_to_all(_checksums(model))
    sums: dict[tuple[str, Any], list[int]] = {}
    for of_rank in of_ranks:
        for key, checksum in of_rank.items():
            sums.setdefault(key, []).append(checksum)
    shared = {key: values for key, values in sums.items() if len(values) > 1}
    different = list(dict.fromkeys(name for (name, _), values in shared.items() if len(set(values)) > 1))
    return {
        "step": step,
        "num_compared": len(shared),
        "num_different": len(different),
        "different": different[:_MOST_NAMES],
    }


@torch.no_grad()
def _checksums(model: torch.nn.Module) -> dict[tuple[str, Any], int]:
    """By name and shard, the sum of a tensor's bits, read as integers; on this rank."""
    keys, sums = [], []
    flat = isinstance(model, FullyShardedDataParallel)  # FSDP1's parameters are shards without a mesh
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shard: Any = rank if flat else None
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            shard = tuple(
                coordinate[dim] for dim, placed in enumerate(tensor.placements) if not placed.is_replicate()
            )
            tensor = tensor.to_local()
        if tensor.numel():  # nothing of a parameter that ZeRO-3 holds in pieces
            keys.append((name.removeprefix("module."), shard))
            sums.append(_sum_of_bits(tensor))
    return dict(zip(keys, torch.stack(sums).tolist() if sums else [], strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
