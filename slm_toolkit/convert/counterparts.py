"""What FSDP and ZeRO call the same thing, and keys of one that the other lacks: what happens without them.

Keys are those of accelerate 1.15's YAML and of DeepSpeed 0.19's JSON. Bytes are per parameter and rank, in
bf16 with fp32 master weights and Adam on N ranks, as the README counts them.
"""

from dataclasses import dataclass
from typing import Any

ANY = "K"
"a value that both sides write alike"
ZERO = "zero_optimization."
GATHER = ZERO + "stage3_gather_16bit_weights_on_model_save"
INIT_FLAG = "zero3_init_flag"
"of the accelerate YAML's deepspeed_config; every other ZeRO key here is the JSON's"


@dataclass(frozen=True)
class Pair:
    """One value of an FSDP key and the value of a ZeRO key that stands for it."""

    fsdp: str
    fsdp_value: Any
    zero: str
    zero_value: Any
    note: str = ""
    is_same: bool = True
    "False: the nearest there is; the note says what differs"
    stages: tuple[int, ...] = (1, 2, 3)
    way: str = "both"
    "to_zero, to_fsdp or both"


_HOST = "AdamW runs on the CPU under both: PyTorch's under FSDP, DeepSpeed's vectorised one under ZeRO"
_STAGE_2 = (
    "ZeRO-2 keeps whole parameters between steps, too: 2 + 14/N bytes per parameter for 16/N; during a step "
    "both hold them whole; the traffic is alike"
)
_STAGE_1 = (
    "FSDP has no such stage: it splits parameters and gradients as well, 16/N bytes per parameter for 2 + "
    "14/N"
)
_HPZ = (
    "hpZ has one copy of gradients and optimizer state on all N ranks and a second one of the parameters on "
    "each K: 16/N + 2/K bytes per parameter for 16/K; it gathers over all ranks in forward and within the K "
    "in backward, hybrid shard within the K in both, and sends gradients over the rest"
)
_LOADING = (
    "under FSDP rank 0 loads the whole model and sends the others their part; under ZeRO-3 every rank makes "
    "each layer and keeps its part: weights drawn from a seed come out as others, loaded ones don't"
)
_GATHERED = (
    "ZeRO's checkpoints are one file per rank whatever is asked; the key decides whether whole 16-bit "
    "weights are written when the model is saved"
)
SAVED = (
    "accelerate's get_state_dict gathers whole weights under FSDP2 with either type; the Trainer's "
    "save_model does so with FULL_STATE_DICT only"
)
_NUMERICS = (
    "fp32 masters under both; the dtypes of residuals, loss and reduction are the engine's: see the README"
)

PAIRS = (
    Pair(
        "fsdp_reshard_after_forward",
        True,
        ZERO + "stage",
        3,
        "16/N bytes per parameter, the same traffic",
        stages=(3,),
    ),
    Pair("fsdp_reshard_after_forward", False, ZERO + "stage", 2, _STAGE_2, is_same=False, stages=(2,)),
    Pair("fsdp_reshard_after_forward", False, ZERO + "stage", 1, _STAGE_1, False, (1,), "to_fsdp"),
    Pair("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "cpu", _HOST, stages=(3,)),
    Pair("fsdp_offload_params", True, ZERO + "offload_param.device", "cpu", _HOST, stages=(3,)),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "cpu"),
        "ZeRO-1 and 2 keep the parameters on the GPU, 2 bytes each, and copy them once per step; "
        "FSDP keeps them in host RAM and copies them whenever it gathers them; " + _HOST,
        is_same=False,
        stages=(1, 2),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "nvme"),
        "FSDP has no disk: host RAM instead, 16 bytes per parameter over all ranks",
        *(False, (1, 2, 3), "to_fsdp"),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_param.device", "nvme"),
        "FSDP has no disk: host RAM instead, 16 bytes per parameter over all ranks",
        *(False, (3,), "to_fsdp"),
    ),
    Pair("parallelism_config_dp_shard_size", ANY, ZERO + "zero_hpz_partition_size", ANY, _HPZ, False, (3,)),
    Pair("fsdp_cpu_ram_efficient_loading", True, INIT_FLAG, True, _LOADING, is_same=False, stages=(3,)),
    Pair("fsdp_cpu_ram_efficient_loading", False, INIT_FLAG, False, stages=(3,)),
    Pair(
        *("fsdp_state_dict_type", "FULL_STATE_DICT", GATHER, True),
        *(_GATHERED, False, (3,)),
    ),
    Pair(
        *("fsdp_state_dict_type", "SHARDED_STATE_DICT", GATHER, False),
        *(SAVED, True, (3,), "to_fsdp"),
    ),
    Pair("mixed_precision", "bf16", "bf16.enabled", True, _NUMERICS, stages=(0, 1, 2, 3)),
    Pair("mixed_precision", "fp16", "fp16.enabled", True, _NUMERICS, stages=(0, 1, 2, 3)),
)


def pairs_to_zero(key: str, value: Any, stage: int) -> list[tuple[str, Any, Pair]]:
    """Keys and values of a ZeRO configuration of that stage that stand for an FSDP setting."""
    found = [p for p in PAIRS if p.fsdp == key and p.way != "to_fsdp" and stage in p.stages]
    return [
        (p.zero, value if p.zero_value == ANY else p.zero_value, p) for p in found if _is(value, p.fsdp_value)
    ]


def pairs_to_fsdp(key: str, value: Any, stage: int) -> list[tuple[str, Any, Pair]]:
    """Keys and values of an FSDP configuration that stand for a ZeRO setting of that stage."""
    found = [p for p in PAIRS if p.zero == key and p.way != "to_zero" and stage in p.stages]
    return [
        (p.fsdp, value if p.fsdp_value == ANY else p.fsdp_value, p) for p in found if _is(value, p.zero_value)
    ]


def _is(value: Any, wanted: Any) -> bool:
    return wanted == ANY or (type(value) is type(wanted) and value == wanted)


@dataclass(frozen=True)
class Alone:
    """A key that only one side has."""

    key: str
    "one that ends in a dot, or is empty, stands for all that begin so"
    note: str
    as_other: tuple[Any, ...] = ()
    "values with which this side does what the other always does"


FSDP_ALONE = (
    Alone(
        "fsdp_auto_wrap_policy",
        "ZeRO has no units: stage 3 gathers parameters module by module, ahead by "
        "stage3_prefetch_bucket_size elements, stages 1 and 2 gather none",
    ),
    Alone("fsdp_transformer_layer_cls_to_wrap", "ZeRO has no units to name", (None,)),
    Alone("fsdp_min_num_params", "ZeRO has no units whose size could be bounded", (None, 0)),
    Alone(
        "fsdp_activation_checkpointing",
        "no key of DeepSpeed's does it to a Hugging Face model: the script's --gradient_checkpointing does",
        (False,),
    ),
    Alone(
        "fsdp_activation_checkpointing_offload",
        "DeepSpeed moves only the activations of its own checkpointing functions: those of each layer stay "
        "on the GPU",
        (False, None),
    ),
    Alone(
        "fsdp_ignored_modules", "ZeRO takes all parameters: the modules named here are sharded, too", (None,)
    ),
    Alone(
        "fsdp_state_dict_type",
        "ZeRO's checkpoints are one file per rank; stages 1 and 2 hold whole weights anyway",
        ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    ),
    Alone(
        "fsdp_cpu_ram_efficient_loading",
        "zero3_init_flag is stage 3's: every rank loads the whole model into host RAM",
        (False,),
    ),
    Alone("fsdp_offload_params", "nothing is offloaded", (False,)),
    Alone("fsdp_version", "accelerate's word for FSDP2", (2,)),
    Alone(
        "parallelism_config_dp_replicate_size",
        "ZeRO keeps one copy of gradients and optimizer state on all ranks: less memory, and these cross "
        "all links",
        (1, None),
    ),
    Alone(
        "parallelism_config_dp_shard_size",
        "hpZ is stage 3's: gradients and optimizer state are split over all ranks, across nodes, too",
    ),
    Alone(
        "parallelism_config_tp_size",
        "ranks of a tensor-parallel group would read batches of their own: the global batch is larger by "
        "this factor",
        (1, None),
    ),
    Alone(
        "parallelism_config_cp_size",
        "ranks of a context-parallel group would read batches of their own: the global batch is larger by "
        "this factor",
        (1, None),
    ),
    Alone("parallelism_config_cp_backend", "of context parallelism, which ZeRO has not", ("torch", None)),
    Alone(
        "parallelism_config_sp_size",
        "not converted: under ZeRO it also needs the script to pass the sequence on",
        (1, None),
    ),
    Alone("parallelism_config_sp_backend", "of sequence parallelism", ("deepspeed", None)),
)

_DISK = "FSDP has no disk; nothing to tune"
_LOGS = "what DeepSpeed prints; nothing of the training"
_SCRIPTS = "the script says it: FSDP knows nothing of it"

ZERO_ALONE = (
    Alone(ZERO + "overlap_comm", "FSDP reduces beside backward, always", (True,)),
    Alone(ZERO + "contiguous_gradients", "FSDP copies a layer's gradients into one buffer, always", (True,)),
    Alone(ZERO + "reduce_scatter", "FSDP reduces by reduce-scatter, always", (True,)),
    Alone(ZERO + "allgather_partitions", "FSDP gathers by all-gather, always", (True,)),
    Alone(ZERO + "reduce_bucket_size", "a layer is FSDP's bucket: one reduce-scatter per layer"),
    Alone(ZERO + "allgather_bucket_size", "a layer is FSDP's bucket: one all-gather per layer"),
    Alone(
        ZERO + "stage3_prefetch_bucket_size",
        "FSDP2 gathers about one layer ahead; slm_toolkit.train --fsdp_prefetch N gathers more",
    ),
    Alone(
        ZERO + "stage3_param_persistence_threshold",
        "FSDP2 shards small parameters as well and gathers them with their layer, in the same message",
    ),
    Alone(ZERO + "stage3_model_persistence_threshold", "FSDP2 shards small parameters as well"),
    Alone(
        ZERO + "stage3_max_live_parameters",
        "FSDP2 holds the layer that computes and the one gathered ahead, no more",
    ),
    Alone(
        ZERO + "stage3_max_reuse_distance",
        "FSDP2 frees each layer after its forward: above 0 ZeRO-3 keeps more and gathers less",
        (0,),
    ),
    Alone(
        ZERO + "stage3_gather_16bit_weights_on_model_save",
        "below stage 3 every rank holds whole weights",
        (True, False),
    ),
    Alone(
        ZERO + "sub_group_size",
        "FSDP's optimizer steps over its whole shard at once; more host RAM with NVMe",
    ),
    Alone(
        ZERO + "round_robin_gradients",
        "FSDP copies each layer's shard of the gradients as it comes",
        (False,),
    ),
    Alone(ZERO + "zero_hpz_partition_size", "one group of all ranks", (0, 1)),
    Alone(
        ZERO + "zero_quantized_weights",
        "FSDP gathers bf16, without int8's rounding: twice the bytes (arXiv:2306.10209, section 3)",
        (False,),
    ),
    Alone(
        ZERO + "zero_quantized_gradients",
        "FSDP reduces bf16, without the rounding: four times the bytes between nodes (arXiv:2306.10209, "
        "section 3)",
        (False,),
    ),
    Alone(ZERO + "zero_quantized_nontrainable_weights", "FSDP holds frozen weights as they are", (False,)),
    Alone(ZERO + "offload_optimizer.device", "nothing is offloaded", ("none",)),
    Alone(
        ZERO + "offload_param.device",
        "DeepSpeed offloads parameters at stage 3 only",
        ("none", "cpu", "nvme"),
    ),
    Alone(ZERO + "offload_optimizer.pin_memory", "FSDP2 pins the host's pages, always", (True,)),
    Alone(ZERO + "offload_param.pin_memory", "FSDP2 pins the host's pages, always", (True,)),
    Alone(ZERO + "offload_optimizer.ratio", "FSDP offloads all or nothing", (1, 1.0)),
    Alone(ZERO + "offload_optimizer.", _DISK),
    Alone(ZERO + "offload_param.", _DISK),
    Alone("aio.", _DISK),
    Alone(ZERO, "a detail of DeepSpeed's engine that FSDP has no word for"),
    Alone("bf16.enabled", "the script's or accelerate's mixed_precision decides", ("auto", False)),
    Alone("fp16.enabled", "the script's or accelerate's mixed_precision decides", ("auto", False)),
    Alone("bf16.bf16_master_weights_and_grads", "slm_toolkit.train --numerics pure_bf16 does it", (False,)),
    Alone("bf16.bf16_optimizer_states", "slm_toolkit.train --numerics pure_bf16 does it", (False,)),
    Alone(
        "fp16.",
        "PyTorch's GradScaler has its own: start at 65536, halve on overflow, double after 2000 steps",
    ),
    Alone(
        "gradient_clipping",
        "the script clips: accelerator.clip_grad_norm_, max_grad_norm of the Trainer and of "
        "slm_toolkit.train",
        ("auto",),
    ),
    Alone(
        "gradient_accumulation_steps",
        "the script accumulates: Accelerator(gradient_accumulation_steps=...), the Trainer's flag, "
        "slm_toolkit.train's",
        ("auto", 1),
    ),
    Alone("train_micro_batch_size_per_gpu", "the script's batch size per process", ("auto",)),
    Alone("train_batch_size", "ranks x batch per process x accumulation, all three the script's", ("auto",)),
    Alone("optimizer.", "the script builds its optimizer, not the engine"),
    Alone("scheduler.", "the script builds its schedule, not the engine"),
    Alone(
        "communication_data_type",
        "the dtype of the reduction is in no YAML of accelerate: slm_toolkit.train --reduce_dtype",
    ),
    Alone("data_types.", "dtypes are in no YAML of accelerate: slm_toolkit.train --reduce_dtype, --numerics"),
    Alone(
        "activation_checkpointing.",
        "read by models that call DeepSpeed's checkpointing only, and Hugging Face's don't: "
        "--gradient_checkpointing",
    ),
    Alone("prescale_gradients", "FSDP divides before and after reducing as fits the dtype", (False,)),
    Alone("gradient_predivide_factor", "FSDP divides before and after reducing as fits the dtype", (1, 1.0)),
    Alone("steps_per_print", _LOGS),
    Alone("wall_clock_breakdown", _LOGS, (False,)),
    Alone("dump_state", _LOGS, (False,)),
    Alone("flops_profiler.", _LOGS),
    Alone("comms_logger.", _LOGS),
    Alone("tensorboard.", _LOGS),
    Alone("wandb.", _LOGS),
    Alone("csv_monitor.", _LOGS),
    Alone("zero_allow_untested_optimizer", "a check of DeepSpeed's; FSDP takes any optimizer", (True, False)),
    Alone("zero_force_ds_cpu_optimizer", "a check of DeepSpeed's; FSDP takes any optimizer", (True, False)),
    Alone("", "a setting of DeepSpeed's engine that FSDP has no word for"),
)

PLUGIN_ALONE = (
    Alone(INIT_FLAG, "stage 3's alone: nothing is built in pieces", (False, True)),
    Alone(
        "deepspeed_multinode_launcher",
        "accelerate starts FSDP with its own launcher: run `accelerate launch --machine_rank R` on every "
        "machine",
        ("standard",),
    ),
    Alone("deepspeed_hostfile", "run `accelerate launch --machine_rank R` on every machine"),
    Alone("deepspeed_inclusion_filter", "gpu_ids names the GPUs of a machine"),
    Alone("deepspeed_exclusion_filter", "gpu_ids names the GPUs of a machine"),
    Alone("deepspeed_moe_layer_cls_names", "FSDP gathers a layer with all of its experts anyway"),
)


def alone(table: tuple[Alone, ...], key: str) -> Alone | None:
    """The table's row for a key; where several begin like it the first counts."""
    return next(
        (r for r in table if r.key == key or (r.key[-1:] in ("", ".") and key.startswith(r.key))), None
    )
