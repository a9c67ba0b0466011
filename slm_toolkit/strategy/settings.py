"""The sections of an accelerate YAML and of a DeepSpeed JSON as frozen values, with the engines' defaults.

Nothing here raises: the readers check the files, and a value that they refuse counts as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from slm_toolkit.base.typed_files import LARGEST, NonNegative, PositiveInt

FSDP1_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"of torch.distributed.fsdp.ShardingStrategy, in its order: a YAML gives the name or the number, from 1"
_Section = TypeVar("_Section", bound=msgspec.Struct)


Auto = Literal["auto"]
_Size = Annotated[float, Meta(ge=1, le=LARGEST)] | Auto | None
_SizeOrZero = NonNegative | Auto | None


class OptimizerOffload(msgspec.Struct, frozen=True):
    """The section offload_optimizer."""

    device: Literal["none", "cpu", "nvme"] | None = "none"
    "none: the GPU"
    nvme_path: str | None = None
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = 1.0
    "the share of the optimizer that is offloaded"
    buffer_count: NonNegative | None = 4
    buffer_size: NonNegative | None = None


class ParameterOffload(msgspec.Struct, frozen=True):
    """The section offload_param."""

    device: Literal["none", "cpu", "nvme"] | None = "none"
    nvme_path: str | None = None
    buffer_count: NonNegative | None = 5
    buffer_size: NonNegative | None = 100_000_000


class ZeroSettings(msgspec.Struct, frozen=True):
    """The section zero_optimization; sizes are numbers of elements."""

    stage: Any = 0
    "0 to 3: `strategy_of` checks it"
    reduce_bucket_size: _Size = 500_000_000
    "auto: the square of the hidden size"
    overlap_comm: bool | None = None
    "None: as the stage has it, see `overlaps`"
    contiguous_gradients: bool | None = True
    sub_group_size: _Size = 1_000_000_000
    "ZeRO-3: elements that the optimizer steps at once"
    offload_optimizer: OptimizerOffload | None = OptimizerOffload()
    offload_param: ParameterOffload | None = ParameterOffload()
    stage3_prefetch_bucket_size: _SizeOrZero = 50_000_000
    "0 gathers nothing ahead; auto: 0.9 times the square of the hidden size"
    stage3_param_persistence_threshold: _SizeOrZero = 100_000
    "smaller parameters are whole on every rank; auto: ten times the hidden size"
    stage3_max_live_parameters: NonNegative | None = 1_000_000_000
    stage3_max_reuse_distance: NonNegative | None = 1_000_000_000
    memory_efficient_linear: bool | None = True
    "ZeRO-3: DeepSpeed replaces torch.nn.functional.linear"
    zero_hpz_partition_size: PositiveInt | Auto | None = 1
    "ranks that share a second copy of the parameters; auto, which is slm_toolkit's: the ranks of a node"
    zero_quantized_weights: bool | None = False
    zero_quantized_gradients: bool | None = False

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced beside backward: DeepSpeed's default is True for stage 3 alone."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    def of_width(self, hidden_size: int) -> "ZeroSettings":
        """The settings with the sizes that accelerate 1.15 computes for "auto" from the model's width."""
        computed = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        is_auto = {name: size for name, size in computed.items() if getattr(self, name) == "auto"}
        return msgspec.structs.replace(self, **is_auto)


class _Precision(msgspec.Struct, frozen=True):
    enabled: Any = None


class _DataTypes(msgspec.Struct, frozen=True):
    grad_accum_dtype: str | None = ""


class DeepSpeedSettings(msgspec.Struct, frozen=True):
    """The keys of a DeepSpeed JSON that are read here, with the values that it may have.

    The defaults are deepspeed 0.19.8's (runtime/zero/config.py, offload_config.py), which null stands for.
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
        """The JSON's; None where the flags decide."""
        return None if self.train_micro_batch_size_per_gpu == "auto" else self.train_micro_batch_size_per_gpu

    @property
    def num_micro_steps(self) -> int | None:
        """The JSON's; None where the flags decide."""
        return None if self.gradient_accumulation_steps == "auto" else self.gradient_accumulation_steps


@dataclass(frozen=True)
class FsdpSettings:
    """What the YAML's fsdp_config asks for; the defaults are accelerate 1.15's."""

    sharding_strategy: Any = "FULL_SHARD"
    "FSDP1 only: torch's name of it; a value that torch does not know is kept as it is in the file"
    offloads_params: bool = False
    auto_wrap_policy: str = "NO_WRAP"
    activation_checkpointing: bool = False

    @property
    def reshards(self) -> bool:
        """Whether FSDP1 frees the gathered parameters after forward."""
        return self.sharding_strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


def deepspeed_settings(config: Mapping[str, Any], *, stage: int) -> DeepSpeedSettings:
    """The settings in the content of a DeepSpeed JSON, under a ZeRO stage."""
    settings = _settings(config, DeepSpeedSettings)
    zero = msgspec.structs.replace(settings.zero_optimization, stage=stage)
    return msgspec.structs.replace(settings, zero_optimization=zero)


def _settings(section: object, kind: type[_Section]) -> _Section:
    """A section's values, with the default for null and for a value that DeepSpeed refuses."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind) if isinstance(section, Mapping) else ():
        value = section.get(field.name)
        if isinstance(field.default, msgspec.Struct):
            values[field.name] = _settings(value, type(field.default))
        elif value is not None and _is_of_type(value, field.type):
            values[field.name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return kind(**values)


def _is_of_type(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def fsdp_settings(section: Mapping[str, Any]) -> FsdpSettings:
    """The settings of a YAML's fsdp_config."""
    names = FSDP1_SHARDING_STRATEGIES
    name_of = {str(number): name for number, name in enumerate(names, 1)} | {name: name for name in names}
    # fsdp_reshard_after_forward is FSDP2's key; under FSDP1 accelerate takes it for the strategy
    strategy = section.get("fsdp_sharding_strategy", section.get("fsdp_reshard_after_forward", names[0]))
    return FsdpSettings(
        sharding_strategy=name_of.get(str(strategy).upper(), strategy),
        offloads_params=is_true(section.get("fsdp_offload_params")),
        auto_wrap_policy=str(section.get("fsdp_auto_wrap_policy", FsdpSettings.auto_wrap_policy)),
        activation_checkpointing=is_true(section.get("fsdp_activation_checkpointing")),
    )


def is_true(value: object) -> bool:
    """Whether accelerate takes a value of a YAML for true: it reads `true` and `"true"` alike."""
    return str(value).lower() == "true"
