"""Sharding: the ranks and devices that store the training state, with the same fields for all engines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "parallelism_config_"
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
"sizes in accelerate 1.15's ParallelismConfig; their product is the number of ranks"


@dataclass(frozen=True)
class Sharding:
    """Placement of the training state: devices, and groups of ranks."""

    reshard_after_forward: bool = True
    "False: gathered parameters stay on the GPU until their backward"
    optimizer_device: str = "none"
    "none: GPU; cpu or nvme: master weights, moments and gradients are offloaded (DeepSpeed's names)"
    parameter_device: str = "none"
    copy_ranks: int | None = None
    "hybrid shard: ranks that share one copy of the state; None: all ranks share it"
    num_copies: int | None = None
    "hybrid shard: number of copies in the YAML"
    node_holds_copy: bool = False
    "FSDP1's hybrid shard: one copy per node"
    secondary_ranks: int = 1
    "hpZ: ranks that share a second copy of the parameters"
    zero_init: bool = False
    "ZeRO-3: only rank 0 builds the whole model in host RAM"

    @property
    def is_hybrid(self) -> bool:
        """Whether FSDP2 keeps several copies of the training state, each sharded over some ranks."""
        return (self.num_copies or 1) > 1

    def ranks_of_a_copy(self, *, num_gpus: int, gpus_per_node: int) -> int:
        """Return the number of ranks over which one copy of the state is sharded."""
        return gpus_per_node if self.node_holds_copy else self.copy_ranks or num_gpus


def parallel_sizes(section: Mapping[str, Any]) -> dict[str, int]:
    """Return the five sizes of a `parallelism_config`; an absent size is 1, accelerate's default."""
    return {name: section.get(PREFIX + name) or 1 for name in PARALLEL_SIZES}


def product_problem(sizes: Mapping[str, int], num_ranks: int) -> str | None:
    """Return `dp_shard_size 4 x tp_size 2 with 6 ranks` if the product is not the number of ranks, else None.

    accelerate 1.15 makes no groups if all sizes are 1. DeepSpeed checks the sizes if sp_size is above 1.
    """
    if math.prod(sizes.values()) in (1, num_ranks) or sizes.get("sp_size", 1) > 1:
        return None
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{shown} with {num_ranks} ranks"
