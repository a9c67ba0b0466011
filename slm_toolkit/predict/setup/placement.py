"""Placement: which ranks hold the training state, and whether it lies on the GPU or in the host's RAM.

Offload, hybrid shards and hpZ are hypotheses: read off the engines' code, not measured.
"""

from dataclasses import dataclass
from typing import Any

from slm_toolkit.strategy.groups import check_groups, parallel_sizes, product_problem, shown_sizes
from slm_toolkit.strategy.strategy import Strategy


@dataclass(frozen=True)
class Placement:
    """What of the training state lies where."""

    optimizer_device: str = "none"
    "none: on the GPU; cpu or nvme: master weights, moments and gradients are not; DeepSpeed's words"
    parameter_device: str = "none"
    copy_ranks: int | None = None
    "hybrid shard: ranks that share one copy of the state; None: all do"
    num_copies: int | None = None
    "hybrid shard: as the YAML says"
    node_holds_copy: bool = False
    "FSDP1's hybrid shard: a copy per node"
    secondary_ranks: int = 1
    "hpZ: ranks that share a second copy of the parameters"
    zero_init: bool = False
    "ZeRO-3: no rank but the first builds the whole model on its host"

    def ranks_of_a_copy(self, *, num_gpus: int, gpus_per_node: int) -> int:
        """Ranks that the state is sharded over."""
        return gpus_per_node if self.node_holds_copy else self.copy_ranks or num_gpus

    def problems(self, *, num_gpus: int, gpus_per_node: int) -> list[str]:
        """Groups that don't divide the GPUs, as sentences."""
        found = []
        ranks = self.ranks_of_a_copy(num_gpus=num_gpus, gpus_per_node=gpus_per_node)
        if self.num_copies is not None:
            sizes = {"dp_replicate_size": self.num_copies, "dp_shard_size": ranks}
            if product_problem(sizes, num_gpus):
                found.append(f"{shown_sizes(sizes)} with --num_gpus {num_gpus}")
        if num_gpus % self.secondary_ranks:
            found.append(f"zero_hpz_partition_size {self.secondary_ranks} with --num_gpus {num_gpus}")
        return found


def placement_of(strategy: Strategy) -> Placement:
    """Read from the YAML and the JSON. Raises ValueError for what no estimate covers."""
    accelerate = strategy.accelerate_config or {}
    parallelism = accelerate.get("parallelism_config") or {}
    if strategy.engine == "deepspeed":
        zero = (strategy.deepspeed_config or {}).get("zero_optimization", {})
        is_zero_3 = strategy.zero_stage == 3
        section = accelerate.get("deepspeed_config") or {}
        if strategy.zero_stage == 0:
            raise ValueError(
                f"{strategy.path}: no estimate of ZeRO stage 0\nhint: stages 1 to 3; ddp shards nothing"
            )
        return Placement(
            optimizer_device=_device(zero.get("offload_optimizer")),
            parameter_device=_device(zero.get("offload_param")) if is_zero_3 else "none",
            secondary_ranks=zero.get("zero_hpz_partition_size") or 1 if is_zero_3 else 1,
            zero_init=is_zero_3 and _is_true(section.get("zero3_init_flag")),
        )
    if strategy.engine not in ("fsdp1", "fsdp2"):
        return Placement()
    fsdp = accelerate.get("fsdp_config") or {}
    device = "cpu" if _is_true(fsdp.get("fsdp_offload_params")) else "none"
    if strategy.engine == "fsdp1":
        return Placement(device, device, node_holds_copy="HYBRID" in fsdp1_sharding(strategy))
    return Placement(device, device, *_hybrid(parallelism, strategy))


def fsdp1_sharding(strategy: Strategy) -> str:
    """torch's name of how FSDP1 shards, in the YAML by name or number."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    fsdp = (strategy.accelerate_config or {}).get("fsdp_config") or {}
    said = fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    by_word = {
        **{str(number): name for number, name in enumerate(names, 1)},
        **{name: name for name in names},
    }
    name = by_word.get(str(said).upper())
    if name is None or name == "NO_SHARD":
        raise ValueError(
            f"{strategy.path}: fsdp_sharding_strategy is {said!r}\n"
            f"hint: one of {', '.join(names[:2] + names[3:])}; without shards it is MULTI_GPU"
        )
    return name


def _device(section: dict[str, Any] | None) -> str:
    return (section or {}).get("device") or "none"


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _hybrid(parallelism: dict[str, Any], strategy: Strategy) -> tuple[int | None, int | None]:
    """Ranks per copy and copies, of accelerate's parallelism_config; None without."""
    where = f"{strategy.path}: parallelism_config"
    if not isinstance(parallelism, dict):
        raise ValueError(f"{where} is {parallelism!r}\nhint: it holds settings, one per indented line")
    for name, size in parallelism.items():
        if name.endswith("_size") and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{where}.{name} is {size!r}\nhint: write a whole number of at least 1")
    check_groups(strategy)
    sizes = parallel_sizes(parallelism)
    copies, ranks = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if copies > 1 and ranks == 1:
        raise ValueError(f"{where}: dp_replicate_size {copies} without shards\nhint: that is MULTI_GPU")
    return (ranks, copies) if ranks > 1 else (None, None)
