"""Setup: everything that an estimate depends on, from the model to the price of the GPUs."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.hardware.calibration import Calibration, calibration_of
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import Cluster, cluster_of
from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices, padded_spec
from slm_toolkit.predict.setup.adapters import Adapters, Weights, adapters_of, unknown_targets, weights_of
from slm_toolkit.predict.setup.other_trainers import LossBytes, OtherTrainer
from slm_toolkit.strategy.checked_run import check_groups
from slm_toolkit.strategy.groups import fit_groups, ranks_of_each_node
from slm_toolkit.strategy.settings import FSDP1_SHARDING_STRATEGIES, Sharding
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.hardware.prices import Price

# Dtypes: the bytes per element of each kind of tensor, set by `--numerics`, the engine and a DeepSpeed JSON.

BF16, AUTOCAST, FP32 = "bf16", "autocast", "fp32"
"""how a step computes: weights and residual stream in bf16 (or fp16, whose bytes and rates are the same); in
fp32 under bf16 autocast (accelerate's DDP); everything in fp32"""


@dataclass(frozen=True)
class Dtypes:
    """Bytes per element; 0 if there is no such tensor."""

    parameter: int
    master: int
    moments: float
    "all moments together; with Muon, the mean over all trained parameters"
    compute: int
    "parameters as matrix products read them, after the all-gather or cast"
    gradient: int
    "gradients that backward writes"
    reduced: int
    "gradients in the collectives"
    kept_gradient: int
    "gradients that the optimizer reads"


def engine_dtypes(strategy: Strategy, numerics: str, *, fp32_reduction: bool) -> Dtypes:
    """Return the dtypes that `run/engine/engine.py` sets: docs/numerics_and_parity.md has them."""
    if numerics == "fp32":
        master = 4 if strategy.is_deepspeed else 0
        return Dtypes(4, master, 8, 4, 4, 4, 4)
    if strategy.is_deepspeed and fp32_reduction:  # grad_accum_dtype: kept gradients are fp32, too
        master = 2 if numerics == "pure_bf16" else 4
        return Dtypes(2, master, 2 * master, 2, 2, 4, 4)
    if numerics == "pure_bf16":
        master = 2 if strategy.is_deepspeed else 0
        return Dtypes(2, master, 4, 2, 2, 4 if fp32_reduction else 2, 2)
    if numerics in ("aligned", "fp16") or strategy.is_deepspeed:
        return Dtypes(2, 4, 8, 2, 2, 4 if fp32_reduction else 2, 2)
    if strategy.is_fsdp:  # fp32 shards, gathered in bf16
        return Dtypes(4, 0, 8, 2, 2, 4 if fp32_reduction else 2, 4)
    return Dtypes(4, 0, 8, 2, 4, 4, 4)  # autocast over fp32


MANY_RANKS = 2**40
"stands for an offloaded state: a share over so many ranks is less than a byte"


@dataclass(frozen=True)
class Deployment:
    """The network between the GPUs (None: the GPU's usual network) and their price (None: unknown)."""

    cluster: Cluster | None = None
    price: "Price | None" = None


@dataclass(frozen=True)
class Setup:
    """A model, strategy and configuration on certain GPUs.

    The closed forms of predict/memory and predict/speed need a launched setup: see `launched`.
    A property raises ValueError if no closed form covers the strategy or a flag.
    """

    spec: ModelSpec
    strategy: Strategy
    config: RunConfig
    "all defaults must be filled in"
    num_gpus: int
    gpus_per_node: int = 8
    "GPUs of a full node; a job may use a part of each node"
    gpu: Gpu | None = None
    "None: only bytes are estimated"
    like: OtherTrainer | None = None
    "the preset of `--like`; None: slm_toolkit's own trainer"
    deployment: Deployment = field(default=Deployment(), hash=False)  # a measured network contains dicts
    unpadded: ModelSpec | None = None
    "the model, if `--pad_widths` has widened `spec`"

    @property
    def launched(self) -> "Setup":
        """This setup with the sizes of rank groups, the settings of the user's files and padding applied."""
        strategy = fit_groups(self.strategy, num_ranks=self.num_gpus, ranks_per_node=self.ranks_per_node)
        changes = {"strategy": strategy, "config": config_as_launched(self.config, strategy)}
        if self.config.pad_widths:
            changes |= {"spec": padded_spec(self.spec), "unpadded": self.unpadded or self.spec}
        return dataclasses.replace(self, **changes)

    @property
    def ranks_per_node(self) -> int:
        return ranks_of_each_node(self.num_gpus, self.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.ranks_per_node

    @cached_property
    def placement(self) -> Sharding:
        return placement_of(self.strategy)

    @cached_property
    def shard_ranks(self) -> int:
        """Number of ranks that the training state is sharded over."""
        return self.placement.ranks_of_a_copy(num_gpus=self.num_gpus, gpus_per_node=self.ranks_per_node)

    @property
    def gpu_state_ranks(self) -> int:
        """Number of ranks that the state on the GPUs is sharded over; MANY_RANKS if it is offloaded."""
        return self.shard_ranks if self.placement.optimizer_device == "none" else MANY_RANKS

    @cached_property
    def adapters(self) -> Adapters | None:
        return adapters_of(self.spec, self.config)

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.spec, self.adapters)

    @cached_property
    def recomputed(self) -> tuple[bool, ...]:
        """For each layer, whether backward computes it again. selective_layer: the second, the fourth, ..."""
        mode = self.config.gradient_checkpointing
        is_recomputed = {"none": (False, False), "selective_layer": (False, True)}.get(mode, (True, True))
        return tuple(is_recomputed[number % 2] for number in range(self.spec.num_layers))

    @property
    def has_input_gradient(self) -> bool:
        """True if backward reaches the embedding. With adapters: if the first layer is checkpointed."""
        return self.adapters is None or self.recomputed[0]

    @cached_property
    def num_hidden(self) -> int:
        """Number of the parameters that `--optim muon` updates by Muon."""
        return self.spec.num_layers * sum(map(math.prod, hidden_matrices(self.spec).values()))

    @cached_property
    def dtypes(self) -> Dtypes:
        strategy = self.strategy
        fp32_reduction = self.reduces_in_fp32 or (
            strategy.deepspeed is not None and strategy.deepspeed.accumulates_in_fp32
        )
        if fp32_reduction and strategy.zero_stage == 1 and strategy.sharding.optimizer_device != "none":
            raise ValueError(
                f"{strategy.path}: no closed form for fp32 gradients under ZeRO-1 with an offloaded optimizer"
                "\nhint: use stage 2"
            )
        dtypes = engine_dtypes(strategy, self.config.numerics, fp32_reduction=fp32_reduction)
        if self.keeps_gradients and strategy.is_replicated:
            dtypes = dataclasses.replace(dtypes, kept_gradient=4)
        if self.config.optim == "muon":  # a hidden matrix has a momentum in place of two moments
            mean = 1 - self.num_hidden / self.weights.trained / 2
            dtypes = dataclasses.replace(dtypes, moments=dtypes.moments * mean)
        if not self.gathers_in_fp32:
            return dtypes
        return dataclasses.replace(dtypes, compute=4, gradient=4, reduced=2)

    @property
    def keeps_gradients(self) -> bool:
        """True for fp32 gradients of bf16 weights that stay between steps, as in a preset of `--like`."""
        has_bf16_weights = self.config.numerics in ("aligned", "pure_bf16")
        return self.like is not None and self.like.has_fp32_gradients and has_bf16_weights

    @property
    def reduces_in_fp32(self) -> bool:
        """True if gradients of bf16 weights are reduced in fp32, as some presets of `--like` do."""
        by_fsdp = self.strategy.is_fsdp and self.like is not None and self.like.reduces_in_fp32
        return self.keeps_gradients or (by_fsdp and self.config.computes_in == "bf16")

    @property
    def has_fsdp1(self) -> bool:
        """True if FSDP1 trains: the strategy's, or that of the trainer of `--like`."""
        return self.strategy.is_fsdp1 or (
            self.strategy.is_fsdp and self.like is not None and self.like.has_fsdp1
        )

    @property
    def gathers_in_fp32(self) -> bool:
        """True if FSDP gathers fp32 weights, as one of the presets of `--like` does."""
        is_stock = self.config.numerics == "stock" and self.strategy.is_fsdp
        return is_stock and self.like is not None and self.like.gathers_in_fp32

    @property
    def own_loss(self) -> LossBytes | None:
        """The loss of the preset of `--like`; None: that of `--kernels`."""
        if self.like is None or self.config.fuses_loss or self.compute == FP32:
            return None
        return (self.config.compiles and self.like.compiled_loss) or self.like.loss

    @cached_property
    def compute(self) -> str:
        """Precision of matrix products and the residual stream: BF16, AUTOCAST or FP32."""
        if self.config.numerics == "fp32":
            return FP32
        is_autocast = self.strategy.is_replicated or self.gathers_in_fp32
        return AUTOCAST if self.config.numerics == "stock" and is_autocast else BF16

    @property
    def num_tokens(self) -> int:
        """Tokens in one micro-step on one rank."""
        return self.config.per_device_train_batch_size * self.config.seq_len

    @cached_property
    def calibration(self) -> Calibration:
        """The measurements of this GPU."""
        return calibration_of(self.gpu.name if self.gpu else None)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The network between the GPUs: the deployment's, or else the GPU's usual network."""
        return self.deployment.cluster or (cluster_of(self.gpu) if self.gpu else None)


def setup_of(
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    num_gpus: int,
    gpus_per_node: int,
    gpu: Gpu | None,
    like: OtherTrainer | None,
    deployment: Deployment,
) -> Setup:
    """Return the setup of a row of a grid: a strategy of one process uses one GPU, whatever `num_gpus` is."""
    count = 1 if strategy.is_single else num_gpus
    return Setup(spec, strategy, config, count, gpus_per_node, gpu, like, deployment)


def with_flags(setup: Setup, **flags: Any) -> Setup:
    """Return the setup with changed flags; the keywords are fields of RunConfig."""
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, **flags))


def config_as_launched(config: RunConfig, strategy: Strategy) -> RunConfig:
    """Apply FSDP's own activation checkpointing and, with `--numerics stock`, the JSON's accumulation."""
    changes: dict[str, Any] = {}
    if strategy.checkpoints_activations:
        changes["gradient_checkpointing"] = "full"
    steps = strategy.deepspeed.num_micro_steps if strategy.deepspeed else None
    if config.numerics == "stock" and steps is not None:
        changes["gradient_accumulation_steps"] = steps
    return dataclasses.replace(config, **changes) if changes else config


# Shardings and flags without a closed form: an estimate names them instead of guessing.


def placement_of(strategy: Strategy) -> Sharding:
    """Return the strategy's sharding. Offload, hybrid shards and hpZ come from reading code: not measured.

    Raise ValueError for a sharding without an estimate: ZeRO-0, FSDP1 NO_SHARD, FSDP2 copies without shards.
    """
    if strategy.zero_stage == 0:
        raise ValueError(
            f"{strategy.path}: no estimate of ZeRO stage 0\nhint: use stages 1 to 3; ddp also shards nothing"
        )
    if strategy.is_fsdp1:
        supported = [name for name in FSDP1_SHARDING_STRATEGIES if name != "NO_SHARD"]
        if (name := strategy.fsdp.sharding_strategy) not in supported:
            raise ValueError(
                f"{strategy.path}: fsdp_sharding_strategy is {name!r}\n"
                f"hint: use {', '.join(supported)}, or distributed_type MULTI_GPU to shard nothing"
            )
    if strategy.is_fsdp2:
        check_groups(strategy)
        copies = strategy.parallel_sizes["dp_replicate_size"]
        if copies > 1 and strategy.sharding.copy_ranks is None:
            raise ValueError(
                f"{strategy.path}: parallelism_config: dp_replicate_size {copies} without shards\n"
                "hint: use distributed_type MULTI_GPU instead"
            )
    return strategy.sharding


def unknown_to_estimates(
    config: RunConfig, *, gpu: Gpu | None = None, spec: ModelSpec | None = None
) -> list[str]:
    """Return a sentence for each flag without a closed form: by itself, on that GPU, and for that model."""
    problems = []
    for name in _uncovered(config):
        value = getattr(config, name)
        typed = f"--{name}" if value is True else f"--{name} {value}"
        problems.append(f"{typed}: no closed form for it; {FLAGS[name].no_closed_form}")
    problems += [_float8_problem(config, gpu, spec), unknown_targets(config)]
    return list(filter(None, problems))


def _float8_problem(config: RunConfig, gpu: Gpu | None, spec: ModelSpec | None) -> str | None:
    """Return why --fp8 has no closed form; None if it has one."""
    flag = f"--fp8 {config.fp8}"
    if config.fp8 == "none":
        return None
    if config.numerics not in ("aligned", "pure_bf16"):
        return f"{flag} with --numerics {config.numerics}: no closed form for it"
    if gpu is not None and not gpu.has_float8:
        return f"{flag} on {gpu.name}: no closed form, because this GPU emulates float8; leave --fp8 out"
    if spec is not None and not _is_like_llama(spec):
        return f"{flag} with {spec.name}: no closed form; there is one for layers like Llama's"
    return None


def _is_like_llama(spec: ModelSpec) -> bool:
    """Return whether the layers have Llama's parts, like those with which torchao was traced."""
    return spec.gated_ffn and spec.norms == "before" and spec.qk_norm == "none" and not spec.fused_projections


def _uncovered(config: RunConfig) -> list[str]:
    """Return the names of the flags whose values have no closed form."""
    return [name for name in _PARTLY_COVERED if not FLAGS[name].has_closed_form(getattr(config, name))]


_PARTLY_COVERED = [name for name, flag in FLAGS.items() if flag.no_closed_form]


def known_to_estimates(config: RunConfig, *, gpu: Gpu | None, spec: ModelSpec) -> tuple[RunConfig, list[str]]:
    """Return the nearest config that has closed forms, and a sentence for each flag that it leaves out."""
    changes = {name: getattr(RunConfig, name) for name in _uncovered(config)}
    if _float8_problem(config, gpu, spec):
        changes |= {"fp8": "none"}
    return dataclasses.replace(config, **changes), unknown_to_estimates(config, gpu=gpu, spec=spec)


def unlike_the_model(spec: ModelSpec, seq_len: int) -> list[str]:
    """Return a sentence for each setting of the model's config.json that the closed forms ignore."""
    sentences = []
    if spec.sliding_window is not None and spec.sliding_window < seq_len:
        sentences.append(
            f"{spec.name}: sliding_window {spec.sliding_window}: sdpa and eager attention compute all "
            f"{seq_len} tokens and mask them; flash_attention_2 and flex_attention compute the window only"
        )
    return sentences
