"""Settings of an accelerate YAML and a DeepSpeed JSON that a launch passes on; all others are refused.

accelerate copies every key of every section to the option with the same name: `log_dir` in any section sets
torchrun's --log_dir. DeepSpeed writes to paths, imports modules and connects to hosts that its JSON names.
So a key is passed on only if a list below has it. Sections that only tune DeepSpeed also take unlisted keys,
but with numbers and switches only: these name no path, module or host.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from slm_toolkit.config.flag_metadata import shortened
from slm_toolkit.strategy.settings import DeepSpeedSettings, OptimizerOffload, ParameterOffload, ZeroSettings


def _keys(
    names: str, *, of: type[msgspec.Struct] | None = None, prefix: str = "", **ruled: Any
) -> dict[str, Any]:
    """Return the rules of a section: `names` and the fields of `of` allow any value except a mapping.

    Other rules: a tuple allows these values, or an empty one; a mapping contains the rules of a section. In
    it, "*" is the rule of all keys that it does not name.
    """
    known = (*names.split(), *(of.__struct_fields__ if of else ()))
    return {prefix + name: rule for name, rule in {**dict.fromkeys(known), **ruled}.items()}


_PLAIN, _ANYTHING = "numbers, switches and auto", "anything, also a mapping"
_ANY = {"*": _ANYTHING}
_ONLY_OFF = {"enabled": (), **_ANY}
"rules of a section that is allowed with `enabled: false` only, DeepSpeed's default for these sections"
_BACKENDS = ("no", "eager", "aot_eager", "inductor", "cudagraphs")
"backends of torch.compile that are part of torch; others import a package"

# accelerate 1.15: the fields of ClusterConfig and the keys that process_config converts to them
# (commands/config/config_args.py), and the options to which a section's keys are copied (commands/launch.py).
# A test compares the lists.
YAML_SETTINGS = _keys(
    "distributed_type mixed_precision fp16 use_cpu debug num_processes num_machines machine_rank "
    "main_process_ip main_process_port same_network gpu_ids enable_cpu_affinity main_training_function "
    "downcast_bf16 tpu_use_cluster tpu_use_sudo",
    compute_environment=("LOCAL_MACHINE",),
    rdzv_backend=("static", "c10d"),
    **dict.fromkeys(_keys("tpu_name tpu_zone tpu_vm tpu_env command_file commands"), ()),
    megatron_lm_config=(),
    mpirun_config=_keys("mpirun_ccl", mpirun_hostfile=()),
    fp8_config=_ANY,  # accelerate puts fp8_ before each key
    dynamo_backend=_BACKENDS,
    dynamo_config=_keys(
        "mode use_fullgraph use_dynamic use_regional_compilation", prefix="dynamo_", backend=_BACKENDS
    ),
    fsdp_config=_keys(
        "version offload_params min_num_params sharding_strategy reshard_after_forward auto_wrap_policy "
        "transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params "
        "cpu_ram_efficient_loading sync_module_states activation_checkpointing "
        "activation_checkpointing_offload ignored_modules",
        prefix="fsdp_",
    ),
    deepspeed_config=_keys(
        "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
        "offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping "
        "zero3_init_flag zero3_save_16bit_model deepspeed_moe_layer_cls_names",
        deepspeed_multinode_launcher=("standard",),
        **dict.fromkeys(
            _keys("deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"), ()
        ),
    ),
    parallelism_config=_keys(
        "dp_replicate_size dp_shard_size tp_size cp_size cp_comm_strategy sp_size sp_seq_length "
        "sp_seq_length_is_variable",
        prefix="parallelism_config_",
        cp_backend=("torch",),
        sp_backend=("deepspeed",),
        # others are loaded from the hub
        sp_attn_implementation=("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
    ),
)
_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"prefix that accelerate adds to a section's keys if it is missing"

# the keys of deepspeed 0.19.8; other versions add keys, or still accept keys that this one refuses
_TUNING = _keys(
    "buffer_dtype dtype grad_accum_dtype keep_in_fp32_modules opt_level param_dtype partition passes "
    "preset_model prof_ops q_type select_strategy tag_validation",
    output_file=(),
    **{"*": _PLAIN},
)
"rules of the sections that only tune DeepSpeed; the named keys of all of them take a text"
# runtime/config.py and the modules that read its sections
JSON_SETTINGS = _keys(
    "train_batch_size managed_gradient_accumulation communication_data_type "
    "seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor "
    "gradient_allreduce_op disable_allgather steps_per_print dump_state disable_python_gc "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
    "vocabulary_size dataloader_drop_last log_level use_data_before_expert_parallelism "
    "sequence_parallel_size",
    optimizer=_ANY,  # the type is looked up, not imported
    scheduler=_ANY,
    # DeepSpeed refuses other keys of the next sections: runtime/zero/config.py, offload_config.py,
    # leaf_module_config.py and runtime/precision_config.py
    zero_optimization=_keys(
        "reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce allgather_bucket_size "
        "compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param "
        "cpu_offload_use_pin_memory legacy_stage1 stage3_model_persistence_threshold "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential ignore_unused_parameters round_robin_gradients "
        "parameter_alignment zero_quantized_nontrainable_weights pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory",
        offload_param=_keys("pin_memory max_in_cpu", of=ParameterOffload),
        offload_optimizer=_keys(
            "pin_memory pipeline_read pipeline_write fast_init super_offload cpuadam_cores_perc",
            of=OptimizerOffload,
        ),
        zenflow=_TUNING,
        leaf_module=_keys("classes names name_suffixes"),  # compared, never imported
        of=ZeroSettings,
    ),
    bf16=_keys(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
        "bf16_optimizer_states"
    ),
    fp16=_keys(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads"
    ),
    torch_autocast=_keys(
        "enabled dtype",
        # DeepSpeed imports their packages
        lower_precision_safe_modules=(
            "torch.nn.Linear",
            "torch.nn.Conv1d",
            "torch.nn.Conv2d",
            "torch.nn.Conv3d",
        ),
    ),
    **dict.fromkeys(
        _keys(
            "activation_checkpointing aio checkpoint comms_logger compile data_types flops_profiler "
            "model_info msamp pipeline tensor_parallel timers weight_quantization"
        ),
        _TUNING,
    ),
    # these write files, connect to hosts, import packages, or have no use here
    **dict.fromkeys(
        _keys("tensorboard wandb csv_monitor comet autotuning hybrid_engine expert_parallel"), _ONLY_OFF
    ),
    of=DeepSpeedSettings,
)

_MACHINES = "on each machine `slm launch --num_machines N --main_process_ip IP --machine_rank R`"
_BY_SSH = ("DeepSpeed's launcher would run commands on other hosts", _MACHINES)
_LOGS = ("DeepSpeed would write files or send logs to where the section says", "--report_to logs every step")
_REASONS = {  # for a key or its section: what would happen, and what to use instead
    "deepspeed_hostfile": _BY_SSH,
    "deepspeed_multinode_launcher": _BY_SSH,
    "mpirun_hostfile": ("accelerate would start mpirun on the hosts in that file", _MACHINES),
    "output_file": ("DeepSpeed would overwrite that file", "without this key DeepSpeed prints the profile"),
    "lower_precision_safe_modules": ("DeepSpeed would import the modules in this list", None),
    **dict.fromkeys(_keys("tensorboard csv_monitor wandb comet"), _LOGS),
    "compute_environment": ("accelerate would launch on another service", None),
}


@dataclass(frozen=True)
class Refused:
    """A setting that is not passed on."""

    keys: tuple[str, ...]
    "path of keys from the top of the file, as written there"
    value: Any
    known: tuple[str, ...]
    "allowed keys of the section, if this key is not among them; else empty"
    allowed: tuple[str, ...]
    "allowed values, if the key itself is allowed; empty: no value is allowed"

    @property
    def sentence(self) -> str:
        section = ".".join(self.keys[:-1]) or "this file"
        if self.known:
            return f"{self.keys[-1]} is not a known key of {section}"
        return f"{'.'.join(self.keys)} is {shortened(json.dumps(self.value, default=str))}"

    @property
    def why(self) -> str:
        if self.known:
            return "an unknown key may name a file, a host, a launcher or a module"
        return self._reason[0]

    @property
    def change(self) -> str:
        """The text to write or the key to remove, and what to use instead."""
        instead = f": {self._reason[1]}" if self._reason[1] else ""
        if len(self.allowed) == 1:
            return f"{self.keys[-1]}: {self.allowed[0]}{instead}"
        choices = f", or use one of {', '.join(self.allowed)}" if self.allowed and not instead else ""
        return f"remove {self.keys[-1]}{choices}{instead}"

    @property
    def _reason(self) -> tuple[str, str | None]:
        reasons = (_REASONS[key] for key in reversed(self.keys) if key in _REASONS)
        return next(reasons, ("it may name a file, a host, a launcher or a module", None))


def refused_of_yaml(config: dict[str, Any]) -> list[Refused]:
    """Return the settings of an accelerate YAML that are not passed on to accelerate."""
    return list(_refused(config, YAML_SETTINGS, ()))


def refused_of_json(config: dict[str, Any]) -> list[Refused]:
    """Return the settings of a DeepSpeed JSON that are not passed on; keys like _comment are allowed."""
    refused = _refused(config, JSON_SETTINGS, ())
    return [
        setting
        for setting in refused
        if not (setting.known and setting.keys[-1].startswith(("_", "//", "#")))
    ]


def _refused(content: dict[str, Any], rules: dict[str, Any], above: tuple[str, ...]) -> Iterator[Refused]:
    prefix = _PREFIXES.get(above[-1], "") if above else ""
    for key, value in content.items():
        keys = (*above, str(key))
        name = keys[-1] if keys[-1].startswith(prefix) else f"{prefix}{key}"
        rule = rules.get(name, rules.get("*"))
        inner = rules if rule == _PLAIN else rule
        is_text = isinstance(value, str | list) and value != "auto"
        if name not in rules and ("*" not in rules or (rule == _PLAIN and is_text)):
            yield Refused(keys, value, tuple(rules), ())
        elif isinstance(inner, dict):
            if isinstance(value, dict):
                yield from _refused(value, inner, keys)
        elif rule is None:
            if value and isinstance(value, dict):
                yield Refused(keys, value, (), ())
        elif isinstance(rule, tuple) and value and not _is_of(value, rule):
            yield Refused(keys, value, (), rule)


def _is_of(value: object, allowed: tuple[str, ...]) -> bool:
    given = {str(item).lower() for item in (value if isinstance(value, list) else [value])}
    return given <= {word.lower() for word in allowed}
