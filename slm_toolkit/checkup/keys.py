"""Keys that accelerate 1.15 and DeepSpeed 0.19.8 read, and others: misspelt, removed, renamed, doubled."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from slm_toolkit.checkup.case import Case, fault
from slm_toolkit.finding import KEEP_LAST, REMOVE, Edit, Finding

# accelerate 1.15, commands/config/config_args.py: the fields of ClusterConfig, and what process_config turns
# into others; a test compares.
ACCELERATE_KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm"),
    *("tpu_env", "dynamo_config", "dynamo_backend", "fp16"),
)
# accelerate 1.15, commands/launch.py: options of `accelerate launch`; a section's key is one, or nothing
FSDP_KEYS = (
    *("fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy"),
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
    *("fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing"),
    *("fsdp_activation_checkpointing_offload", "fsdp_ignored_modules"),
)
DEEPSPEED_YAML_KEYS = (
    *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps"),
    *("gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
    "deepspeed_moe_layer_cls_names",
)
PARALLELISM_KEYS = tuple(
    f"parallelism_config_{name}"
    for name in (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy"),
        *("sp_size", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
    )
)
OF_DEEPSPEED = "0.19.8"
"whose keys these are: others add some and still take some that it refuses"
# runtime/zero/config.py and offload_config.py: others are refused (extra="forbid")
ZERO_KEYS = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
    *("use_multi_rank_bucket_allreduce", "allgather_bucket_size", "overlap_comm", "compute_grad_norm"),
    *("load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow"),
    *("sub_group_size", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "leaf_module"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "legacy_stage1"),
    *("stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
    *("stage3_allgather_sequential", "ignore_unused_parameters", "round_robin_gradients"),
    *("parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights"),
    *("zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear"),
    *("pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
    *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
)
_OF_OFFLOAD = ("device", "nvme_path", "buffer_count", "pin_memory")
OFFLOAD_KEYS = {
    "offload_param": (*_OF_OFFLOAD, "buffer_size", "max_in_cpu"),
    "offload_optimizer": (
        *(*_OF_OFFLOAD, "pipeline_read", "pipeline_write", "fast_init", "ratio"),
        *("super_offload", "cpuadam_cores_perc"),
    ),
}
# runtime/config.py and the modules that read sections; others are read by nobody
JSON_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
    *("managed_gradient_accumulation", "scheduler", "zero_optimization", "bf16", "fp16", "torch_autocast"),
    *("gradient_clipping", "communication_data_type", "seq_parallel_communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather"),
    *("steps_per_print", "dump_state", "disable_python_gc", "zero_allow_untested_optimizer", "aio"),
    *("zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown", "vocabulary_size"),
    *("activation_checkpointing", "comms_logger", "flops_profiler", "autotuning", "hybrid_engine"),
    *("pipeline", "data_efficiency", "checkpoint", "data_types", "dataloader_drop_last", "log_level"),
    *("weight_quantization", "compile", "timers", "tensor_parallel", "expert_parallel", "tensorboard"),
    *("wandb", "csv_monitor", "comet", "use_data_before_expert_parallelism", "datastates_ckpt"),
    *("sequence_parallel_size", "model_info", "msamp"),
)
REMOVED_FROM_DEEPSPEED = (  # runtime/config.py: it refuses them
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
REMOVED_FROM_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
RENAMED_IN_ZERO = {  # still read, with a warning; of the new key and its value
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}
_SYNONYMS = {  # what others call it, too far from the key to be found by likeness
    "bfloat16": "bf16",
    "max_grad_norm": "gradient_clipping",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_min_params": "fsdp_min_num_params",
    "num_nodes": "num_machines",
    "node_rank": "machine_rank",
}


def key_faults(case: Case) -> Iterator[Finding]:
    yield from _duplicates(case)
    yield from _of_yaml(case)
    if case.has_json:
        yield from _of_json(case)


def meant_by(key: str, known: tuple[str, ...]) -> str | None:
    """The key that a misspelt one is closest to; None where nothing is close."""
    if key in _SYNONYMS and _SYNONYMS[key] in known:
        return _SYNONYMS[key]
    close = get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    return close[0] if close else None


def _duplicates(case: Case) -> Iterator[Finding]:
    for file, keys in case.files.duplicates:
        value = case.config if file == "yaml" else case.files.deepspeed
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        yield fault(
            *(case, "wrong", "duplicate-key"),
            f"{'.'.join(keys)} stands more than once: the last one, {value!r}, counts",
            topic="launch" if file == "yaml" else "deepspeed",
            why="YAML and JSON readers keep the last value of a key and say nothing, so the first one is "
            "what a reader sees and not what runs",
            change=f"keep one {keys[-1]}",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, KEEP_LAST),),
        )


def _of_yaml(case: Case) -> Iterator[Finding]:
    refused = "accelerate refuses a config file with a key that it does not know"
    ignored = "accelerate passes over a key that it does not know in a section, and says nothing"
    yield from _unknown(case, "yaml", (), case.config, ACCELERATE_KEYS, why=refused, topic="launch")
    sections = [("fsdp_config", FSDP_KEYS, "fsdp"), ("parallelism_config", PARALLELISM_KEYS, "fsdp")]
    if case.engine == "DEEPSPEED":
        sections.append(("deepspeed_config", DEEPSPEED_YAML_KEYS, "deepspeed"))
    for name, known, topic in sections:
        section = case.section(name)
        bare = {key: value for key, value in section.items() if name != "fsdp_config" or _has_prefix(key)}
        bare.update({f"fsdp_{key}": value for key, value in section.items() if key not in bare})
        written = {key: key if key in section else key.removeprefix("fsdp_") for key in bare}
        yield from _unknown(case, "yaml", (name,), bare, known, why=ignored, topic=topic, written=written)


def _has_prefix(key: object) -> bool:
    return str(key).startswith("fsdp")


def _of_json(case: Case) -> Iterator[Finding]:
    ignored = "DeepSpeed passes over a top-level key that it does not know, and says nothing"
    refused = "DeepSpeed refuses a key that it does not know in this section"
    content = case.files.deepspeed
    left = {key: value for key, value in content.items() if key not in REMOVED_FROM_DEEPSPEED}
    yield from _unknown(case, "json", (), left, JSON_KEYS, why=ignored, topic="deepspeed")
    here = ("zero_optimization",)
    left = {key: value for key, value in case.zero.items() if key not in REMOVED_FROM_ZERO}
    yield from _unknown(case, "json", here, left, ZERO_KEYS, why=refused, topic="deepspeed")
    for part, known in OFFLOAD_KEYS.items():
        if isinstance(section := case.zero.get(part), dict):
            yield from _unknown(case, "json", (*here, part), section, known, why=refused, topic="deepspeed")
    gone = [((key,), key in content) for key in REMOVED_FROM_DEEPSPEED]
    gone += [((*here, key), key in case.zero) for key in REMOVED_FROM_ZERO]
    for keys in (keys for keys, is_there in gone if is_there):
        yield fault(
            *(case, "wrong", "removed-key", f"{'.'.join(keys)} is of a feature that DeepSpeed has removed"),
            topic="deepspeed",
            why=f"DeepSpeed {OF_DEEPSPEED} refuses to start with it",
            change=f"remove {keys[-1]}",
            file="json",
            key=".".join(keys),
            edits=(Edit("json", keys, REMOVE),),
        )
    for key, (new, value) in RENAMED_IN_ZERO.items():
        if key in case.zero:
            is_double = new in case.zero
            put = [] if is_double or not case.zero[key] else [Edit("json", (*here, new), value)]
            yield fault(
                *(case, "wrong" if is_double else "unwise", "renamed-key", f"{key} is called {new} now"),
                topic="deepspeed",
                why="DeepSpeed refuses both names together"
                if is_double
                else "DeepSpeed warns of the old name, and will stop reading it",
                change=f"{new}: {value}" if put else f"remove {key}",
                file="json",
                key=f"zero_optimization.{key}",
                edits=(Edit("json", (*here, key), REMOVE), *put),
            )


def _unknown(
    case: Case,
    file: str,
    above: tuple[str, ...],
    section: dict[str, Any],
    known: tuple[str, ...],
    *,
    why: str,
    topic: str,
    written: dict[str, str] | None = None,
) -> Iterator[Finding]:
    """A finding for each key of `section` that is none of `known`; `written`: as the file has them."""
    for key, value in section.items():
        if key in known or str(key).startswith(("_", "//", "#")):  # JSON has no other comments
            continue
        in_file = (written or {}).get(key, key)
        prefix = f"{above[-1]}_" if above == ("parallelism_config",) else ""
        meant = meant_by(f"{prefix}{key}", known) or meant_by(str(key), known)
        edits = [Edit(file, (*above, in_file), REMOVE)]
        if meant is not None and meant not in section:
            edits.append(Edit(file, (*above, meant), value))
        hint = f": did you mean {meant}?" if meant else ""
        is_harmless = file == "json" and not above and meant is None
        yield fault(
            *(case, "unwise" if is_harmless else "wrong", "unknown-key"),
            f"{in_file} is no key of {'.'.join(above) or 'this file'}{hint}",
            topic=topic,
            why=why,
            change=f"write {meant}" if len(edits) > 1 else f"remove {in_file}",
            file=file,
            key=".".join((*above, in_file)),
            edits=tuple(edits),
        )
