"""Convert a draft from one engine to another, by a table of equivalent FSDP and ZeRO settings.

Keys are those of accelerate 1.15's YAML and of DeepSpeed 0.19's JSON. Bytes are per parameter and rank, in
bf16 with fp32 master weights and Adam on N ranks, as in docs/memory.md.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slm_toolkit.convert.settings import (
    Draft,
    KeyAccount,
    Setting,
    account_of,
    flat,
    hybrid_settings,
    of_key,
    ranks_per_node,
    stage_of,
    truth,
    value_of,
)
from slm_toolkit.strategy.strategy import config_dir

ANY = "K"
"marks a value that both engines write the same way"
ZERO = "zero_optimization."
GATHER = ZERO + "stage3_gather_16bit_weights_on_model_save"
INIT_FLAG = "zero3_init_flag"
"a key of the accelerate YAML's deepspeed_config; all other ZeRO keys below are in the JSON"


@dataclass(frozen=True)
class Pair:
    """One value of an FSDP key and the equivalent value of a ZeRO key."""

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
_STAGE_2 = (
    "ZeRO-2 also keeps whole parameters between steps: 2 + 14/N bytes per parameter instead of 16/N; during "
    "a step both keep them whole; the traffic is the same"
)
_STAGE_1 = (
    "FSDP has no such stage: it also shards parameters and gradients, 16/N bytes per parameter instead of "
    "2 + 14/N"
)
_HPZ = (
    "hpZ shards gradients and optimizer state over all N ranks and keeps a second copy of the parameters in "
    "each group of K ranks: 16/N + 2/K bytes per parameter instead of 16/K. hpZ gathers over all ranks in "
    "forward and within the group in backward; hybrid shard gathers within the group in both and reduces "
    "gradients between groups"
)
_LOADING = (
    "under FSDP rank 0 loads the whole model and sends each rank its shard; under ZeRO-3 every rank builds "
    "each layer and keeps its shard: weights drawn from a seed differ, loaded weights do not"
)
_GATHERED = (
    "ZeRO's checkpoints are always one file per rank; this key decides whether whole 16-bit weights are "
    "written when the model is saved"
)
SAVED = (
    "accelerate's get_state_dict gathers whole weights under FSDP2 with both types; the Trainer's "
    "save_model only with FULL_STATE_DICT"
)
_NUMERICS = (
    "both have fp32 master weights; the engine decides the dtypes of residuals, loss and reduction: see "
    "docs/numerics_and_parity.md"
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
        "FSDP keeps them in host RAM and copies them at every gather; " + _HOST,
        is_same=False,
        stages=(1, 2),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "nvme"),
        "FSDP can't offload to disk: it uses host RAM, 16 bytes per parameter over all ranks",
        *(False, (1, 2, 3), "to_fsdp"),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_param.device", "nvme"),
        "FSDP can't offload to disk: it uses host RAM, 16 bytes per parameter over all ranks",
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
    """Return the ZeRO keys and values that are equivalent to an FSDP setting at this stage."""
    pairs = [p for p in PAIRS if p.fsdp == key and p.way != "to_fsdp" and stage in p.stages]
    return [
        (p.zero, value if p.zero_value == ANY else p.zero_value, p) for p in pairs if _is(value, p.fsdp_value)
    ]


def pairs_to_fsdp(key: str, value: Any, stage: int) -> list[tuple[str, Any, Pair]]:
    """Return the FSDP keys and values that are equivalent to a ZeRO setting of this stage."""
    pairs = [p for p in PAIRS if p.zero == key and p.way != "to_zero" and stage in p.stages]
    return [
        (p.fsdp, value if p.fsdp_value == ANY else p.fsdp_value, p) for p in pairs if _is(value, p.zero_value)
    ]


def _is(value: Any, wanted: Any) -> bool:
    return wanted == ANY or (type(value) is type(wanted) and value == wanted)


@dataclass(frozen=True)
class Alone:
    """A key that only one engine has."""

    key: str
    "a key that ends in a dot, or is empty, matches all keys with this prefix"
    note: str
    as_other: tuple[Any, ...] = ()
    "values with which this engine does the same as the other engine always does"


FSDP_ALONE = (
    Alone(
        "fsdp_auto_wrap_policy",
        "ZeRO has no units: stage 3 gathers parameters module by module and prefetches "
        "stage3_prefetch_bucket_size elements; stages 1 and 2 gather none",
    ),
    Alone("fsdp_transformer_layer_cls_to_wrap", "ZeRO has no units", (None,)),
    Alone("fsdp_min_num_params", "ZeRO has no units", (None, 0)),
    Alone(
        "fsdp_activation_checkpointing",
        "DeepSpeed has no key for Hugging Face models: use the script's --gradient_checkpointing",
        (False,),
    ),
    Alone(
        "fsdp_activation_checkpointing_offload",
        "DeepSpeed offloads only the activations of its own checkpointing functions: the activations of each "
        "layer stay on the GPU",
        (False, None),
    ),
    Alone(
        "fsdp_ignored_modules", "ZeRO shards all parameters, also those of the modules named here", (None,)
    ),
    Alone(
        "fsdp_state_dict_type",
        "ZeRO's checkpoints are one file per rank; under stages 1 and 2 every rank has whole weights anyway",
        ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    ),
    Alone(
        "fsdp_cpu_ram_efficient_loading",
        "zero3_init_flag needs stage 3: every rank loads the whole model into host RAM",
        (False,),
    ),
    Alone("fsdp_offload_params", "nothing is offloaded", (False,)),
    Alone("fsdp_version", "accelerate's key that selects FSDP2", (2,)),
    Alone(
        "parallelism_config_dp_replicate_size",
        "ZeRO shards gradients and optimizer state over all ranks: less memory, but more traffic between "
        "nodes",
        (1, None),
    ),
    Alone(
        "parallelism_config_dp_shard_size",
        "hpZ needs stage 3: gradients and optimizer state are sharded over all ranks and nodes",
    ),
    Alone(
        "parallelism_config_tp_size",
        "each rank of a tensor-parallel group would read its own batch: the global batch is larger by this "
        "factor",
        (1, None),
    ),
    Alone(
        "parallelism_config_cp_size",
        "each rank of a context-parallel group would read its own batch: the global batch is larger by this "
        "factor",
        (1, None),
    ),
    Alone("parallelism_config_cp_backend", "ZeRO has no context parallelism", ("torch", None)),
    Alone(
        "parallelism_config_sp_size",
        "not converted: under ZeRO the script must also support it; slm_toolkit.train has --sp_size",
        (1, None),
    ),
    Alone("parallelism_config_sp_backend", "belongs to sequence parallelism", ("deepspeed", None)),
)

_DISK = "FSDP can't offload to disk: nothing to tune"
_LOGS = "DeepSpeed's logs; no effect on training"

ZERO_ALONE = (
    Alone(ZERO + "overlap_comm", "FSDP always reduces during backward", (True,)),
    Alone(ZERO + "contiguous_gradients", "FSDP always copies a layer's gradients into one buffer", (True,)),
    Alone(ZERO + "reduce_scatter", "FSDP always reduces with reduce-scatter", (True,)),
    Alone(ZERO + "allgather_partitions", "FSDP always gathers with all-gather", (True,)),
    Alone(ZERO + "reduce_bucket_size", "FSDP's bucket is a layer: one reduce-scatter per layer"),
    Alone(ZERO + "allgather_bucket_size", "FSDP's bucket is a layer: one all-gather per layer"),
    Alone(
        ZERO + "stage3_prefetch_bucket_size",
        "FSDP2 prefetches about one layer",
    ),
    Alone(
        ZERO + "stage3_param_persistence_threshold",
        "FSDP2 also shards small parameters and gathers them together with their layer",
    ),
    Alone(ZERO + "stage3_model_persistence_threshold", "FSDP2 also shards small parameters"),
    Alone(
        ZERO + "stage3_max_live_parameters",
        "FSDP2 keeps only the layer that computes and the prefetched layer",
    ),
    Alone(
        ZERO + "stage3_max_reuse_distance",
        "FSDP2 frees each layer after its forward; above 0 ZeRO-3 keeps more and gathers less",
        (0,),
    ),
    Alone(
        ZERO + "stage3_gather_16bit_weights_on_model_save",
        "below stage 3 every rank has whole weights",
        (True, False),
    ),
    Alone(
        ZERO + "sub_group_size",
        "FSDP's optimizer updates its whole shard at once; with NVMe this needs more host RAM",
    ),
    Alone(
        ZERO + "round_robin_gradients",
        "FSDP copies each layer's gradient shard in the order of backward",
        (False,),
    ),
    Alone(ZERO + "zero_hpz_partition_size", "one group of all ranks", (0, 1)),
    Alone(
        ZERO + "zero_quantized_weights",
        "FSDP gathers bf16 without int8 rounding: twice the bytes (arXiv:2306.10209, section 3)",
        (False,),
    ),
    Alone(
        ZERO + "zero_quantized_gradients",
        "FSDP reduces bf16 without rounding: four times the bytes between nodes (arXiv:2306.10209, "
        "section 3)",
        (False,),
    ),
    Alone(ZERO + "zero_quantized_nontrainable_weights", "FSDP never quantizes frozen weights", (False,)),
    Alone(ZERO + "offload_optimizer.device", "nothing is offloaded", ("none",)),
    Alone(
        ZERO + "offload_param.device",
        "DeepSpeed offloads parameters at stage 3 only",
        ("none", "cpu", "nvme"),
    ),
    Alone(ZERO + "offload_optimizer.pin_memory", "FSDP2 always pins host memory", (True,)),
    Alone(ZERO + "offload_param.pin_memory", "FSDP2 always pins host memory", (True,)),
    Alone(ZERO + "offload_optimizer.ratio", "FSDP offloads all or nothing", (1, 1.0)),
    Alone(ZERO + "offload_optimizer.", _DISK),
    Alone(ZERO + "offload_param.", _DISK),
    Alone("aio.", _DISK),
    Alone(ZERO, "an internal setting of DeepSpeed that FSDP does not have"),
    Alone("bf16.enabled", "the script's or accelerate's mixed_precision decides", ("auto", False)),
    Alone("fp16.enabled", "the script's or accelerate's mixed_precision decides", ("auto", False)),
    Alone("bf16.bf16_master_weights_and_grads", "use slm_toolkit.train --numerics pure_bf16", (False,)),
    Alone("bf16.bf16_optimizer_states", "use slm_toolkit.train --numerics pure_bf16", (False,)),
    Alone(
        "fp16.",
        "PyTorch's GradScaler has its own: start at 65536, halve on overflow, double after 2000 steps",
    ),
    Alone(
        "gradient_clipping",
        "the script clips: accelerator.clip_grad_norm_, or max_grad_norm of the Trainer and of "
        "slm_toolkit.train",
        ("auto",),
    ),
    Alone(
        "gradient_accumulation_steps",
        "the script accumulates: Accelerator(gradient_accumulation_steps=...), or the flag of the Trainer "
        "and slm_toolkit.train",
        ("auto", 1),
    ),
    Alone("train_micro_batch_size_per_gpu", "the script sets the batch size per process", ("auto",)),
    Alone("train_batch_size", "ranks x batch per process x accumulation, all set by the script", ("auto",)),
    Alone("optimizer.", "the script builds the optimizer"),
    Alone("scheduler.", "the script builds the scheduler"),
    Alone(
        "communication_data_type",
        "accelerate's YAML can't set the dtype of the reduction: use slm_toolkit.train --reduce_dtype",
    ),
    Alone(
        "data_types.",
        "accelerate's YAML can't set dtypes: use slm_toolkit.train --reduce_dtype and --numerics",
    ),
    Alone(
        "activation_checkpointing.",
        "only models that call DeepSpeed's checkpointing read it, and Hugging Face's do not: use "
        "--gradient_checkpointing",
    ),
    Alone("prescale_gradients", "FSDP divides by factors that depend on the dtype", (False,)),
    Alone("gradient_predivide_factor", "FSDP divides by factors that depend on the dtype", (1, 1.0)),
    Alone("steps_per_print", _LOGS),
    Alone("wall_clock_breakdown", _LOGS, (False,)),
    Alone("dump_state", _LOGS, (False,)),
    Alone("flops_profiler.", _LOGS),
    Alone("comms_logger.", _LOGS),
    Alone("tensorboard.", _LOGS),
    Alone("wandb.", _LOGS),
    Alone("csv_monitor.", _LOGS),
    Alone("zero_allow_untested_optimizer", "DeepSpeed's check; FSDP accepts any optimizer", (True, False)),
    Alone("zero_force_ds_cpu_optimizer", "DeepSpeed's check; FSDP accepts any optimizer", (True, False)),
    Alone("", "a setting of DeepSpeed that FSDP does not have"),
)

PLUGIN_ALONE = (
    Alone(INIT_FLAG, "it needs stage 3: every rank builds the whole model", (False, True)),
    Alone(
        "deepspeed_multinode_launcher",
        "accelerate starts FSDP with its own launcher: run `accelerate launch --machine_rank R` on every "
        "machine",
        ("standard",),
    ),
    Alone("deepspeed_hostfile", "run `accelerate launch --machine_rank R` on every machine"),
    Alone("deepspeed_inclusion_filter", "use gpu_ids to choose the GPUs of a machine"),
    Alone("deepspeed_exclusion_filter", "use gpu_ids to choose the GPUs of a machine"),
    Alone("deepspeed_moe_layer_cls_names", "FSDP gathers a layer with all of its experts anyway"),
)


def alone(table: tuple[Alone, ...], key: str) -> Alone | None:
    """Return the first row of the table that matches a key, or None."""
    return next(
        (r for r in table if r.key == key or (r.key[-1:] in ("", ".") and key.startswith(r.key))), None
    )


Converted = tuple[list[Setting], list[KeyAccount]]

_HPZ_KEY = ZERO + "zero_hpz_partition_size"
_NO_FP8 = "accelerate refuses mixed_precision together with a DeepSpeed JSON, and the JSON has no key for fp8"
_ADDED_TO_ZERO = {
    "gradient_clipping": "if the script sets no clipping, accelerate clips at 1.0 under DeepSpeed, and does "
    "not clip under FSDP and DDP",
    GATHER: "without it a model can't be saved whole under ZeRO-3",
}
_ADDED_TO_FSDP = {  # as in our own YAMLs
    "fsdp_version": (2, ""),
    "fsdp_reshard_after_forward": (True, ""),
    "fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP",
        "without it accelerate gathers the whole model as one unit",
    ),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "ZeRO's checkpoints also have one file per rank"),
    "fsdp_cpu_ram_efficient_loading": (False, "every rank loads the whole model, as under ZeRO"),
    "fsdp_offload_params": (False, ""),
    "fsdp_activation_checkpointing": (False, ""),
}


def to_engine(draft: Draft, engine: str) -> Draft:
    """Convert the draft to `fsdp`, `deepspeed` or `ddp`. Raises ValueError if there is no equivalent."""
    source_engine = "ddp" if draft.engine == "single" else draft.engine
    if source_engine == engine == "deepspeed":
        return _precision_in_json(draft)
    if source_engine == engine:
        return draft
    if engine == "deepspeed":
        return _to_zero(draft)
    shards = source_engine == "fsdp" or stage_of(draft.settings) > 0
    if engine == "fsdp" and not shards:
        raise ValueError(
            f"{draft.name} shards nothing, but FSDP2 always shards\n"
            "hint: use --to accelerate_ddp, or the shipped fsdp_shard_grad_op, which has the same traffic as "
            "DDP"
        )
    if engine == "ddp" and shards:
        raise ValueError(f"{draft.name} shards, but DDP never does\nhint: use the shipped strategy ddp")
    return _from_zero(draft, engine)


def _precision_in_json(draft: Draft) -> Draft:
    """Move mixed_precision into the JSON: accelerate refuses it in a YAML that names a JSON."""
    settings, rows = [], [*draft.rows]
    precision = [s for s in draft.settings if s.path == ("mixed_precision",)]
    for setting in precision:
        converted, accounted = _setting_to_zero(setting, draft, stage_of(draft.settings))
        settings += converted
        rows += accounted
    replaced = {setting.path for setting in settings}
    others = [
        s
        for s in draft.settings
        if s not in precision and not (s.section == "deepspeed" and s.path in replaced)
    ]
    return dataclasses.replace(draft, settings=(*others, *settings), rows=tuple(rows))


def _to_zero(draft: Draft) -> Draft:
    """Convert an FSDP draft to ZeRO-3 or ZeRO-2, or a DDP draft to ZeRO-0."""
    reshards = value_of(draft.settings, "fsdp", "fsdp_reshard_after_forward")
    stage = 0 if draft.engine != "fsdp" else 3 if reshards else 2
    settings, rows = [], [*draft.rows]
    for setting in draft.settings:
        converted, accounted = _setting_to_zero(setting, draft, stage)
        settings += converted
        rows += accounted
    if stage == 0:
        why = (
            "every rank keeps the whole state, as under DDP; buckets and fp32 master weights are DeepSpeed's"
        )
        word = "NO" if draft.engine == "single" else "MULTI_GPU"
        settings.append(
            Setting("deepspeed", ("zero_optimization", "stage"), 0, "distributed_type", word, why)
        )
    if (value_of(draft.settings, "launch", "num_machines") or 1) > 1:
        why = "you run `accelerate launch` on each machine, as for FSDP"
        settings.append(Setting("plugin", ("deepspeed_multinode_launcher",), "standard", why=why))
    if not of_key(settings, "plugin", INIT_FLAG):
        settings.append(Setting("plugin", (INIT_FLAG,), False))
    settings = _with_shipped_json(settings, stage)
    return dataclasses.replace(draft, engine="deepspeed", settings=tuple(settings), rows=tuple(rows))


def _setting_to_zero(setting: Setting, draft: Draft, stage: int) -> Converted:
    key = setting.path[0]
    if key == "parallelism_config_dp_shard_size" and not _has_copies(draft):
        return [], [account_of(setting, "default", why="under ZeRO all ranks are one group anyway")]
    if setting.section in ("fsdp", "groups"):
        return _by_table(setting, key, pairs_to_zero, stage, FSDP_ALONE)
    if key == "mixed_precision":
        off = [dtype for dtype in ("bf16", "fp16") if dtype != setting.value]
        if setting.value not in ("no", "bf16", "fp16"):
            return [], [account_of(setting, "no counterpart", why=_NO_FP8)]
        switch = dataclasses.replace(setting, section="deepspeed", value=False)
        others = [dataclasses.replace(switch, path=(dtype, "enabled")) for dtype in off]
        return [*_by_table(setting, key, pairs_to_zero, stage, ())[0], *others], []
    if key == "fp8_config":
        return [], [account_of(setting, "no counterpart", why=_NO_FP8)]
    return [setting], []


def _has_copies(draft: Draft) -> bool:
    return (value_of(draft.settings, "groups", "parallelism_config_dp_replicate_size") or 1) > 1


def _with_shipped_json(settings: list[Setting], stage: int) -> list[Setting]:
    """Put the source's settings into the shipped JSON of this stage."""
    name = f"zero{stage or 1}.json"
    base = json.loads((config_dir("ds_configs") / name).read_text())
    if stage == 0:
        base["zero_optimization"] = {"stage": 0}
    by_path = {setting.path: setting for setting in settings if setting.section == "deepspeed"}
    for path in [path for path in by_path if path[-1] == "device"]:
        pinned = (*path[:-1], "pin_memory")
        by_path[pinned] = Setting("deepspeed", pinned, True, why="FSDP2 also pins host memory")
    merged = []
    for path, value in flat(base):
        why = _ADDED_TO_ZERO.get(
            ".".join(path), f"as in our {name}: ds_configs/README.md explains the values"
        )
        merged.append(by_path.pop(path, None) or Setting("deepspeed", path, value, why=why))
    return [*(s for s in settings if s.section != "deepspeed"), *merged, *by_path.values()]


def _from_zero(draft: Draft, engine: str) -> Draft:
    """Convert a ZeRO draft to FSDP2, or a ZeRO-0 draft to DDP."""
    settings, rows = [], [*draft.rows]
    for setting in draft.settings:
        converted, accounted = _setting_from_zero(setting, draft, engine)
        settings += converted
        rows += accounted
    if engine == "fsdp":
        for key, (value, why) in _ADDED_TO_FSDP.items():
            if not of_key(settings, "fsdp", key):
                settings.append(Setting("fsdp", (key,), value, why=why))
    elif draft.ranks.num == 1:
        engine = "single"
    return dataclasses.replace(
        draft, engine=engine, settings=tuple(settings), rows=tuple(rows), json_path=None
    )


def _setting_from_zero(setting: Setting, draft: Draft, engine: str) -> Converted:
    key, stage = ".".join(setting.path), stage_of(draft.settings)
    if setting.section == "plugin":
        value = truth(setting.value, key) if key == INIT_FLAG else setting.value
        return _by_table(dataclasses.replace(setting, value=value), key, pairs_to_fsdp, stage, PLUGIN_ALONE)
    if setting.section != "deepspeed":
        return [setting], []
    if engine == "ddp" and key == ZERO + "stage":
        word = "NO" if draft.ranks.num == 1 else "MULTI_GPU"
        return [], [account_of(setting, "carried", f"distributed_type: {word}", why="ZeRO-0 shards nothing")]
    if key == GATHER and stage == 3 and setting.value is True:
        path, value = ("fsdp_state_dict_type",), "SHARDED_STATE_DICT"
        return [dataclasses.replace(setting, section="fsdp", path=path, value=value, why=SAVED)], []
    if key == _HPZ_KEY and stage == 3:
        return _hybrid(setting, draft, key)
    settings, rows = _by_table(setting, key, pairs_to_fsdp, stage, ZERO_ALONE)
    if engine == "ddp" and key.startswith(ZERO):  # the table describes FSDP
        why = "accelerate's YAML has no key for DDP's buckets and reduction"
        return [], [account_of(setting, "no counterpart", why=why)]
    if settings and key.endswith(".device") and stage == 3 and not _offloads_both(draft):
        why = "FSDP offloads parameters, gradients and optimizer state together to host RAM"
        return [dataclasses.replace(s, fate="nearest", why=f"{why}; {s.why}") for s in settings], []
    return settings, rows


def _hybrid(setting: Setting, draft: Draft, key: str) -> Converted:
    size = ranks_per_node(draft.ranks, f"{key} auto") if setting.value == "auto" else setting.value
    if size in (0, 1):
        return [], [account_of(setting, "default", why="no second copy: plain full shard")]
    ((_, _, pair),) = pairs_to_fsdp(key, size, 3)
    settings = hybrid_settings(
        draft.ranks,
        size,
        source=setting.source,
        source_value=setting.source_value,
        why=pair.note,
        fate="nearest",
    )
    if not settings:
        return [], [account_of(setting, "default", why=f"all {size} ranks are one group: plain full shard")]
    return settings, []


def _offloads_both(draft: Draft) -> bool:
    devices = [
        value_of(draft.settings, "deepspeed", "zero_optimization", k, "device")
        for k in ("offload_optimizer", "offload_param")
    ]
    return all(device in ("cpu", "nvme") for device in devices)


def _by_table(
    setting: Setting,
    key: str,
    finder: Callable[[str, Any, int], list[tuple[str, Any, Pair]]],
    stage: int,
    table: tuple[Alone, ...],
) -> Converted:
    """Return the equivalent settings of the other engine, or the row that explains why there are none."""
    pairs = finder(key, setting.value, stage)
    if pairs:
        return [_placed(setting, to, value, pair) for to, value, pair in pairs], []
    row = alone(table, key)
    if row is None:
        return [], [account_of(setting, "no counterpart", why="the other engine has no such setting")]
    is_same = any(type(setting.value) is type(value) and setting.value == value for value in row.as_other)
    return [], [account_of(setting, "default" if is_same else "no counterpart", why=row.note)]


def _placed(setting: Setting, key: str, value: Any, pair: Pair) -> Setting:
    path = tuple(key.split("."))
    section = "deepspeed"
    if key == INIT_FLAG:
        section = "plugin"
    elif key == "mixed_precision":
        section = "launch"
    elif key.startswith("fsdp_"):
        section = "fsdp"
    fate = "carried" if pair.is_same and setting.fate == "carried" else "nearest"
    why = "; ".join(note for note in (setting.why, pair.note) if note)
    return dataclasses.replace(setting, section=section, path=path, value=value, fate=fate, why=why)
