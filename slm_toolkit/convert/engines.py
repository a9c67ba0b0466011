"""A draft for one engine made a draft for another, by the table of counterparts."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from slm_toolkit.convert.counterparts import (
    FSDP_ALONE,
    GATHER,
    INIT_FLAG,
    PLUGIN_ALONE,
    SAVED,
    ZERO,
    ZERO_ALONE,
    Alone,
    Pair,
    alone,
    pairs_to_fsdp,
    pairs_to_zero,
)
from slm_toolkit.convert.settings import (
    Draft,
    Row,
    Setting,
    flat,
    hybrid_settings,
    of_key,
    ranks_per_node,
    row_of,
    stage_of,
    truth,
    value_of,
)
from slm_toolkit.convert.trainer_keys import DEEPSPEED_ARGUMENTS
from slm_toolkit.strategy.strategy import config_dir

Found = tuple[list[Setting], list[Row]]

_HPZ = ZERO + "zero_hpz_partition_size"
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
        return [], [row_of(setting, "default", why="all ranks are one group under ZeRO anyway")]
    if setting.section in ("fsdp", "groups"):
        return _by_table(setting, key, pairs_to_zero, stage, FSDP_ALONE)
    if key == "mixed_precision":
        off = [dtype for dtype in ("bf16", "fp16") if dtype != setting.value]
        if setting.value not in ("no", "bf16", "fp16"):
            return [], [row_of(setting, "no counterpart", why=_NO_FP8)]
        switch = dataclasses.replace(setting, section="deepspeed", value=False)
        others = [dataclasses.replace(switch, path=(dtype, "enabled")) for dtype in off]
        return [*_by_table(setting, key, pairs_to_zero, stage, ())[0], *others], []
    if key == "fp8_config":
        return [], [row_of(setting, "no counterpart", why=_NO_FP8)]
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
        return [], [row_of(setting, "carried", f"distributed_type: {word}", why="ZeRO-0 shards nothing")]
    if draft.is_trainers and key in DEEPSPEED_ARGUMENTS and "enabled" not in key and setting.value != "auto":
        why = f"the script's {' and '.join(DEEPSPEED_ARGUMENTS[key])} must say the same already"
        return [], [row_of(setting, "default", why=why)]
    if key == GATHER and stage == 3 and setting.value is True and not draft.is_trainers:
        path, value = ("fsdp_state_dict_type",), "SHARDED_STATE_DICT"
        return [dataclasses.replace(setting, section="fsdp", path=path, value=value, why=SAVED)], []
    if key == _HPZ and stage == 3:
        return _hybrid(setting, draft, key)
    found = _by_table(setting, key, pairs_to_fsdp, stage, ZERO_ALONE)
    if engine == "ddp" and key.startswith(ZERO):  # the table speaks of FSDP
        why = "buckets and reduction of DDP have no key in accelerate's YAML"
        return [], [row_of(setting, "no counterpart", why=why)]
    if found[0] and key.endswith(".device") and stage == 3 and not _offloads_both(draft):
        why = "FSDP has parameters, gradients and optimizer state in one place: all of them in host RAM"
        return [dataclasses.replace(s, fate="nearest", why=f"{why}; {s.why}") for s in found[0]], []
    return found


def _hybrid(setting: Setting, draft: Draft, key: str) -> Found:
    size = ranks_per_node(draft.ranks, f"{key} auto") if setting.value == "auto" else setting.value
    if size in (0, 1):
        return [], [row_of(setting, "default", why="no second copy: plain full shard")]
    ((_, _, pair),) = pairs_to_fsdp(key, size, 3)
    settings = hybrid_settings(
        draft.ranks, size, source=setting.source, said=setting.said, why=pair.note, fate="nearest"
    )
    if not settings:
        return [], [row_of(setting, "default", why=f"all {size} ranks are one group: plain full shard")]
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
        return [], [row_of(setting, "no counterpart", why="the other side has no word for it")]
    same = any(type(setting.value) is type(value) and setting.value == value for value in row.as_other)
    return [], [row_of(setting, "default" if same else "no counterpart", why=row.note)]


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
