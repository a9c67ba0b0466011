"""Convert a strategy from FSDP2 to ZeRO or back, and account for every key of its files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.convert.tables import FSDP_ALONE, INIT_FLAG, NUMERICS, PAIRS, ZERO, ZERO_ALONE
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON
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
FSDP_DEFAULTS = {  # what accelerate 1.15 does where a key of FSDP2 is absent
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "NO_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}
_WRITTEN_FOR_FSDP = {  # as in our own YAMLs
    "fsdp_version": 2,
    **FSDP_DEFAULTS,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": False,
}
_WHY_ADDED = {
    "fsdp_auto_wrap_policy": "without it accelerate gathers the whole model as one unit",
    "fsdp_state_dict_type": "ZeRO's checkpoints also have one file per rank",
    "fsdp_cpu_ram_efficient_loading": "every rank loads the whole model, as under ZeRO",
    "gradient_clipping": "if the script sets no clipping, accelerate clips at 1.0 under DeepSpeed, and does "
    "not clip under FSDP and DDP",
    "stage3_gather_16bit_weights_on_model_save": "without it a model can't be saved whole under ZeRO-3",
    "pin_memory": "FSDP2 also pins host memory",
    "deepspeed_multinode_launcher": "you run `accelerate launch` on each machine, as for FSDP",
}
_OF_ENGINE = {
    "fsdp": ("fsdp_config", "parallelism_config", "mixed_precision", "fp8_config"),
    "deepspeed": ("json", "deepspeed_config"),
}
_PREFIXES = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}
_JSON_FILE = "deepspeed_config.deepspeed_config_file"

KeyPath = tuple[str, ...]
"the keys from the top of the YAML, or after `json` of the DeepSpeed JSON"


@dataclass(frozen=True)
class Setting:
    """A key of the source, and what it means to the source's engine."""

    key: str
    value: Any
    "None: the key is absent and its default applies"
    path: KeyPath
    meaning: Any


@dataclass(frozen=True)
class KeyAccount:
    """What happened to one key of the source, or one key that was added."""

    key: str
    "empty if it was added"
    value: Any
    "None: the key is absent and its default applies"
    fate: str
    "one of FATES"
    to: dict[KeyPath, Any] = field(default_factory=dict)
    "the settings of the result"
    why: str = ""

    @property
    def text(self) -> str:
        """The settings of the source and of the result, with an arrow between them if they differ."""
        old = f"{self.key} (absent)" if self.value is None else _text(self.key, self.value)
        new = ", ".join(_text(".".join(path), value) for path, value in self.to.items())
        return " -> ".join(dict.fromkeys(filter(None, (self.key and old, new))))


def _text(key: str, value: Any) -> str:
    return f"{key.removeprefix('json.')}: {value if isinstance(value, str) else json.dumps(value)}"


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
    if strategy.is_fsdp == (engine == "fsdp"):
        other = "fsdp" if engine == "deepspeed" else "deepspeed"
        raise ValueError(f"{strategy.path} is for {engine} already\nhint: use --to accelerate_{other}")
    config = {} if strategy.is_bare_json else dict(strategy.accelerate_config)
    if unknown := [key for key in config if key not in YAML_SETTINGS]:
        raise ValueError(
            f"{strategy.path}: accelerate refuses the key {unknown[0]}\nhint: does it belong in another file?"
        )
    if num_processes is not None:
        config["num_processes"] = num_processes
    rows, other = [], "deepspeed_config" if strategy.is_fsdp else "fsdp_config"
    if ignored := config.pop(other, None):
        why = f"distributed_type is {config['distributed_type']}"
        rows.append(KeyAccount(other, ignored, "ignored", why=why))
    stage = strategy.zero_stage or (3 if strategy.reshard_after_forward else 2)
    rows += [_converted(setting, engine, stage) for setting in _settings(strategy, config)]
    return _written(rows, strategy, engine, stage, folder)


def _settings(strategy: Strategy, config: dict[str, Any]) -> list[Setting]:
    """Return the settings of a strategy's files, also those that are absent but have a default."""
    found = []
    if strategy.is_deepspeed and strategy.deepspeed_config_file is not None:
        leaves = flat(strategy.deepspeed_config)
        found = [Setting(".".join(path), value, ("json", *path), value) for path, value in leaves]
    for path, value in flat(config):
        if (key := ".".join(path)) == _JSON_FILE:
            continue
        section, name = path[0], path[-1]
        full, prefix = path, _PREFIXES.get(section, "")
        if section == "deepspeed_config" and name in KEYS_OF_THE_JSON:
            full = "json", *KEYS_OF_THE_JSON[name]
        elif not name.startswith(prefix):
            full = section, prefix + name
        meaning = {"true": True, "false": False}.get(str(value).lower(), value)
        found.append(Setting(key, value, full, meaning))
    defaults = {f"fsdp_config.{key}": value for key, value in FSDP_DEFAULTS.items()}
    if strategy.is_deepspeed:
        inline = {} if strategy.deepspeed_config_file else {f"json.{ZERO}stage": strategy.zero_stage}
        defaults = {**inline, **({INIT_FLAG: True} if strategy.is_zero_3 else {})}
    present = {".".join(setting.path) for setting in found}
    return found + [
        Setting(key.removeprefix("json."), None, tuple(key.split(".")), value)
        for key, value in defaults.items()
        if key not in present
    ]


def _converted(setting: Setting, engine: str, stage: int) -> KeyAccount:
    """Return what becomes of a setting under an engine."""
    key, value, path, meaning = setting.key, setting.value, setting.path, setting.meaning
    to_zero = engine == "deepspeed"
    if path == ("distributed_type",):
        return KeyAccount(key, value, "carried", {path: engine.upper()})
    if to_zero and path == ("mixed_precision",) and meaning in (False, "no", "bf16", "fp16"):
        enabled = {("json", dtype, "enabled"): dtype == meaning for dtype in ("bf16", "fp16")}
        return KeyAccount(key, value, "carried", enabled, NUMERICS)
    if path[0] not in _OF_ENGINE["fsdp" if to_zero else "deepspeed"]:
        return KeyAccount(
            key, value, "carried", {path: meaning}, NUMERICS if key == "mixed_precision" else ""
        )
    name, to, notes, fate = ".".join(path), {}, [], "carried"
    for pair in PAIRS:
        here, there = (pair.fsdp, pair.fsdp_value), (pair.zero, pair.zero_value)
        if not to_zero:
            here, there = there, here
        is_way = pair.way in ("both", "to_zero" if to_zero else "to_fsdp")
        if is_way and stage in pair.stages and here == (name, meaning):
            to[tuple(there[0].split("."))] = there[1]
            notes.append(pair.note)
            fate = fate if pair.is_same else "nearest"
    if to:
        return KeyAccount(key, value, fate, to, "; ".join(dict.fromkeys(notes)))
    for names, (note, *same) in (FSDP_ALONE if to_zero else ZERO_ALONE).items():
        if any(f".{alone}." in f".{name}." for alone in names.split()):
            return KeyAccount(key, value, "default" if meaning in same else "no counterpart", why=note)
    return KeyAccount(key, value, "no counterpart", why="the other engine has no such setting")


def _written(
    rows: list[KeyAccount], strategy: Strategy, engine: str, stage: int, folder: Path | None
) -> Converted:
    """Write the YAML and, under DeepSpeed, the JSON."""
    name, beside = f"{strategy.name}_as_{engine}", folder or Path()
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine.upper()}
    if engine == "deepspeed":
        config["deepspeed_config"] = {"deepspeed_config_file": str(beside / f"{name}.json")}
    elif (json_file := strategy.deepspeed_config_file) is not None and not strategy.is_bare_json:
        rows.append(KeyAccount(_JSON_FILE, json_file, "default", why="each of its keys has its own row"))
    placed = {path: value for row in rows for path, value in row.to.items()}
    added = _added(engine, stage, placed)
    for path, (value, why) in added.items():
        if path not in placed:
            why = _WHY_ADDED.get(path[-1], why)
            rows.append(KeyAccount("", None, "added", {path: value}, why))
    for path, value in {**{path: value for path, (value, _) in added.items()}, **placed}.items():
        section = config
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    files = {}
    if deepspeed := config.pop("json", None):
        files[f"{name}.json"] = json.dumps(deepspeed, indent=2) + "\n"
    text = yaml.safe_dump(config, sort_keys=False, width=200)
    command = ["accelerate", "launch", "--config_file", str(beside / f"{name}.yaml"), "train.py"]
    if "num_processes" not in config:
        command[2:2] = ["--num_processes", "N"]
        why = "add --num_processes N to this command, or to accelerate launch"
        rows.append(KeyAccount("num_processes", None, "default", why=why))
    rows.sort(key=lambda row: not row.why and all(len(path) == 1 for path in row.to))  # the launcher's last
    head = f"# {strategy.name}, converted by `slm convert`\n"
    return Converted({f"{name}.yaml": head + text, **files}, command, rows)


def _added(engine: str, stage: int, placed: dict[KeyPath, Any]) -> dict[KeyPath, tuple[Any, str]]:
    """Return the settings of the result, and why, that apply where the source sets nothing."""
    if engine == "fsdp":
        return {("fsdp_config", key): (value, "") for key, value in _WRITTEN_FOR_FSDP.items()}
    name = f"zero{stage}.json"
    why = f"as in our {name}: ds_configs/README.md explains the values"
    shipped = json.loads((config_dir("ds_configs") / name).read_text())
    added = {path: (value, why) for path, value in flat({"json": shipped})}
    offloaded = [path[:-1] for path in placed if path[-1] == "device"]
    added |= {(*path, "pin_memory"): (True, "") for path in offloaded}
    if placed.get(("num_machines",), 1) != 1:
        added["deepspeed_config", "deepspeed_multinode_launcher"] = "standard", ""
    return {**added, tuple(INIT_FLAG.split(".")): (False, "")}


def flat(config: dict[str, Any], before: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Return every leaf of nested settings with its path; without values that are null."""
    leaves = []
    for key, value in config.items():
        path = (*before, str(key))
        if isinstance(value, dict):
            leaves += flat(value, path)
        elif value is not None:
            leaves.append((path, value))
    return leaves
