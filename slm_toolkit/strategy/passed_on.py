"""Allowed settings of an accelerate YAML and a DeepSpeed JSON; all other settings are refused.

accelerate copies every key of every section to the option with the same name: `log_dir` in any section sets
torchrun's --log_dir. DeepSpeed writes to paths, imports modules and connects to hosts that its JSON names.
So a setting is passed on only if it is in the lists below.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MOST_CHARACTERS = 80  # of a value in a message

# Rules of a setting: None allows every value except a mapping; a tuple allows these values, or an empty one;
# a mapping contains the rules of a section, with "*" for all keys that it does not name.
_ONLY_OFF = {"enabled": (), "*": None}
"rules of a section that is allowed with `enabled: false` only, DeepSpeed's default for these sections"
_BACKENDS = ("no", "eager", "aot_eager", "inductor", "cudagraphs")
"backends of torch.compile that are part of torch; others import a package"

# accelerate 1.15: the fields of ClusterConfig and the keys that process_config converts to them
# (commands/config/config_args.py), and the options to which a section's keys are copied (commands/launch.py).
# A test compares the lists.
YAML_SETTINGS: dict[str, Any] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "rdzv_backend": ("static", "c10d"),
    **dict.fromkeys(
        (
            *("distributed_type", "mixed_precision", "fp16", "use_cpu", "debug", "num_processes"),
            *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "same_network"),
            *("gpu_ids", "enable_cpu_affinity", "main_training_function", "downcast_bf16"),
            *("tpu_use_cluster", "tpu_use_sudo"),
        )
    ),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "command_file", "commands"), ()),
    "megatron_lm_config": (),
    "mpirun_config": {"mpirun_hostfile": (), "mpirun_ccl": None},
    "fp8_config": {"*": None},  # accelerate puts fp8_ before each key
    "dynamo_backend": _BACKENDS,
    "dynamo_config": {
        "dynamo_backend": _BACKENDS,
        **dict.fromkeys(
            (
                *("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
                "dynamo_use_regional_compilation",
            )
        ),
    },
    "fsdp_config": dict.fromkeys(
        (
            *("fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy"),
            *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
            *("fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch"),
            *("fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"),
            *("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
            "fsdp_ignored_modules",
        )
    ),
    "deepspeed_config": {
        **dict.fromkeys(
            (
                *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
                *("offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps"),
                *("gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"),
                "deepspeed_moe_layer_cls_names",
            )
        ),
        "deepspeed_multinode_launcher": ("standard",),
        **dict.fromkeys(
            ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"), ()
        ),
    },
    "parallelism_config": {
        **dict.fromkeys(
            f"parallelism_config_{name}"
            for name in (
                *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_comm_strategy", "sp_size"),
                *("sp_seq_length", "sp_seq_length_is_variable"),
            )
        ),
        "parallelism_config_cp_backend": ("torch",),
        "parallelism_config_sp_backend": ("deepspeed",),
        "parallelism_config_sp_attn_implementation": (  # others are loaded from the hub
            *("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
        ),
    },
}
_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"prefix that accelerate adds to a section's keys if it is missing"

# the keys of deepspeed 0.19.8; other versions add keys, or still accept keys that this one refuses
_OF_OFFLOAD = ("device", "nvme_path", "buffer_count", "pin_memory")
# DeepSpeed refuses other keys: runtime/zero/config.py, offload_config.py and leaf_module_config.py,
# runtime/zenflow/zenflow_config.py
_ZERO: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
            *("allgather_partitions", "use_multi_rank_bucket_allreduce", "allgather_bucket_size"),
            *("overlap_comm", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint"),
            *("sub_group_size", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "legacy_stage1"),
            *("stage3_model_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
            *("stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold"),
            *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
            *("ignore_unused_parameters", "round_robin_gradients", "parameter_alignment"),
            *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            *("zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint"),
            *("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
            "save_muon_momentum_buffer_in_memory",
        )
    ),
    "offload_param": dict.fromkeys((*_OF_OFFLOAD, "buffer_size", "max_in_cpu")),
    "offload_optimizer": dict.fromkeys(
        (
            *(*_OF_OFFLOAD, "pipeline_read", "pipeline_write", "fast_init", "ratio"),
            *("super_offload", "cpuadam_cores_perc"),
        )
    ),
    "zenflow": dict.fromkeys(
        (
            *("topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step"),
            *("offload", "auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc", "steps_per_epoch"),
        )
    ),
    "leaf_module": dict.fromkeys(("classes", "names", "name_suffixes")),  # compared, never imported
}
# runtime/config.py and the modules that read its sections
JSON_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            *("managed_gradient_accumulation", "gradient_clipping", "communication_data_type"),
            *("seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
            *("gradient_allreduce_op", "disable_allgather", "steps_per_print", "dump_state"),
            *("disable_python_gc", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *("wall_clock_breakdown", "memory_breakdown", "vocabulary_size", "dataloader_drop_last"),
            *("log_level", "use_data_before_expert_parallelism", "sequence_parallel_size"),
        )
    ),
    "optimizer": {"*": None, "params": {"*": None}},  # the type is looked up, not imported
    "scheduler": {"*": None, "params": {"*": None}},
    "zero_optimization": _ZERO,
    "bf16": dict.fromkeys(
        (
            *("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
            "bf16_optimizer_states",
        )
    ),
    "fp16": dict.fromkeys(
        (
            *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window"),
            *("hysteresis", "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
        )
    ),
    "torch_autocast": {
        "enabled": None,
        "dtype": None,
        "lower_precision_safe_modules": (  # DeepSpeed imports their packages
            *("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        ),
    },
    "data_types": dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")),
    "activation_checkpointing": dict.fromkeys(
        (
            *("partition_activations", "number_checkpoints", "contiguous_memory_optimization"),
            *("synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"),
        )
    ),
    "aio": dict.fromkeys(
        (
            *("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"),
            *("use_gds", "thread_count"),  # thread_count: older versions, most examples
        )
    ),
    "comms_logger": dict.fromkeys(("enabled", "prof_all", "prof_ops", "verbose", "debug")),
    "flops_profiler": {
        **dict.fromkeys(
            ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed")
        ),
        "output_file": (),
    },
    "checkpoint": {
        **dict.fromkeys(
            ("tag_validation", "load_universal", "use_node_local_storage", "checkpoint_serialization")
        ),
        "parallel_write": {"pipeline_stage": None},
        "writer": dict.fromkeys(
            (
                *("type", "decoupled", "io_buffer_size", "io_buffer_double", "show_statistics"),
                *("data_parallel", "io_multiplier"),
            )
        ),
    },
    "compile": dict.fromkeys(
        (
            *("deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold"),
            *("offload_activation", "offload_activation_pin_memory", "offload_opt_states", "double_buffer"),
            *("symmetric_memory", "debug_log", "offload_parameters", "sync_before_reduce"),
            *("sync_after_reduce", "sync_before_allgather", "sync_after_allgather"),
            *("keep_int_input_tensors", "keep_all_input_tensors", "passes"),
        )
    ),
    "pipeline": dict.fromkeys(
        (
            *("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned"),
            "grad_partitioned",
        )
    ),
    "timers": {"throughput": dict.fromkeys(("enabled", "synchronized"))},
    "tensor_parallel": {
        **dict.fromkeys(("autotp_size", "dtype", "tp_overlap_comm", "preset_model", "keep_module_on_host")),
        **dict.fromkeys(("tp", "tensor_parallel"), dict.fromkeys(("tp_size", "tp_grain_size"))),
    },
    "weight_quantization": dict.fromkeys(("enabled", "num_bits", "q_type", "q_groups")),
    "model_info": dict.fromkeys(("profile", "num_params", "hidden_size", "num_layers")),
    "msamp": dict.fromkeys(("enabled", "opt_level")),  # accelerate's section
    # these write files, connect to hosts, import packages, or have no use here
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet", "autotuning"), _ONLY_OFF),
    **dict.fromkeys(("hybrid_engine", "expert_parallel"), _ONLY_OFF),
    "data_efficiency": {"enabled": ()},  # `enabled: false` does not turn its subsections off
    "datastates_ckpt": (),
}


_MACHINES = "on each machine `slm launch --num_machines N --main_process_ip IP --machine_rank R`"
_REPORT = "--report_to logs every step"
_REASONS = {  # for a key or its section: what would happen, and what to use instead
    "deepspeed_hostfile": ("DeepSpeed's launcher would connect to the hosts in that file by ssh", _MACHINES),
    "deepspeed_multinode_launcher": ("that launcher would run commands on other hosts", _MACHINES),
    "mpirun_hostfile": ("accelerate would start mpirun on the hosts in that file", _MACHINES),
    "output_file": ("DeepSpeed would overwrite that file", "without this key DeepSpeed prints the profile"),
    "lower_precision_safe_modules": (
        "DeepSpeed would import the modules in this list",
        "the default is torch.nn.Linear and Conv1d to Conv3d",
    ),
    "tensorboard": ("DeepSpeed would write files to the path in the section", _REPORT),
    "csv_monitor": ("DeepSpeed would write files to the path in the section", _REPORT),
    "wandb": ("DeepSpeed would send logs to the account that the section names", _REPORT),
    "comet": ("DeepSpeed would send logs to the account that the section names", _REPORT),
    "autotuning": ("DeepSpeed would write files to the path in the section", None),
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
        return f"{'.'.join(self.keys)} is {shortened(self.value)}"

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
        if name not in rules and "*" not in rules:
            yield Refused(keys, value, tuple(rules), ())
            continue
        rule = rules.get(name)
        if isinstance(rule, dict):
            if isinstance(value, dict):
                yield from _refused(value, rule, keys)
        elif rule is None:
            if value and isinstance(value, dict) and "*" not in rules:
                yield Refused(keys, value, (), ())
        elif value and not all(
            _is_one_of(item, rule) for item in (value if type(value) is list else [value])
        ):
            yield Refused(keys, value, (), rule)


def _is_one_of(value: object, allowed: tuple[str, ...]) -> bool:
    return str(value).lower() in (word.lower() for word in allowed)


def shortened(value: object) -> str:
    """Return a value as JSON, cut off after _MOST_CHARACTERS characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
