"""Equivalent names in accelerate's YAML, its launcher, torchrun and TrainingArguments.

Sources: accelerate 1.15 (commands/launch.py, utils/launch.py) and transformers 5.23 (training_args.py).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FsdpKey:
    """One setting of FSDP2: its name and its default in accelerate's YAML and in TrainingArguments."""

    accelerate: str
    "key in fsdp_config of accelerate's YAML"
    trainer: str | None
    "key in fsdp_config of TrainingArguments; None: only an environment variable sets it"
    launch_default: Any
    trainer_default: Any


FSDP_KEYS = (
    FsdpKey("fsdp_version", "version", 1, 2),
    FsdpKey("fsdp_reshard_after_forward", "reshard_after_forward", True, True),
    FsdpKey("fsdp_auto_wrap_policy", "auto_wrap_policy", "NO_WRAP", "TRANSFORMER_BASED_WRAP"),
    FsdpKey("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap", None, None),
    FsdpKey("fsdp_min_num_params", "min_num_params", 100_000_000, 0),
    FsdpKey("fsdp_state_dict_type", "state_dict_type", "SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    FsdpKey("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading", True, False),
    FsdpKey("fsdp_offload_params", "cpu_offload", False, False),
    FsdpKey("fsdp_activation_checkpointing", "activation_checkpointing", False, False),
    FsdpKey("fsdp_activation_checkpointing_offload", None, False, False),
    FsdpKey("fsdp_ignored_modules", None, None, None),
)
ALWAYS_WRITTEN = (
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_state_dict_type"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_activation_checkpointing"),
)
"keys whose default is written if the source does not set them: the defaults differ, or matter most"
FSDP_TRUTHS = tuple(key.accelerate for key in FSDP_KEYS if isinstance(key.launch_default, bool))

FSDP1_ONLY = {  # key: (value with which FSDP1 does the same as FSDP2, why the key is dropped)
    "fsdp_sharding_strategy": (
        None,
        "FSDP1's name for fsdp_reshard_after_forward, read under fsdp_version 1 only",
    ),
    "fsdp_use_orig_params": (True, "FSDP2 always keeps the original parameters"),
    "fsdp_sync_module_states": (
        True,
        "FSDP2 has no such option: each rank starts from the weights that it loaded or received",
    ),
    "fsdp_forward_prefetch": (False, "FSDP2 refuses it and always prefetches one layer"),
    "fsdp_backward_prefetch": (
        "BACKWARD_PRE",
        "FSDP2 always gathers the next layer before it computes this one",
    ),
    "fsdp_limit_all_gathers": (True, "FSDP2 always limits them"),
}
SHARDING = {  # FSDP1's strategies, in the order of their numbers: (reshard after forward, hybrid)
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "NO_SHARD": (None, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")

LAUNCH = {  # launcher keys for a source that has none, with the values of our YAMLs
    "num_machines": 1,
    "machine_rank": 0,
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "use_cpu": False,
    "debug": False,
}
LAUNCHERS_OWN = ("compute_environment", "same_network", "main_training_function", "distributed_type")
"keys that only accelerate's launcher uses"

TORCHRUN = {  # accelerate's key: torchrun's option
    "num_machines": "--nnodes",
    "machine_rank": "--node_rank",
    "main_process_ip": "--master_addr",
    "main_process_port": "--master_port",
}
VARIABLES = {  # accelerate's key: the environment variable that its launcher sets
    "gpu_ids": "CUDA_VISIBLE_DEVICES",
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "fsdp_activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "fsdp_ignored_modules": "FSDP_IGNORED_MODULES",
    "parallelism_config_dp_replicate_size": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "parallelism_config_dp_shard_size": "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "parallelism_config_tp_size": "PARALLELISM_CONFIG_TP_SIZE",
    "parallelism_config_cp_size": "PARALLELISM_CONFIG_CP_SIZE",
    "parallelism_config_sp_size": "PARALLELISM_CONFIG_SP_SIZE",
}
USE_GROUPS = "ACCELERATE_USE_PARALLELISM_CONFIG"
"accelerate reads the PARALLELISM_CONFIG_ variables only if this one is true"
DEEPSPEED_LAUNCHER = {  # the `deepspeed` command's option: key of the YAML's deepspeed_config
    "--hostfile": "deepspeed_hostfile",
    "--include": "deepspeed_inclusion_filter",
    "--exclude": "deepspeed_exclusion_filter",
    "--launcher": "deepspeed_multinode_launcher",
}

DEEPSPEED_ARGUMENTS = {  # DeepSpeed's key: the arguments that transformers requires to be equal
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
    "bf16.enabled": ("bf16",),
    "fp16.enabled": ("fp16",),
}
ARGUMENTS_READ = ("fsdp", "fsdp_config", "deepspeed", "bf16", "fp16", "use_cpu", "torch_compile")
ARGUMENTS_READ += ("torch_compile_backend", "torch_compile_mode")
"TrainingArguments with an equivalent in accelerate's YAML; all others stay with the script"
BARE = ("fsdp", "bf16", "fp16", "use_cpu", "torch_compile")
"arguments that may have no value on a command line"
