"""FSDP's settings, said in an accelerate YAML or in TrainingArguments, as settings of FSDP2."""

from typing import Any

from slm_toolkit.conversion.settings import Ranks, Row, Setting, hybrid_settings, ranks_per_node, truth
from slm_toolkit.conversion.trainer_keys import ALWAYS_SAID, FSDP1_ONLY, FSDP_KEYS, FSDP_TRUTHS, SHARDING

_FSDP2 = "FSDP2 shards each parameter, FSDP1 a layer's flattened ones: the same bytes, the same traffic"
_WINS = (
    "under FSDP1 accelerate takes fsdp_sharding_strategy, FULL_SHARD where it is absent, and never this key"
)
_OBSOLETE = "accelerate reads it under fsdp_version 1 only"


def fsdp_settings(
    said: dict[str, tuple[Any, str]], ranks: Ranks, *, is_trainers: bool
) -> tuple[str, list[Setting], list[Row]]:
    """Engine, settings and account of FSDP keys: accelerate's name, value, and the key as it is written.

    FSDP1 becomes FSDP2, its NO_SHARD becomes DDP. A key that is absent counts with the source's own default.
    """
    known = {key.accelerate: key for key in FSDP_KEYS}
    defaults = {k: key.trainer_default if is_trainers else key.launch_default for k, key in known.items()}
    version, version_source = said.get("fsdp_version", (defaults["fsdp_version"], "fsdp_version"))
    if str(version) not in ("1", "2"):
        raise ValueError(f"{version_source} is {version!r}\nhint: 1 or 2")
    is_fsdp1 = str(version) == "1"
    settings, rows = [], []
    if is_fsdp1:
        engine, settings, rows = _sharding_of_fsdp1(said, ranks, is_trainers=is_trainers)
        if engine == "ddp":
            rest = [
                Row(source, value, "no counterpart", (), "DDP has no such setting")
                for value, source in _rest(said)
            ]
            return engine, [], rows + rest
    for key, (value, source) in said.items():
        if key == "fsdp_version":
            why = _FSDP2 if is_fsdp1 else ""
            settings.append(Setting("fsdp", (key,), 2, source, value, why))
        elif is_fsdp1 and key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            continue  # dealt with above
        elif key in FSDP1_ONLY:
            rows.append(_row_of_fsdp1(key, value, source, is_fsdp1=is_fsdp1))
        elif key not in known:
            rows.append(Row(source, value, "ignored", (), "no library reads such a key: is it misspelt?"))
        else:
            settings.append(_setting(key, value, source))
    present = {setting.path[0] for setting in settings}
    for key in ALWAYS_SAID:
        if key not in present:
            default = "FULL_STATE_DICT" if is_fsdp1 and key == "fsdp_state_dict_type" else defaults[key]
            settings.append(Setting("fsdp", (key,), default, _named(key, is_trainers=is_trainers)))
    if "fsdp_version" not in present:
        why = _FSDP2 if is_fsdp1 else ""
        settings.insert(
            0,
            Setting("fsdp", ("fsdp_version",), 2, _named("fsdp_version", is_trainers=is_trainers), None, why),
        )
    return "fsdp", settings, rows


def _setting(key: str, value: Any, source: str) -> Setting:
    if key in FSDP_TRUTHS or key == "fsdp_reshard_after_forward":
        return Setting("fsdp", (key,), truth(value, source), source, value)
    if key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, list):
        return Setting("fsdp", (key,), ",".join(map(str, value)), source, value)
    if key == "fsdp_state_dict_type" and str(value).upper() == "LOCAL_STATE_DICT":
        why = "FSDP2 refuses LOCAL_STATE_DICT; both write a file per rank"
        return Setting("fsdp", (key,), "SHARDED_STATE_DICT", source, value, why, "nearest")
    if key in ("fsdp_auto_wrap_policy", "fsdp_state_dict_type"):
        return Setting("fsdp", (key,), str(value).upper(), source, value)
    return Setting("fsdp", (key,), value, source, value)


def _sharding_of_fsdp1(
    said: dict[str, tuple[Any, str]], ranks: Ranks, *, is_trainers: bool
) -> tuple[str, list[Setting], list[Row]]:
    """What FSDP1 was asked to shard."""
    rows = []
    reshard = said.get("fsdp_reshard_after_forward")
    asked = said.get("fsdp_sharding_strategy")
    why = ""
    if asked is None and reshard is not None and str(reshard[0]).lower() not in ("true", "false"):
        asked, why = reshard, _WINS  # what was meant, and what is wrong with it
    elif reshard is not None:
        rows.append(Row(reshard[1], reshard[0], "ignored", (), _WINS))
    value, source = asked or ("FULL_SHARD", _named("fsdp_sharding_strategy", is_trainers=is_trainers))
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(SHARDING):
        name = list(SHARDING)[int(name) - 1]
    if name not in SHARDING:
        raise ValueError(f"{source} is {value!r}\nhint: one of {', '.join(SHARDING)}")
    shown = value if asked else None
    reshards, is_hybrid = SHARDING[name]
    if reshards is None:
        why = "NO_SHARD is DDP"
        return "ddp", [], [Row(source, shown, "carried", ("distributed_type: MULTI_GPU",), why), *rows]
    settings = [Setting("fsdp", ("fsdp_reshard_after_forward",), reshards, source, shown, why)]
    if is_hybrid:
        shard = ranks_per_node(ranks, f"{source} {value}")
        settings += hybrid_settings(ranks, shard, source=source, said=shown, why=why, fate="carried")
    return "fsdp", settings, rows


def _row_of_fsdp1(key: str, value: Any, source: str, *, is_fsdp1: bool) -> Row:
    always, why = FSDP1_ONLY[key]
    if not is_fsdp1:
        return Row(source, value, "ignored", (), _OBSOLETE)
    same = str(value).lower() == str(always).lower()
    return Row(source, value, "default" if same else "no counterpart", (), why)


def _rest(said: dict[str, tuple[Any, str]]) -> list[tuple[Any, str]]:
    of_sharding = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    return [pair for key, pair in said.items() if key not in of_sharding]


def _named(key: str, *, is_trainers: bool) -> str:
    """The key as the source would write it."""
    names = {row.accelerate: row.trainer for row in FSDP_KEYS}
    return f"fsdp_config.{names.get(key) or key if is_trainers else key}"
