"""Setup: everything that an estimate depends on, from the model to the price of the GPUs."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.hardware.calibration import Calibration, calibration_of
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import Cluster, cluster_of
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import Adapters, Weights, adapters_of, unknown_targets, weights_of
from slm_toolkit.strategy.groups import check_groups, fit_groups
from slm_toolkit.strategy.settings import FSDP1_SHARDING_STRATEGIES
from slm_toolkit.strategy.sharding import Sharding
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.hardware.prices import Price

# Dtypes: the bytes of each kind of tensor, as `--numerics`, the engine and a DeepSpeed JSON choose them.

BF16, AUTOCAST, FP32 = "bf16", "autocast", "fp32"
"""how a step computes: bf16 weights and residual stream; fp32 ones under bf16 autocast (accelerate's DDP);
all fp32"""


@dataclass(frozen=True)
class Dtypes:
    """Bytes per element; 0 where there is no such tensor."""

    parameter: int
    master: int
    moments: int
    "both of Adam's together"
    compute: int
    "gathered or cast parameters, as matrix products take them"
    gradient: int
    "as backward gives them"
    reduced: int
    "in the collectives"
    kept_gradient: int
    "as the optimizer takes them"


def dtypes_of(strategy: Strategy, config: RunConfig) -> Dtypes:
    """Dtypes that flags and the DeepSpeed JSON choose. Raises ValueError where no closed form covers them."""
    fp32_reduction = config.reduce_dtype == "fp32" or _accumulates_in_fp32(strategy)
    return engine_dtypes(strategy, config.numerics, fp32_reduction=fp32_reduction)


def _accumulates_in_fp32(strategy: Strategy) -> bool:
    """Whether a DeepSpeed JSON asks for fp32 gradients under bf16 weights. Raises ValueError for ZeRO-1."""
    if strategy.deepspeed is None or not strategy.deepspeed.accumulates_in_fp32:
        return False
    if strategy.zero_stage == 1:
        raise ValueError(
            f"{strategy.path}: grad_accum_dtype fp32 makes ZeRO-1 another optimizer: no closed form for it\n"
            "hint: rehearse it: --rehearse N"
        )
    return True


def engine_dtypes(strategy: Strategy, numerics: str, *, fp32_reduction: bool) -> Dtypes:
    """What `run/engine/engine.py` makes of `--numerics` under each engine (the README's table, "probed")."""
    if numerics == "fp32":
        own_master = 4 if strategy.is_deepspeed else 0
        return Dtypes(4, own_master, 8, 4, 4, 4, 4)
    if strategy.is_deepspeed and fp32_reduction:  # grad_accum_dtype: what is kept is fp32, too
        own_master = 2 if numerics == "pure_bf16" else 4
        return Dtypes(2, own_master, 2 * own_master, 2, 2, 4, 4)
    if numerics == "pure_bf16":
        own_master = 2 if strategy.is_deepspeed else 0
        return Dtypes(2, own_master, 4, 2, 2, 4 if fp32_reduction else 2, 2)
    if numerics == "aligned" or strategy.is_deepspeed:
        return Dtypes(2, 4, 8, 2, 2, 4 if fp32_reduction else 2, 2)
    if strategy.is_fsdp:  # fp32 shards, gathered in bf16
        return Dtypes(4, 0, 8, 2, 2, 2, 4)
    return Dtypes(4, 0, 8, 2, 4, 4, 4)  # autocast over fp32


MANY_RANKS = 2**40
"a share over so many ranks is less than a byte: what a rank still holds is not sharded"


@dataclass(frozen=True)
class Deployment:
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
    deployment: Deployment = field(default=Deployment(), hash=False)  # a measured network holds dicts

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
        """How matrix products and the residual stream run: BF16, AUTOCAST or FP32."""
        if self.config.numerics == "fp32":
            return FP32
        return AUTOCAST if self.config.numerics == "stock" and self.strategy.is_replicated else BF16

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
        """What connects the GPUs: the deployment's network, else the GPU's usual one."""
        return self.deployment.cluster or (cluster_of(self.gpu) if self.gpu else None)


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


# What estimates don't cover: shardings, and flags, which an estimate names instead of guessing.


def placement_of(strategy: Strategy) -> Sharding:
    """The strategy's sharding; offload, hybrid shards and hpZ are hypotheses, read off code and not measured.

    Raises ValueError for one that no estimate covers: ZeRO-0, FSDP1 without shards, copies without shards.
    """
    if strategy.zero_stage == 0:
        raise ValueError(
            f"{strategy.path}: no estimate of ZeRO stage 0\nhint: stages 1 to 3; ddp shards nothing"
        )
    if strategy.is_fsdp1:
        supported = [name for name in FSDP1_SHARDING_STRATEGIES if name != "NO_SHARD"]
        if (name := strategy.fsdp.sharding_strategy) not in supported:
            raise ValueError(
                f"{strategy.path}: fsdp_sharding_strategy is {name!r}\n"
                f"hint: one of {', '.join(supported)}; without shards it is MULTI_GPU"
            )
    if strategy.is_fsdp2:
        check_groups(strategy)
        copies = strategy.parallel_sizes["dp_replicate_size"]
        if copies > 1 and strategy.sharding.copy_ranks is None:
            raise ValueError(
                f"{strategy.path}: parallelism_config: dp_replicate_size {copies} without shards\n"
                "hint: that is MULTI_GPU"
            )
    return strategy.sharding


def unknown_to_estimates(config: RunConfig) -> list[str]:
    """A sentence for each flag of `config` that estimates don't cover."""
    problems = []
    for name in _uncovered(config):
        value = getattr(config, name)
        typed = f"--{name}" if value is True else f"--{name} {value}"
        problems.append(f"{typed}: no closed form for it; {FLAGS[name].no_closed_form}")
    if config.peft != "none" and config.torch_compile:
        problems.append(
            f"--torch_compile with --peft {config.peft}: no closed form for what compiled adapters keep; a "
            "GPU measures it"
        )
    if problem := unknown_targets(config):
        problems.append(problem)
    return problems


def _uncovered(config: RunConfig) -> list[str]:
    """Names of the flags whose values have no closed form."""
    return [name for name, flag in FLAGS.items() if not flag.has_closed_form(getattr(config, name))]


def known_to_estimates(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The nearest config that estimates cover, and what of `config` they leave out, as sentences."""
    changes = {name: getattr(RunConfig, name) for name in _uncovered(config)}
    if config.use_liger_kernel:  # these keep as much for backward
        changes |= {"norm_kernel": "fused", "mlp_kernel": "fused"}
    return dataclasses.replace(config, **changes), unknown_to_estimates(config)


def unlike_the_model(spec: ModelSpec, seq_len: int) -> list[str]:
    """What of a model's own configuration the closed forms leave out, as sentences."""
    found = []
    if spec.sliding_window is not None and spec.sliding_window < seq_len:
        found.append(
            f"{spec.name}: sliding_window {spec.sliding_window}: estimated as if every token attended to all "
            f"{seq_len}"
        )
    if spec.gated_ffn and spec.hidden_act not in ("silu", "swish"):
        found.append(f"{spec.name}: hidden_act {spec.hidden_act}: estimated as silu")
    if spec.attention_dropout:
        found.append(f"{spec.name}: attention_dropout {spec.attention_dropout:g}: estimated without dropout")
    return found
