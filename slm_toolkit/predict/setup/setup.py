"""Setup: everything that an estimate depends on, from the model to the price of the GPUs."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.calibration import Calibration, calibration_of
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import Cluster, cluster_of
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import Adapters, Weights, adapters_of, weights_of
from slm_toolkit.predict.setup.dtypes import Dtypes, compute_of, dtypes_of
from slm_toolkit.predict.setup.placement import placement_of
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.sharding import Sharding
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.hardware.prices import Price

MANY_RANKS = 2**40
"a share over so many ranks is less than a byte: what a rank still holds is not sharded"


@dataclass(frozen=True)
class Site:
    """The network between the GPUs, and their price. None: the GPU's usual network, no price."""

    cluster: Cluster | None = None
    price: "Price | None" = None


@dataclass(frozen=True)
class Setup:
    """A model and its configuration on certain GPUs.

    The closed forms of predict/memory and predict/speed need a setup as it is launched: see `launched`.
    Reading a property raises ValueError where no closed form covers the strategy or a flag.
    """

    spec: ModelSpec
    strategy: Strategy
    config: RunConfig
    "with its defaults filled in"
    num_gpus: int
    gpus_per_node: int = 8
    "of a full node; a smaller job takes part of one"
    gpu: Gpu | None = None
    "None: bytes are estimated, nothing else"
    software: str = "2026"
    "generation of torch and transformers, a key of `predict.speed.software.SOFTWARE`"
    site: Site = field(default=Site(), hash=False)  # a measured network holds dicts

    @property
    def launched(self) -> "Setup":
        """The same setup as a launch runs it: groups of ranks sized, settings of the user's files applied."""
        strategy = fit_groups(self.strategy, num_ranks=self.num_gpus, ranks_per_node=self.ranks_per_node)
        return dataclasses.replace(self, strategy=strategy, config=config_as_launched(self.config, strategy))

    @property
    def ranks_per_node(self) -> int:
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.ranks_per_node

    @cached_property
    def placement(self) -> Sharding:
        return placement_of(self.strategy)

    @cached_property
    def shard_ranks(self) -> int:
        """Ranks that the training state is sharded over."""
        return self.placement.ranks_of_a_copy(num_gpus=self.num_gpus, gpus_per_node=self.ranks_per_node)

    @property
    def gpu_state_ranks(self) -> int:
        """`shard_ranks` of what the GPUs hold: a share of an offloaded optimizer is next to nothing."""
        return self.shard_ranks if self.placement.optimizer_device == "none" else MANY_RANKS

    @cached_property
    def adapters(self) -> Adapters | None:
        return adapters_of(self.spec, self.config)

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.spec, self.adapters)

    @cached_property
    def dtypes(self) -> Dtypes:
        return dtypes_of(self.strategy, self.config)

    @cached_property
    def compute(self) -> str:
        """BF16, AUTOCAST or FP32 of `dtypes.py`."""
        return compute_of(self.config.numerics, self.strategy.engine)

    @property
    def num_tokens(self) -> int:
        """Tokens of one micro-step on one rank."""
        return self.config.per_device_train_batch_size * self.config.seq_len

    @cached_property
    def calibration(self) -> Calibration:
        """What was measured on this GPU under this software."""
        return calibration_of(self.gpu.name if self.gpu else None, self.software)

    @cached_property
    def cluster(self) -> Cluster | None:
        """What connects the GPUs: the site's network, else the GPU's usual one."""
        return self.site.cluster or (cluster_of(self.gpu) if self.gpu else None)


def with_flags(setup: Setup, **flags: Any) -> Setup:
    """The setup with other values of some flags, fields of RunConfig by their names."""
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, **flags))


def config_as_launched(config: RunConfig, strategy: Strategy) -> RunConfig:
    """FSDP's own checkpointing, and in `stock` the JSON's accumulation."""
    changes: dict[str, Any] = {}
    if strategy.checkpoints_activations:
        changes["gradient_checkpointing"] = "full"
    steps = strategy.deepspeed.num_micro_steps if strategy.deepspeed else None
    if config.numerics == "stock" and steps is not None:
        changes["gradient_accumulation_steps"] = steps
    return dataclasses.replace(config, **changes) if changes else config
