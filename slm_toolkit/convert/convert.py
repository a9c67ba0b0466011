"""Convert a strategy from FSDP2 to ZeRO or back, and account for every key of its files."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.convert.tables import FSDP_ALONE, INIT_FLAG, NUMERICS, PAIRS, ZERO_ALONE
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON, deepspeed_config_path
from slm_toolkit.strategy.passed_on import YAML_SETTINGS
from slm_toolkit.strategy.strategy import Strategy, config_dir, find_strategy

FATES = {  # what happens to a key, and the heading in the account, in the order of the account
    "carried": "carried over",
    "nearest": "carried over to the nearest setting",
    "no counterpart": "no counterpart",
    "default": "nothing to write",
    "ignored": "ignored in the source too",
    "added": "added",
}
_WORSE = ("added", "ignored", "default", "carried", "nearest", "no counterpart")
"if one key has two fates, the account shows the later one in this list"
FSDP_DEFAULTS = {  # what accelerate 1.15 does where a key of FSDP2 is absent
    "fsdp_reshard_after_forward": (True, ""),
    "fsdp_auto_wrap_policy": ("NO_WRAP", ""),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", ""),
    "fsdp_cpu_ram_efficient_loading": (True, ""),
    "fsdp_offload_params": (False, ""),
    "fsdp_activation_checkpointing": (False, ""),
}
_WRITTEN_FOR_FSDP = {  # as in our own YAMLs
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
_ADDED_TO_ZERO = {
    "gradient_clipping": "if the script sets no clipping, accelerate clips at 1.0 under DeepSpeed, and does "
    "not clip under FSDP and DDP",
    "stage3_gather_16bit_weights_on_model_save": "without it a model can't be saved whole under ZeRO-3",
}
_AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
)
"keys that accelerate fills in if there is no JSON"
_ORDER = ("json", *_WRITTEN_FOR_FSDP)
_OF_FSDP = ("fsdp_config", "parallelism_config", "mixed_precision", "fp8_config")
_OF_ZERO = ("json", "deepspeed_config")
_JSON_FILE = "deepspeed_config.deepspeed_config_file"
_PREFIXES = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}


@dataclass(frozen=True)
class Setting:
    """A key and value of the YAML, or after `json` of the DeepSpeed JSON; and the key that set it."""

    path: tuple[str, ...]
    value: Any
    source: str = ""
    "the key in the source; empty if no key of the source set it"
    source_value: Any = None
    "the value in the source; None: the key is absent and its default applies"
    why: str = ""
    fate: str = "carried"

    @property
    def key(self) -> str:
        return ".".join(self.path).removeprefix("json.")


@dataclass(frozen=True)
class KeyAccount:
    """What happened to one key of the source."""

    key: str
    value: Any
    fate: str
    "one of FATES"
    to: tuple[str, ...] = ()
    "`key: value` of the result"
    why: str = ""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: files, launch command and account."""

    files: dict[str, str]
    "text by file name"
    command: list[str]
    "the command that launches the script with these files"
    rows: list[KeyAccount]


def convert(source: str, engine: str, *, num_processes: int | None, folder: Path | None) -> Converted:
    """Convert a strategy's name or file to FSDP2 (`fsdp`) or ZeRO (`deepspeed`).

    Raises ValueError if the source can't be read, or has no counterpart under that engine.
    """
    strategy = find_strategy(source)
    if strategy.is_fsdp1:
        raise ValueError(
            f"{strategy.path} is for FSDP1\n"
            f"hint: `slm doctor --strategy {strategy.path} --fix DIR` writes it for FSDP2"
        )
    if strategy.is_replicated or strategy.is_zero_0:
        raise ValueError(
            f"{strategy.name} shards nothing: there is nothing to convert\n"
            "hint: use the shipped fsdp_shard_grad_op or ds_zero2, whose traffic is that of DDP"
        )
    if strategy.is_fsdp and engine == "fsdp":
        raise ValueError(f"{strategy.path} is for FSDP2 already\nhint: use --to accelerate_deepspeed")
    settings, rows = _read(strategy, num_processes)
    if strategy.is_fsdp:
        stage = 3 if strategy.reshard_after_forward else 2
        settings = _with_shipped_json(_moved(settings, rows, stage, to_zero=True), stage)
    elif engine == "fsdp":
        settings = _moved(settings, rows, strategy.zero_stage, to_zero=False)
        settings += _absent(settings, "fsdp_config", _WRITTEN_FOR_FSDP)
    elif strategy.deepspeed_config_file is None:
        why = "the script decides; accelerate fills in this key if there is no JSON"
        settings += _absent(settings, "json", dict.fromkeys(_AUTO, ("auto", why)))
    return _written(settings, rows, strategy, engine, folder)


def _read(strategy: Strategy, num_processes: int | None) -> tuple[list[Setting], list[KeyAccount]]:
    """Return the settings of a strategy's files, and a row for a section that has no effect there."""
    given = {} if strategy.is_bare_json else strategy.accelerate_config
    config = {
        key: value for key, value in given.items() if value or not isinstance(YAML_SETTINGS.get(key), dict)
    }
    if unknown := [key for key in config if key not in YAML_SETTINGS]:
        raise ValueError(
            f"{strategy.path}: accelerate refuses the key {unknown[0]}\nhint: does it belong in another file?"
        )
    other, rows = "deepspeed_config" if strategy.is_fsdp else "fsdp_config", []
    if ignored := config.pop(other, None):
        why = f"distributed_type is {config['distributed_type']}"
        rows.append(KeyAccount(other, ignored, "ignored", why=why))
    if num_processes is not None:
        config["num_processes"] = num_processes
    settings = []
    for path, value in flat(config):
        setting = Setting(_as_accelerate_reads(path), _typed(value), ".".join(path), value)
        if setting.key == "mixed_precision" and strategy.is_deepspeed:
            settings += _precision_in_json(setting)
        elif setting.key != _JSON_FILE:
            settings.append(setting)
    if strategy.is_fsdp:
        return settings + _absent(settings, "fsdp_config", FSDP_DEFAULTS, is_source=True), rows
    if strategy.deepspeed_config_file is None:
        stage = {"zero_optimization.stage": (2, "accelerate's default")}
        settings += _absent(settings, "json", stage)
    else:
        leaves = flat(strategy.deepspeed_config)
        settings += [Setting(("json", *path), value, ".".join(path), value) for path, value in leaves]
    is_3 = strategy.is_zero_3
    return settings + _absent(settings, "deepspeed_config", {INIT_FLAG: (is_3, "")}, is_source=is_3), rows


def _as_accelerate_reads(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of a YAML's key: with the prefix of its section, or in the JSON that it stands for."""
    section, key = path[0], path[-1]
    if section == "deepspeed_config" and key in KEYS_OF_THE_JSON:
        return "json", *KEYS_OF_THE_JSON[key]
    prefix = _PREFIXES.get(section, "")
    return path if key.startswith(prefix) else (section, prefix + key)


def _typed(value: Any) -> Any:
    return {"true": True, "false": False}.get(str(value).lower(), value)


def _precision_in_json(setting: Setting) -> list[Setting]:
    """Return mixed_precision as keys of the JSON: accelerate refuses it in a YAML that names a JSON."""
    precision = setting.value or "no"  # YAML: an unquoted no is false
    return [
        dataclasses.replace(setting, path=("json", dtype, "enabled"), value=dtype == precision, why=NUMERICS)
        for dtype in ("bf16", "fp16")
    ]


def _absent(
    settings: list[Setting], section: str, values: dict[str, tuple[Any, str]], *, is_source: bool = False
) -> list[Setting]:
    """Return those of `values` (value and reason by key) that no setting has.

    `is_source`: they are defaults of the source, and have rows of their own.
    """
    present = {setting.key for setting in settings}
    paths = {key: (section, *key.split(".")) for key in values}
    added = [Setting(paths[key], value, why=why) for key, (value, why) in values.items()]
    return [
        dataclasses.replace(setting, source=setting.key if is_source else "")
        for setting in added
        if setting.key not in present
    ]


def _moved(settings: list[Setting], rows: list[KeyAccount], stage: int, *, to_zero: bool) -> list[Setting]:
    """Return the settings under the other engine; add a row for each that has none there."""
    moved = []
    for setting in settings:
        if setting.path[0] not in (_OF_FSDP if to_zero else _OF_ZERO):
            moved.append(setting)
        elif to_zero and setting.key == "mixed_precision" and setting.value in (False, "no", "bf16", "fp16"):
            moved += _precision_in_json(setting)
        elif counterparts := _counterparts(setting, stage, to_zero=to_zero):
            moved += counterparts
        elif setting.source:
            rows.append(_alone(setting, FSDP_ALONE if to_zero else ZERO_ALONE))
    return moved


def _counterparts(setting: Setting, stage: int, *, to_zero: bool) -> list[Setting]:
    found = []
    for pair in PAIRS:
        here, there = (pair.fsdp, pair.fsdp_value), (pair.zero, pair.zero_value)
        if not to_zero:
            here, there = there, here
        is_meant = here[0] in (setting.key, setting.path[-1]) and _is(setting.value, here[1])
        if is_meant and stage in pair.stages and pair.way in ("both", "to_zero" if to_zero else "to_fsdp"):
            fate = "carried" if pair.is_same else "nearest"
            found.append(
                dataclasses.replace(setting, path=_path(there[0]), value=there[1], why=pair.note, fate=fate)
            )
    return found


def _path(key: str) -> tuple[str, ...]:
    """Return the path of a key of PAIRS."""
    if key.startswith("fsdp_"):
        return "fsdp_config", key
    if key == "mixed_precision":
        return (key,)
    return ("deepspeed_config", key) if key == INIT_FLAG else ("json", *key.split("."))


def _is(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and value == wanted


def _alone(setting: Setting, table: dict[str, tuple[Any, ...]]) -> KeyAccount:
    """Return the row of a setting that only one engine has."""
    why, is_same = "the other engine has no such setting", False
    for keys, (note, *values) in table.items():
        if any(f".{key}." in f".{setting.key}." for key in keys.split()):
            why, is_same = note, any(_is(setting.value, value) for value in values)
            break
    fate = "default" if is_same else "no counterpart"
    return KeyAccount(setting.source, setting.source_value, fate, why=why)


def _with_shipped_json(settings: list[Setting], stage: int) -> list[Setting]:
    """Put settings that come from FSDP into the shipped JSON of this stage."""
    name = f"zero{stage}.json"
    base = json.loads((config_dir("ds_configs") / name).read_text())
    by_path = {setting.path: setting for setting in settings if setting.path[0] == "json"}
    for *above, key in list(by_path):
        if key == "device":
            pinned = (*above, "pin_memory")
            by_path[pinned] = Setting(pinned, True, why="FSDP2 also pins host memory")
    merged = [setting for setting in settings if setting.path[0] != "json"]
    for path, value in flat({"json": base}):
        why = _ADDED_TO_ZERO.get(path[-1], f"as in our {name}: ds_configs/README.md explains the values")
        merged.append(by_path.pop(path, None) or Setting(path, value, why=why))
    merged += by_path.values()
    plugin = {INIT_FLAG: (False, "")}
    if any(setting.key == "num_machines" and setting.value != 1 for setting in settings):
        why = "you run `accelerate launch` on each machine, as for FSDP"
        plugin["deepspeed_multinode_launcher"] = "standard", why
    return merged + _absent(merged, "deepspeed_config", plugin)


def _written(
    settings: list[Setting], rows: list[KeyAccount], strategy: Strategy, engine: str, folder: Path | None
) -> Converted:
    """Write the YAML and, under DeepSpeed, the JSON, unless the source's JSON is used unchanged."""
    name, files = f"{strategy.name}_as_{engine}", {}
    json_file = strategy.deepspeed_config_file if strategy.is_deepspeed else None
    named = _in_folder(folder, f"{name}.json")
    if engine == "deepspeed" and json_file is not None:
        of_json = [setting for setting in settings if setting.path[0] == "json"]
        settings = [setting for setting in settings if setting not in of_json]
        named = _path_to_show(deepspeed_config_path(json_file, Path(strategy.path)))
        rows.append(
            KeyAccount(
                key=Path(strategy.path).name if strategy.is_bare_json else _JSON_FILE,
                value=f"{len(of_json)} keys",
                fate="carried",
                to=(f"{_JSON_FILE}: {named}",),
                why="the file is used unchanged, with all its keys",
            )
        )
    elif json_file is not None and not strategy.is_bare_json:
        rows.append(KeyAccount(_JSON_FILE, json_file, "default", why="each of its keys has its own row"))
    settings = [
        dataclasses.replace(s, value=engine.upper()) if s.key == "distributed_type" else s for s in settings
    ]
    settings.sort(key=_place)
    content = nested((setting.path, setting.value) for setting in settings)
    if deepspeed := content.pop("json", None):
        files[f"{name}.json"] = json.dumps(deepspeed, indent=2) + "\n"
    if engine == "deepspeed":
        content["deepspeed_config"] = {"deepspeed_config_file": named, **content["deepspeed_config"]}
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine.upper(), **content}
    text = f"# {strategy.name}, converted by `slm convert`\n" + yaml.safe_dump(
        config, sort_keys=False, width=200
    )
    rows += map(_placed, settings)
    command = ["accelerate", "launch", "--config_file", _in_folder(folder, f"{name}.yaml"), "train.py"]
    if "num_processes" not in config:
        command[2:2] = ["--num_processes", "N"]
        why = "add --num_processes N to this command, or to accelerate launch"
        rows.append(KeyAccount("num_processes", None, "default", why=why))
    return Converted({f"{name}.yaml": text, **files}, command, _merged(rows))


def _place(setting: Setting) -> tuple[bool, int]:
    """Return the place of a setting in its file: sections come before the launcher's keys."""
    places = [_ORDER.index(name) for name in setting.path if name in _ORDER]
    return len(setting.path) == 1, min(places, default=len(_ORDER))


def _placed(setting: Setting) -> KeyAccount:
    """Return the account's row of a setting that is written."""
    value = setting.value if isinstance(setting.value, str) else json.dumps(setting.value)
    fate = setting.fate if setting.source else "added"
    return KeyAccount(setting.source, setting.source_value, fate, (f"{setting.key}: {value}",), setting.why)


def _merged(rows: Iterable[KeyAccount]) -> list[KeyAccount]:
    """Merge rows: one per key of the source, and one for all keys that were added for the same reason."""
    merged: dict[tuple[str, ...], KeyAccount] = {}
    for row in rows:
        before = merged.setdefault((row.key,) if row.key else ("", row.why), row)
        fate = max(before.fate, row.fate, key=_WORSE.index)
        whys = dict.fromkeys(r.why for r in (before, row) if r.why and (r.fate == fate or r.to))
        to = tuple(dict.fromkeys((*before.to, *row.to)))
        name = (row.key,) if row.key else ("", row.why)
        merged[name] = dataclasses.replace(before, fate=fate, to=to, why="; ".join(whys))
    return list(merged.values())


def flat(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every leaf of nested settings with its path."""
    leaves = []
    for key, value in config.items():
        path = (*before, str(key))
        leaves += flat(value, path) if isinstance(value, dict) and value else [(path, value)]
    return leaves


def nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Build nested settings from leaves: the inverse of `flat`."""
    config: dict[str, Any] = {}
    for path, value in leaves:
        inner = config
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return config


def _path_to_show(path: Path) -> str:
    """Return a path relative to the working folder, or absolute if it is outside."""
    relative = os.path.relpath(path)
    return os.path.realpath(path) if relative.startswith("..") else relative


def _in_folder(folder: Path | None, name: str) -> str:
    """Return the name by which one file of the result refers to another."""
    return name if folder is None else str(folder / name)
