"""Typed settings of an accelerate YAML and a DeepSpeed JSON, with the engines' defaults.

Nothing here raises an error: other modules check the files. A value that is not valid counts as absent.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from slm_toolkit.base.typed_files import LARGEST, NonNegative, PositiveInt

# names of torch.distributed.fsdp.ShardingStrategy in its order; a YAML has the name, or its number from 1
FSDP1_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_Section = TypeVar("_Section", bound=msgspec.Struct)


Auto = Literal["auto"]
_Elements = Annotated[float, Meta(ge=1, le=LARGEST)]
_SizeOrZero = NonNegative | Auto | None


class OptimizerOffload(msgspec.Struct, frozen=True):
    """The section offload_optimizer."""

    device: Literal["none", "cpu", "nvme"] | None = "none"
    "none: stays on the GPU"
    nvme_path: str | None = None
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = 1.0
    "the fraction of the optimizer state that is offloaded"
    buffer_count: NonNegative | None = 4


class ParameterOffload(msgspec.Struct, frozen=True):
    """The section offload_param."""

    device: Literal["none", "cpu", "nvme"] | None = "none"
    nvme_path: str | None = None
    buffer_count: NonNegative | None = 5
    buffer_size: NonNegative | None = 100_000_000


class ZeroSettings(msgspec.Struct, frozen=True):
    """The section zero_optimization; sizes are numbers of elements."""

    stage: Annotated[int, Meta(ge=0, le=3)] = 0
    reduce_bucket_size: _Elements | Auto | None = 500_000_000
    "auto: the square of the hidden size"
    overlap_comm: bool | None = None
    "None: the stage decides, see `overlaps`"
    contiguous_gradients: bool | None = True
    sub_group_size: _Elements | None = 1_000_000_000
    "ZeRO-3: elements that the optimizer updates at once"
    offload_optimizer: OptimizerOffload | None = OptimizerOffload()
    offload_param: ParameterOffload | None = ParameterOffload()
    stage3_prefetch_bucket_size: _SizeOrZero = 50_000_000
    "0: no prefetch; auto: 0.9 times the square of the hidden size"
    stage3_param_persistence_threshold: _SizeOrZero = 100_000
    "smaller parameters stay whole on every rank; auto: ten times the hidden size"
    stage3_max_live_parameters: NonNegative | None = 1_000_000_000
    stage3_max_reuse_distance: NonNegative | None = 1_000_000_000
    memory_efficient_linear: bool | None = True
    "ZeRO-3: whether DeepSpeed replaces torch.nn.functional.linear"
    zero_hpz_partition_size: PositiveInt | Auto | None = 1
    "ranks that share a second copy of the parameters; auto (slm_toolkit's extension): the ranks of a node"
    zero_quantized_weights: bool | None = False
    zero_quantized_gradients: bool | None = False

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; DeepSpeed's default is True for stage 3 only."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    def of_width(self, hidden_size: int) -> "ZeroSettings":
        """Return the settings with "auto" replaced by the sizes that accelerate 1.15 computes."""
        computed = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        is_auto = {name: size for name, size in computed.items() if getattr(self, name) == "auto"}
        return msgspec.structs.replace(self, **is_auto)


class _Precision(msgspec.Struct, frozen=True):
    enabled: Any = None


class _DataTypes(msgspec.Struct, frozen=True):
    grad_accum_dtype: str | None = ""


class DeepSpeedSettings(msgspec.Struct, frozen=True):
    """The keys of a DeepSpeed JSON that slm_toolkit reads, with the types of their values.

    The defaults are deepspeed 0.19.8's (runtime/zero/config.py, offload_config.py); null means the default.
    """

    zero_optimization: ZeroSettings = ZeroSettings()
    bf16: _Precision | None = _Precision()
    fp16: _Precision | None = _Precision()
    data_types: _DataTypes | None = _DataTypes()
    gradient_accumulation_steps: _SizeOrZero = "auto"
    train_micro_batch_size_per_gpu: _SizeOrZero = "auto"
    gradient_clipping: _SizeOrZero = "auto"

    @property
    def accumulates_in_fp32(self) -> bool:
        return self.data_types.grad_accum_dtype in ("fp32", "float32")

    @property
    def micro_batch_size(self) -> int | None:
        """The JSON's batch size per GPU; None if the flags decide."""
        return None if self.train_micro_batch_size_per_gpu == "auto" else self.train_micro_batch_size_per_gpu

    @property
    def num_micro_steps(self) -> int | None:
        """The JSON's gradient accumulation steps; None if the flags decide."""
        return None if self.gradient_accumulation_steps == "auto" else self.gradient_accumulation_steps


@dataclass(frozen=True)
class FsdpSettings:
    """The settings of the YAML's fsdp_config that slm_toolkit reads; the defaults are accelerate 1.15's."""

    sharding_strategy: Any = "FULL_SHARD"
    "FSDP1 only: torch's name of the strategy; an unknown value stays as in the file"
    offloads_params: bool = False
    auto_wrap_policy: str = "NO_WRAP"
    activation_checkpointing: bool = False
    backward_prefetch: str = "NO_PREFETCH"
    "FSDP1 only: BACKWARD_PRE gathers the next layer before a layer's backward"

    @property
    def reshards(self) -> bool:
        """Whether FSDP1 frees the gathered parameters after forward."""
        return self.sharding_strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


def deepspeed_settings(config: Mapping[str, Any], *, stage: int) -> DeepSpeedSettings:
    """Parse the content of a DeepSpeed JSON; `stage` replaces its ZeRO stage."""
    settings = _settings(config, DeepSpeedSettings)
    zero = msgspec.structs.replace(settings.zero_optimization, stage=stage)
    return msgspec.structs.replace(settings, zero_optimization=zero)


def _settings(section: object, kind: type[_Section]) -> _Section:
    """Parse a section; null and values that DeepSpeed refuses become the default."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind) if isinstance(section, Mapping) else ():
        value = section.get(field.name)
        if isinstance(field.default, msgspec.Struct):
            values[field.name] = _settings(value, type(field.default))
        elif value is not None:
            with suppress(msgspec.ValidationError):
                msgspec.convert(value, field.type)
                values[field.name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return kind(**values)


def fsdp_settings(section: Mapping[str, Any]) -> FsdpSettings:
    """Parse a YAML's fsdp_config."""
    # fsdp_reshard_after_forward is FSDP2's key; under FSDP1 accelerate reads it as the sharding strategy
    strategy = section.get("fsdp_sharding_strategy", section.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    return FsdpSettings(
        sharding_strategy=_name_of(strategy, FSDP1_SHARDING_STRATEGIES),
        offloads_params=is_true(section.get("fsdp_offload_params")),
        auto_wrap_policy=str(section.get("fsdp_auto_wrap_policy", FsdpSettings.auto_wrap_policy)),
        activation_checkpointing=is_true(section.get("fsdp_activation_checkpointing")),
        backward_prefetch=_name_of(
            section.get("fsdp_backward_prefetch") or FsdpSettings.backward_prefetch,
            ("BACKWARD_PRE", "BACKWARD_POST"),
        ),
    )


def _name_of(value: Any, names: tuple[str, ...]) -> Any:
    """Return the name of a member of torch's enum, of which a YAML may have the number, from 1."""
    word = str(value).upper()
    return word if word in names else dict(zip("12345", names, strict=False)).get(word, value)


def value_at(content: Any, keys: Iterable[str]) -> Any:
    """Return the value at a path of keys; None if it is absent."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def is_true(value: object) -> bool:
    """Return True if accelerate reads a YAML value as true: `true` or `"true"`."""
    return str(value).lower() == "true"


# The ranks and devices that store the training state, with the same fields for all engines.

PREFIX = "parallelism_config_"
# sizes in accelerate 1.15's ParallelismConfig; their product is the number of ranks
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


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
