"""A draft for one engine made a draft for another, by the table of what FSDP and ZeRO call the same thing.

Keys are those of accelerate 1.15's YAML and of DeepSpeed 0.19's JSON. Bytes are per parameter and rank, in
bf16 with fp32 master weights and Adam on N ranks, as the README counts them.
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
from slm_toolkit.convert.trainer_keys import DEEPSPEED_ARGUMENTS
from slm_toolkit.strategy.strategy import config_dir

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


Found = tuple[list[Setting], list[KeyAccount]]

_HPZ_KEY = ZERO + "zero_hpz_partition_size"
_NO_FP8 = "beside a DeepSpeed JSON accelerate takes no mixed_precision, and the JSON has no word for fp8"
_ADDED_TO_ZERO = {
    "gradient_clipping": "where no script says it accelerate clips at 1.0 under DeepSpeed, "
    "and not at all under FSDP and DDP",
    GATHER: "without it a model under ZeRO-3 cannot be saved whole",
}
_ADDED_TO_FSDP = {  # as in our own YAMLs
    "fsdp_version": (2, ""),
    "fsdp_reshard_after_forward": (True, ""),
    "fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP",
        "without it accelerate gathers the whole model as one unit",
    ),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "ZeRO's checkpoints are one file per rank, too"),
    "fsdp_cpu_ram_efficient_loading": (False, "every rank loads the whole model, as under ZeRO"),
    "fsdp_offload_params": (False, ""),
    "fsdp_activation_checkpointing": (False, ""),
}


def to_engine(draft: Draft, engine: str) -> Draft:
    """The draft for `fsdp`, `deepspeed` or `ddp`. Raises ValueError where that engine has nothing like it."""
    own = "ddp" if draft.engine == "single" else draft.engine
    if own == engine == "deepspeed":
        return _precision_in_json(draft)
    if own == engine:
        return draft
    if engine == "deepspeed":
        return _to_zero(draft)
    shards = own == "fsdp" or stage_of(draft.settings) > 0
    if engine == "fsdp" and not shards:
        raise ValueError(
            f"{draft.name} shards nothing, and FSDP2 always shards\n"
            "hint: --to accelerate_ddp; fsdp_shard_grad_op shards and has DDP's traffic"
        )
    if engine == "ddp" and shards:
        raise ValueError(f"{draft.name} shards, and DDP never does\nhint: the shipped strategy ddp is DDP")
    return _from_zero(draft, engine)


def _precision_in_json(draft: Draft) -> Draft:
    """A YAML without a JSON may say mixed_precision; beside one accelerate refuses it."""
    settings, rows, said = [], [*draft.rows], [s for s in draft.settings if s.path == ("mixed_precision",)]
    for setting in said:
        now, accounted = _setting_to_zero(setting, draft, stage_of(draft.settings))
        settings += now
        rows += accounted
    now_said = {setting.path for setting in settings}
    others = [
        s for s in draft.settings if s not in said and not (s.section == "deepspeed" and s.path in now_said)
    ]
    return dataclasses.replace(draft, settings=(*others, *settings), rows=tuple(rows))


def _to_zero(draft: Draft) -> Draft:
    """Of FSDP's draft ZeRO-3 or ZeRO-2, of DDP's ZeRO-0."""
    reshards = value_of(draft.settings, "fsdp", "fsdp_reshard_after_forward")
    stage = 0 if draft.engine != "fsdp" else 3 if reshards else 2
    settings, rows = [], [*draft.rows]
    for setting in draft.settings:
        now, accounted = _setting_to_zero(setting, draft, stage)
        settings += now
        rows += accounted
    if stage == 0:
        why = "every rank holds everything, as under DDP; buckets and fp32 masters are DeepSpeed's"
        word = "NO" if draft.engine == "single" else "MULTI_GPU"
        settings.append(
            Setting("deepspeed", ("zero_optimization", "stage"), 0, "distributed_type", word, why)
        )
    if (value_of(draft.settings, "launch", "num_machines") or 1) > 1:
        why = "`accelerate launch` then starts each machine by itself, as it does for FSDP"
        settings.append(Setting("plugin", ("deepspeed_multinode_launcher",), "standard", why=why))
    if not of_key(settings, "plugin", INIT_FLAG):
        settings.append(Setting("plugin", (INIT_FLAG,), False))
    settings = _with_shipped_json(settings, stage)
    return dataclasses.replace(draft, engine="deepspeed", settings=tuple(settings), rows=tuple(rows))


def _setting_to_zero(setting: Setting, draft: Draft, stage: int) -> Found:
    key = setting.path[0]
    if key == "parallelism_config_dp_shard_size" and not _has_copies(draft):
        return [], [account_of(setting, "default", why="all ranks are one group under ZeRO anyway")]
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
    """What the source says in the shipped JSON of that stage."""
    name = f"zero{stage or 1}.json"
    base = json.loads((config_dir("ds_configs") / name).read_text())
    if stage == 0:
        base["zero_optimization"] = {"stage": 0}
    said = {setting.path: setting for setting in settings if setting.section == "deepspeed"}
    for path in [path for path in said if path[-1] == "device"]:
        pinned = (*path[:-1], "pin_memory")
        said[pinned] = Setting("deepspeed", pinned, True, why="FSDP2 pins the host's pages, too")
    merged = []
    for path, value in flat(base):
        why = _ADDED_TO_ZERO.get(
            ".".join(path), f"as in our own {name}: ds_configs/README.md has the reasons"
        )
        merged.append(said.pop(path, None) or Setting("deepspeed", path, value, why=why))
    return [*(s for s in settings if s.section != "deepspeed"), *merged, *said.values()]


def _from_zero(draft: Draft, engine: str) -> Draft:
    """Of ZeRO's draft FSDP2's, of ZeRO-0's DDP's."""
    settings, rows = [], [*draft.rows]
    for setting in draft.settings:
        now, accounted = _setting_from_zero(setting, draft, engine)
        settings += now
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


def _setting_from_zero(setting: Setting, draft: Draft, engine: str) -> Found:
    key, stage = ".".join(setting.path), stage_of(draft.settings)
    if setting.section == "plugin":
        value = truth(setting.value, key) if key == INIT_FLAG else setting.value
        return _by_table(dataclasses.replace(setting, value=value), key, pairs_to_fsdp, stage, PLUGIN_ALONE)
    if setting.section != "deepspeed":
        return [setting], []
    if engine == "ddp" and key == ZERO + "stage":
        word = "NO" if draft.ranks.num == 1 else "MULTI_GPU"
        return [], [account_of(setting, "carried", f"distributed_type: {word}", why="ZeRO-0 shards nothing")]
    if draft.is_trainers and key in DEEPSPEED_ARGUMENTS and "enabled" not in key and setting.value != "auto":
        why = f"the script's {' and '.join(DEEPSPEED_ARGUMENTS[key])} must say the same already"
        return [], [account_of(setting, "default", why=why)]
    if key == GATHER and stage == 3 and setting.value is True and not draft.is_trainers:
        path, value = ("fsdp_state_dict_type",), "SHARDED_STATE_DICT"
        return [dataclasses.replace(setting, section="fsdp", path=path, value=value, why=SAVED)], []
    if key == _HPZ_KEY and stage == 3:
        return _hybrid(setting, draft, key)
    found = _by_table(setting, key, pairs_to_fsdp, stage, ZERO_ALONE)
    if engine == "ddp" and key.startswith(ZERO):  # the table speaks of FSDP
        why = "buckets and reduction of DDP have no key in accelerate's YAML"
        return [], [account_of(setting, "no counterpart", why=why)]
    if found[0] and key.endswith(".device") and stage == 3 and not _offloads_both(draft):
        why = "FSDP has parameters, gradients and optimizer state in one place: all of them in host RAM"
        return [dataclasses.replace(s, fate="nearest", why=f"{why}; {s.why}") for s in found[0]], []
    return found


def _hybrid(setting: Setting, draft: Draft, key: str) -> Found:
    size = ranks_per_node(draft.ranks, f"{key} auto") if setting.value == "auto" else setting.value
    if size in (0, 1):
        return [], [account_of(setting, "default", why="no second copy: plain full shard")]
    ((_, _, pair),) = pairs_to_fsdp(key, size, 3)
    settings = hybrid_settings(
        draft.ranks, size, source=setting.source, said=setting.said, why=pair.note, fate="nearest"
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
) -> Found:
    """The setting in the other side's words, or the row that says why there are none."""
    pairs = finder(key, setting.value, stage)
    if pairs:
        return [_placed(setting, to, value, pair) for to, value, pair in pairs], []
    row = alone(table, key)
    if row is None:
        return [], [account_of(setting, "no counterpart", why="the other side has no word for it")]
    same = any(type(setting.value) is type(value) and setting.value == value for value in row.as_other)
    return [], [account_of(setting, "default" if same else "no counterpart", why=row.note)]


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
