"""The sections of an accelerate YAML and of a DeepSpeed JSON as frozen values, with the engines' defaults.

Nothing here raises: the readers check the files, and a value that they refuse counts as absent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

FSDP1_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"of torch.distributed.fsdp.ShardingStrategy, in its order: a YAML gives the name or the number, from 1"


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What a DeepSpeed JSON and the YAML's deepspeed_config ask for; sizes are numbers of elements.

    The defaults are deepspeed 0.19.8's (runtime/zero/config.py, offload_config.py). None stands for "auto".
    """

    stage: int = 0
    reduce_bucket_size: int | None = 500_000_000
    "None: the square of the hidden size"
    overlap_comm: bool = False
    "DeepSpeed's default is True for stage 3, False for the others"
    contiguous_gradients: bool = True
    sub_group_size: int = 1_000_000_000
    "ZeRO-3: elements that the optimizer steps at once"
    max_live_parameters: int = 1_000_000_000
    param_persistence_threshold: int | None = 100_000
    "ZeRO-3: smaller parameters are whole on every rank; None: ten times the hidden size"
    prefetch_bucket_size: int | None = 50_000_000
    "ZeRO-3: 0 gathers nothing ahead"
    memory_efficient_linear: bool = True
    "ZeRO-3: DeepSpeed replaces torch.nn.functional.linear"
    hpz_partition_size: int | None = 1
    "ranks that share a second copy of the parameters; None: the ranks of a node"
    quantized_weights: bool = False
    quantized_gradients: bool = False
    optimizer_device: str = "none"
    "none (the GPU), cpu or nvme"
    optimizer_ratio: float = 1.0
    "the share of the optimizer that is offloaded"
    optimizer_buffer_count: int = 4
    parameter_device: str = "none"
    parameter_buffer_count: int = 5
    parameter_buffer_size: int = 100_000_000
    zero3_init_flag: bool = True
    "of the YAML: whether a rank builds only its share of the model; accelerate's default is True"
    grad_accum_dtype: str = ""
    "of data_types"
    micro_batch_size: int | None = None
    "train_micro_batch_size_per_gpu; None: the flags decide"
    gradient_accumulation_steps: int | None = None

    @property
    def accumulates_in_fp32(self) -> bool:
        return self.grad_accum_dtype in ("fp32", "float32")

    def of_width(self, hidden_size: int) -> "DeepSpeedSettings":
        """The settings with the sizes that accelerate 1.15 computes for "auto" from the model's width."""
        bucket, threshold = self.reduce_bucket_size, self.param_persistence_threshold
        return replace(
            self,
            reduce_bucket_size=hidden_size**2 if bucket is None else bucket,
            param_persistence_threshold=10 * hidden_size if threshold is None else threshold,
        )


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


_MAY_BE_AUTO = (
    *("reduce_bucket_size", "param_persistence_threshold", "prefetch_bucket_size", "hpz_partition_size"),
    *("micro_batch_size", "gradient_accumulation_steps"),
)
_OPTIMIZER, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_OF_THE_JSON = {  # field: section of the JSON, and key
    "reduce_bucket_size": ("zero_optimization", "reduce_bucket_size"),
    "overlap_comm": ("zero_optimization", "overlap_comm"),
    "contiguous_gradients": ("zero_optimization", "contiguous_gradients"),
    "sub_group_size": ("zero_optimization", "sub_group_size"),
    "max_live_parameters": ("zero_optimization", "stage3_max_live_parameters"),
    "param_persistence_threshold": ("zero_optimization", "stage3_param_persistence_threshold"),
    "prefetch_bucket_size": ("zero_optimization", "stage3_prefetch_bucket_size"),
    "memory_efficient_linear": ("zero_optimization", "memory_efficient_linear"),
    "hpz_partition_size": ("zero_optimization", "zero_hpz_partition_size"),
    "quantized_weights": ("zero_optimization", "zero_quantized_weights"),
    "quantized_gradients": ("zero_optimization", "zero_quantized_gradients"),
    "optimizer_device": (_OPTIMIZER, "device"),
    "optimizer_ratio": (_OPTIMIZER, "ratio"),
    "optimizer_buffer_count": (_OPTIMIZER, "buffer_count"),
    "parameter_device": (_PARAMETERS, "device"),
    "parameter_buffer_count": (_PARAMETERS, "buffer_count"),
    "parameter_buffer_size": (_PARAMETERS, "buffer_size"),
    "grad_accum_dtype": ("data_types", "grad_accum_dtype"),
    "micro_batch_size": ("", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": ("", "gradient_accumulation_steps"),
}


def deepspeed_settings(
    config: Mapping[str, Any], *, stage: int, zero3_init_flag: object = None
) -> DeepSpeedSettings:
    """The settings in the content of a DeepSpeed JSON, under a ZeRO stage."""
    given: dict[str, Any] = {"overlap_comm": stage == 3}
    if zero3_init_flag is not None:
        given["zero3_init_flag"] = is_true(zero3_init_flag)
    for field, (path, key) in _OF_THE_JSON.items():
        section: Any = config
        for name in filter(None, path.split(".")):
            section = section.get(name) if isinstance(section, Mapping) else None
        value = section.get(key) if isinstance(section, Mapping) else None
        default = getattr(DeepSpeedSettings, field)
        if isinstance(default, bool | str):
            is_right = type(value) is type(default)
        else:
            is_right = isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
        if field in _MAY_BE_AUTO and value == "auto":
            given[field] = None
        elif is_right:
            given[field] = int(value) if type(value) is float and field != "optimizer_ratio" else value
    return DeepSpeedSettings(stage=stage, **given)


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
