"""What accelerate's YAML, its launcher, torchrun and TrainingArguments call the same thing.

accelerate 1.15 (commands/launch.py, utils/launch.py) and transformers 5.23 (training_args.py).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FsdpKey:
    """One setting of FSDP2 under its two names, and what each side does where it is silent."""

    accelerate: str
    "in fsdp_config of accelerate's YAML"
    trainer: str | None
    "in fsdp_config of TrainingArguments; None: only a variable of the environment reaches it"
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
ALWAYS_SAID = (
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_state_dict_type"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_activation_checkpointing"),
)
"keys whose default is written out when the source is silent: the two sides' defaults differ, or matter most"
FSDP_TRUTHS = tuple(key.accelerate for key in FSDP_KEYS if isinstance(key.launch_default, bool))

FSDP1_ONLY = {  # key: (value with which FSDP1 does what FSDP2 always does, why it goes)
    "fsdp_sharding_strategy": (
        None,
        "FSDP1's word for fsdp_reshard_after_forward, read under fsdp_version 1 only",
    ),
    "fsdp_use_orig_params": (True, "FSDP2 keeps the original parameters, always"),
    "fsdp_sync_module_states": (
        True,
        "FSDP2 has no such option: ranks start from what each of them loaded or was sent",
    ),
    "fsdp_forward_prefetch": (False, "FSDP2 refuses it; it gathers one layer ahead by itself"),
    "fsdp_backward_prefetch": (
        "BACKWARD_PRE",
        "FSDP2 gathers the next layer before it computes this one, always",
    ),
    "fsdp_limit_all_gathers": (True, "FSDP2 limits them, always"),
}
SHARDING = {  # FSDP1's strategies, in the order of their numbers: (reshard after forward, hybrid)
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "NO_SHARD": (None, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")

LAUNCH = {  # of a YAML that converts from none; as our own YAMLs have it
    "num_machines": 1,
    "machine_rank": 0,
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "use_cpu": False,
    "debug": False,
}
LAUNCHERS_OWN = ("compute_environment", "same_network", "main_training_function", "distributed_type")
"keys that say nothing outside of accelerate's launcher"

TORCHRUN = {  # accelerate's key: torchrun's option
    "num_machines": "--nnodes",
    "machine_rank": "--node_rank",
    "main_process_ip": "--master_addr",
    "main_process_port": "--master_port",
}
VARIABLES = {  # accelerate's key: the variable that its launcher would set
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
"without it accelerate reads none of the PARALLELISM_CONFIG_ variables"
DEEPSPEED_LAUNCHER = {  # the `deepspeed` command's option: key of the YAML's deepspeed_config
    "--hostfile": "deepspeed_hostfile",
    "--include": "deepspeed_inclusion_filter",
    "--exclude": "deepspeed_exclusion_filter",
    "--launcher": "deepspeed_multinode_launcher",
}

DEEPSPEED_ARGUMENTS = {  # DeepSpeed's key: the argument that must say the same, or transformers refuses
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
"TrainingArguments that have a place in accelerate's YAML; all others stay the script's"
BARE = ("fsdp", "bf16", "fp16", "use_cpu", "torch_compile")
"those that may stand on a command line without a value"
