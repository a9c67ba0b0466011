"""Sharding: the ranks and the devices that hold the training state, in the same words for all engines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "parallelism_config_"
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
"of accelerate 1.15's ParallelismConfig, which multiplies them: the product is the number of ranks"


@dataclass(frozen=True)
class Sharding:
    """The placement of the training state."""

    reshard_after_forward: bool = True
    "False: gathered parameters stay on the GPU until their backward"
    optimizer_device: str = "none"
    "none: on the GPU; cpu or nvme: master weights, moments and gradients are not; DeepSpeed's words"
    parameter_device: str = "none"
    copy_ranks: int | None = None
    "hybrid shard: ranks that share one copy of the state; None: all do"
    num_copies: int | None = None
    "hybrid shard: as the YAML has it"
    node_holds_copy: bool = False
    "FSDP1's hybrid shard: a copy per node"
    secondary_ranks: int = 1
    "hpZ: ranks that share a second copy of the parameters"
    zero_init: bool = False
    "ZeRO-3: no rank but the first builds the whole model on its host"

    @property
    def is_hybrid(self) -> bool:
        """Whether FSDP2 keeps several copies of the training state, each sharded over some ranks."""
        return (self.num_copies or 1) > 1

    def ranks_of_a_copy(self, *, num_gpus: int, gpus_per_node: int) -> int:
        """Ranks that the state is sharded over."""
        return gpus_per_node if self.node_holds_copy else self.copy_ranks or num_gpus

    def problems(self, *, num_gpus: int, gpus_per_node: int) -> list[str]:
        """Groups that don't divide the GPUs, as sentences."""
        problems = []
        ranks = self.ranks_of_a_copy(num_gpus=num_gpus, gpus_per_node=gpus_per_node)
        if self.num_copies is not None:
            sizes = {"dp_replicate_size": self.num_copies, "dp_shard_size": ranks}
            if product_problem(sizes, num_gpus):
                problems.append(f"{shown_sizes(sizes)} with --num_gpus {num_gpus}")
        if num_gpus % self.secondary_ranks:
            problems.append(f"zero_hpz_partition_size {self.secondary_ranks} with --num_gpus {num_gpus}")
        return problems


def parallel_sizes(section: Mapping[str, Any]) -> dict[str, int]:
    """The five sizes of a `parallelism_config`; 1, accelerate's default, where it names none."""
    return {name: section.get(PREFIX + name) or 1 for name in PARALLEL_SIZES}


def product_problem(sizes: Mapping[str, int], num_ranks: int) -> str | None:
    """Where sizes don't multiply to the number of ranks: `dp_shard_size 4 x tp_size 2 with 6 ranks`.

    accelerate 1.15 takes sizes of 1 for no groups, and leaves the count to DeepSpeed for sp_size above 1.
    """
    if math.prod(sizes.values()) in (1, num_ranks) or sizes.get("sp_size", 1) > 1:
        return None
    return f"{shown_sizes(sizes)} with {num_ranks} ranks"


def shown_sizes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
