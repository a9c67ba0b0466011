"""Equivalent settings of FSDP2 and ZeRO, and those that only one of them has.

Keys are those of accelerate 1.15's YAML and of DeepSpeed 0.19's JSON. Bytes are per parameter and rank, in
bf16 with fp32 master weights and Adam on N ranks, as in docs/memory.md.
"""

from dataclasses import dataclass
from typing import Any

ZERO = "zero_optimization."
INIT_FLAG = "deepspeed_config.zero3_init_flag"


@dataclass(frozen=True)
class Pair:
    """One value of an FSDP key and the equivalent value of a ZeRO key.

    Keys have their path from the top of the YAML, or after `json` of the DeepSpeed JSON.
    """

    fsdp: str
    fsdp_value: Any
    zero: str
    zero_value: Any
    note: str = ""
    is_same: bool = True
    "False: not the same, only the nearest setting; the note names the difference"
    stages: tuple[int, ...] = (1, 2, 3)
    way: str = "both"
    "to_zero, to_fsdp or both"


_HOST = (
    "AdamW runs on the CPU under both: PyTorch's AdamW under FSDP, DeepSpeed's vectorized AdamW under ZeRO"
)
_TOGETHER = f"FSDP offloads parameters, gradients and optimizer state together to host RAM; {_HOST}"
_DISK = "FSDP can't offload to disk: it uses host RAM, 16 bytes per parameter over all ranks"
_RESHARD, _OFFLOAD, _LOADING = (
    "fsdp_config.fsdp_reshard_after_forward",
    "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_cpu_ram_efficient_loading",
)
_STATE_DICT, _STAGE = "fsdp_config.fsdp_state_dict_type", f"json.{ZERO}stage"
_OPTIMIZER, _PARAM = f"json.{ZERO}offload_optimizer.device", f"json.{ZERO}offload_param.device"
_GATHER = f"json.{ZERO}stage3_gather_16bit_weights_on_model_save"
NUMERICS = (
    "both have fp32 master weights; the engine decides the dtypes of residuals, loss and reduction: see "
    "docs/numerics_and_parity.md"
)

PAIRS = (
    Pair(_RESHARD, True, _STAGE, 3, "16/N bytes per parameter, the same traffic", stages=(3,)),
    Pair(
        _RESHARD,
        False,
        _STAGE,
        2,
        "ZeRO-2 also keeps whole parameters between steps: 2 + 14/N bytes per parameter instead of 16/N; "
        "during a step both keep them whole; the traffic is the same",
        False,
        (2,),
    ),
    Pair(
        _RESHARD,
        False,
        _STAGE,
        1,
        "FSDP has no such stage: it also shards parameters and gradients, 16/N bytes per parameter instead "
        "of 2 + 14/N",
        False,
        (1,),
        "to_fsdp",
    ),
    Pair(_OFFLOAD, True, _OPTIMIZER, "cpu", _TOGETHER, False, (3,)),
    Pair(_OFFLOAD, True, _PARAM, "cpu", _TOGETHER, False, (3,)),
    Pair(
        _OFFLOAD,
        True,
        _OPTIMIZER,
        "cpu",
        "ZeRO-1 and 2 keep the parameters on the GPU, 2 bytes each, and copy them once per step; "
        "FSDP keeps them in host RAM and copies them at every gather; " + _HOST,
        False,
        (1, 2),
    ),
    Pair(_OFFLOAD, True, _OPTIMIZER, "nvme", _DISK, False, (1, 2, 3), "to_fsdp"),
    Pair(_OFFLOAD, True, _PARAM, "nvme", _DISK, False, (3,), "to_fsdp"),
    Pair(
        _LOADING,
        True,
        INIT_FLAG,
        True,
        "under FSDP rank 0 loads the whole model and sends each rank its shard; under ZeRO-3 every rank "
        "builds each layer and keeps its shard: weights drawn from a seed differ, loaded weights do not",
        False,
        (3,),
    ),
    Pair(_LOADING, False, INIT_FLAG, False, stages=(3,)),
    Pair(
        _STATE_DICT,
        "FULL_STATE_DICT",
        _GATHER,
        True,
        "ZeRO's checkpoints are always one file per rank; this key decides whether whole 16-bit weights are "
        "written when the model is saved",
        False,
        (3,),
        "to_zero",
    ),
    Pair(
        _STATE_DICT,
        "SHARDED_STATE_DICT",
        _GATHER,
        True,
        "accelerate's get_state_dict gathers whole weights under FSDP2 with both types; the Trainer's "
        "save_model only with FULL_STATE_DICT",
        True,
        (3,),
        "to_fsdp",
    ),
    Pair(_STATE_DICT, "SHARDED_STATE_DICT", _GATHER, False, "", True, (3,), "to_fsdp"),
    Pair("mixed_precision", "bf16", "json.bf16.enabled", True, NUMERICS),
    Pair("mixed_precision", "fp16", "json.fp16.enabled", True, NUMERICS),
)

# Keys that only one engine has, separated by spaces: what the other engine does, and the values with which
# this engine does the same. A key also stands for all keys below it.

FSDP_ALONE: dict[str, tuple[Any, ...]] = {
    "fsdp_auto_wrap_policy": (
        "ZeRO has no units: stage 3 gathers parameters module by module and prefetches "
        "stage3_prefetch_bucket_size elements; stages 1 and 2 gather none",
    ),
    "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": ("ZeRO has no units", None, 0),
    "fsdp_activation_checkpointing": (
        "DeepSpeed has no key for Hugging Face models: use the script's --gradient_checkpointing",
        False,
    ),
    "fsdp_activation_checkpointing_offload": (
        "DeepSpeed offloads only the activations of its own checkpointing functions: the activations of each "
        "layer stay on the GPU",
        False,
        None,
    ),
    "fsdp_ignored_modules": (
        "ZeRO shards all parameters, also those of the modules named here",
        None,
    ),
    _STATE_DICT: (
        "ZeRO's checkpoints are one file per rank; under stages 1 and 2 every rank has whole weights anyway",
        "SHARDED_STATE_DICT",
        "FULL_STATE_DICT",
    ),
    _LOADING: ("zero3_init_flag needs stage 3: every rank loads the whole model into host RAM", False),
    _OFFLOAD: ("nothing is offloaded", False),
    "fsdp_version": ("accelerate's key that selects FSDP2", 2),
    "fsdp_use_orig_params fsdp_sync_module_states fsdp_forward_prefetch": (
        "FSDP2 does not read it",
        True,
        False,
    ),
    "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size": (
        "ZeRO shards over all ranks: less memory, but more traffic between nodes; ds_zeropp keeps a second "
        "copy of the parameters in each node",
        1,
        None,
    ),
    "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size": (
        "each rank of a group would read its own batch: the global batch is larger by this factor",
        1,
        None,
    ),
    "mixed_precision fp8_config": (
        "accelerate refuses mixed_precision together with a DeepSpeed JSON, and the JSON has no key for fp8",
    ),
}

ZERO_ALONE: dict[str, tuple[Any, ...]] = {
    "overlap_comm": ("FSDP always reduces during backward", True),
    "contiguous_gradients": ("FSDP always copies a layer's gradients into one buffer", True),
    "reduce_scatter allgather_partitions": ("FSDP always does so", True),
    "reduce_bucket_size allgather_bucket_size": (
        "FSDP's bucket is a layer: one reduce-scatter and one all-gather per layer",
    ),
    "stage3_prefetch_bucket_size": ("FSDP2 prefetches about one layer",),
    "stage3_param_persistence_threshold stage3_model_persistence_threshold": (
        "FSDP2 also shards small parameters and gathers them together with their layer",
    ),
    "stage3_max_live_parameters": ("FSDP2 keeps only the layer that computes and the prefetched layer",),
    "stage3_max_reuse_distance": (
        "FSDP2 frees each layer after its forward; above 0 ZeRO-3 keeps more and gathers less",
        0,
    ),
    _GATHER: ("below stage 3 every rank has whole weights", True, False),
    "sub_group_size": (
        "FSDP's optimizer updates its whole shard at once; with NVMe this needs more host RAM",
    ),
    "round_robin_gradients": (
        "FSDP copies each layer's gradient shard in the order of backward",
        False,
    ),
    "zero_hpz_partition_size": (
        "FSDP keeps no second copy of the parameters; fsdp_hybrid_shard shards within groups of ranks",
        0,
        1,
    ),
    "zero_quantized_weights": (
        "FSDP gathers bf16 without int8 rounding: twice the bytes (arXiv:2306.10209, section 3)",
        False,
    ),
    "zero_quantized_gradients": (
        "FSDP reduces bf16 without rounding: four times the bytes between nodes (arXiv:2306.10209, "
        "section 3)",
        False,
    ),
    "offload_optimizer.device": ("nothing is offloaded", "none"),
    "offload_param.device": (
        "DeepSpeed offloads parameters at stage 3 only",
        "none",
        "cpu",
        "nvme",
    ),
    "offload_optimizer.pin_memory offload_param.pin_memory": ("FSDP2 always pins host memory", True),
    "offload_optimizer.ratio": ("FSDP offloads all or nothing", 1),
    "offload_optimizer offload_param aio": ("FSDP can't offload to disk: nothing to tune",),
    "bf16.enabled fp16.enabled": (
        "the script's or accelerate's mixed_precision decides",
        "auto",
        False,
    ),
    "fp16": ("PyTorch's GradScaler has its own: start at 65536, halve on overflow, double after 2000 steps",),
    "gradient_clipping": (
        "the script clips: accelerator.clip_grad_norm_, or max_grad_norm of the Trainer and of "
        "slm_toolkit.train",
        "auto",
    ),
    "gradient_accumulation_steps": (
        "the script accumulates: Accelerator(gradient_accumulation_steps=...), or the flag of the Trainer "
        "and slm_toolkit.train",
        "auto",
        1,
    ),
    "train_micro_batch_size_per_gpu train_batch_size": ("the script sets the batch size", "auto"),
    "optimizer scheduler": ("the script builds the optimizer and the scheduler",),
    "communication_data_type data_types": (
        "accelerate's YAML can't set dtypes: use slm_toolkit.train --numerics",
    ),
    "activation_checkpointing": (
        "only models that call DeepSpeed's checkpointing read it, and Hugging Face's do not: use "
        "--gradient_checkpointing",
    ),
    "prescale_gradients gradient_predivide_factor": (
        "FSDP divides by factors that depend on the dtype",
        False,
        1,
    ),
    "steps_per_print wall_clock_breakdown dump_state flops_profiler comms_logger tensorboard wandb": (
        "DeepSpeed's logs; no effect on training",
        False,
    ),
    INIT_FLAG: ("it needs stage 3: every rank builds the whole model", False, True),
    "deepspeed_multinode_launcher deepspeed_hostfile": (
        "accelerate starts FSDP with its own launcher: run `accelerate launch --machine_rank R` on every "
        "machine",
        "standard",
    ),
}
