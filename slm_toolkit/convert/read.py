"""Read a shipped strategy, an accelerate YAML or a DeepSpeed JSON into a draft."""

from pathlib import Path
from typing import Any

from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.base.user_files import is_file, json_of, read_text, typed_path, yaml_of
from slm_toolkit.convert.settings import (
    Draft,
    KeyAccount,
    Ranks,
    Setting,
    deepspeed_settings,
    hybrid_settings,
    init_flag,
    ranks_of,
    ranks_per_node,
    truth,
)
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON, deepspeed_config_path, is_deepspeed_config
from slm_toolkit.strategy.passed_on import YAML_SETTINGS
from slm_toolkit.strategy.strategy import config_dir, read_strategy, shipped_strategies

FSDP_DEFAULTS = {  # keys of FSDP2 in accelerate 1.15's YAML, and what an absent key means
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "NO_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_min_num_params": 100_000_000,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_activation_checkpointing_offload": False,
    "fsdp_ignored_modules": None,
}
_ALWAYS_WRITTEN = (
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_state_dict_type"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_activation_checkpointing"),
)
"keys whose default is written if the source does not set them: the defaults differ, or matter most"
_FSDP1_ONLY = {  # key: (value with which FSDP1 does the same as FSDP2, why the key is dropped)
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
_SHARDING = {  # FSDP1's strategies, in the order of their numbers: (reshard after forward, hybrid)
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "NO_SHARD": (None, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}

_FSDP2 = "FSDP2 shards each parameter, FSDP1 the flattened parameters of a layer: the same bytes and traffic"
_WINS = "under FSDP1 accelerate reads fsdp_sharding_strategy (FULL_SHARD if it is absent) and never this key"
_OBSOLETE = "accelerate reads it under fsdp_version 1 only"


def read_source(words: list[str], *, num_processes: int | None, gpus_per_node: int | None) -> Draft:
    """Read the user's source into a draft. Raises ValueError if its form is unknown."""
    shipped = config_dir("accel_configs") / f"{words[0]}.yaml"
    path = shipped if is_file(shipped) else typed_path(words[0])
    if len(words) > 1 or not is_file(path):
        names = ", ".join(shipped_strategies())
        raise ValueError(
            f"no such file or strategy: {' '.join(without_secrets(words))}\nhint: give an accelerate YAML, a "
            f"DeepSpeed JSON, or one of {names}; commands are not converted: Trainer's "
            "--deepspeed takes a JSON"
        )
    config = _read_mapping(path)
    if not is_deepspeed_config(config):
        return _read_accelerate(config, path, num_processes, gpus_per_node)
    launch, ranks = _launch({}, num_processes, gpus_per_node)
    settings = deepspeed_settings(config)
    settings += init_flag(settings)
    return Draft(path.stem, "deepspeed", ranks, (*launch, *settings), json_path=path)


def _launch(
    written: dict[str, Any], num_processes: int | None, gpus_per_node: int | None
) -> tuple[list[Setting], Ranks]:
    """Return the launcher's settings and the ranks; --num_processes overrides the source."""
    settings = [Setting("launch", (key,), value, source, value) for key, (value, source) in written.items()]
    if num_processes is not None:
        settings = [setting for setting in settings if setting.path != ("num_processes",)]
        settings.append(
            Setting("launch", ("num_processes",), num_processes, "--num_processes", num_processes)
        )
    values = {setting.path[0]: setting.value for setting in settings}
    return settings, ranks_of(values.get("num_processes"), values.get("num_machines"), gpus_per_node)


def _read_accelerate(
    config: dict[str, Any], path: Path, num_processes: int | None, gpus_per_node: int | None
) -> Draft:
    engine = read_strategy(path).engine  # this also checks the DeepSpeed JSON
    if unknown := [key for key in config if key not in YAML_SETTINGS]:
        raise ValueError(
            f"{path}: accelerate refuses the key {unknown[0]}\nhint: does it belong in another file?"
        )
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        raise ValueError(
            f"{path}: SageMaker's configurations are not converted\n"
            "hint: use compute_environment: LOCAL_MACHINE"
        )
    written = {key: (value, key) for key, value in config.items() if not isinstance(value, dict)}
    if written.pop("fp16", (False,))[0] is True:  # earlier versions
        written.setdefault("mixed_precision", ("fp16", "fp16"))
    if (precision := written.get("mixed_precision")) is not None:  # YAML: unquoted no is false
        written["mixed_precision"] = ("no" if precision[0] is False else str(precision[0]), precision[1])
    launch, ranks = _launch(written, num_processes, gpus_per_node)
    launch += _dynamo(config)
    groups = [
        Setting("groups", (_prefixed(key, "parallelism_config_"),), value, f"parallelism_config.{key}", value)
        for key, value in (config.get("parallelism_config") or {}).items()
    ]
    others = ("fp8_config", "megatron_lm_config", "mpirun_config")
    launch += [Setting("launch", (key,), config[key], key, config[key]) for key in others if config.get(key)]
    sections = {"fsdp_config": ("fsdp1", "fsdp2"), "deepspeed_config": ("deepspeed",)}
    rows = [
        KeyAccount(name, config[name], "ignored", (), f"distributed_type is {config['distributed_type']}")
        for name, engines in sections.items()
        if config.get(name) and engine not in engines
    ]
    if engine == "deepspeed":
        settings, json_path = _deepspeed_of_yaml(config.get("deepspeed_config") or {}, path)
        json_key = ""
        if json_path is not None:
            json_key = "deepspeed_config.deepspeed_config_file"
            named = config["deepspeed_config"]["deepspeed_config_file"]
            rows.append(KeyAccount(json_key, named, "default", (), "each of its keys has its own row"))
        settings = (*launch, *groups, *settings)
        return Draft(path.stem, engine, ranks, settings, tuple(rows), json_path, json_key)
    if engine in ("single", "ddp"):
        return Draft(path.stem, engine, ranks, (*launch, *groups), tuple(rows))
    section = (config.get("fsdp_config") or {}).items()
    keys = {_prefixed(key, "fsdp_"): (value, f"fsdp_config.{key}") for key, value in section}
    engine, settings, key_rows = _fsdp_settings(keys, ranks)
    _check_groups(groups, ranks, path)
    return Draft(path.stem, engine, ranks, (*launch, *settings, *groups), (*rows, *key_rows))


def _deepspeed_of_yaml(section: dict[str, Any], path: Path) -> tuple[list[Setting], Path | None]:
    """Return the settings of the JSON that the section names, or its inline settings; and the JSON's path."""
    settings = [
        Setting("plugin", (key,), value, f"deepspeed_config.{key}", value)
        for key, value in section.items()
        if key not in (*KEYS_OF_THE_JSON, "deepspeed_config_file")
    ]
    named = section.get("deepspeed_config_file")
    json_path = None
    if named is not None:
        json_path = deepspeed_config_path(str(named), path)
        settings += deepspeed_settings(_read_mapping(json_path))
    else:
        inline = {"zero_stage": 2, **section}  # accelerate's default
        for key, to in KEYS_OF_THE_JSON.items():
            if inline.get(key, "none") not in (None, "none"):
                source = f"deepspeed_config.{key}"
                settings.append(Setting("deepspeed", to, inline[key], source, section.get(key)))
        paths = {setting.path for setting in settings}
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", *_AUTO):
            if (path_in_json := tuple(key.split("."))) not in paths:
                settings.append(Setting("deepspeed", path_in_json, "auto", why=_AUTO_WHY))
    return [*settings, *init_flag(settings)], json_path


_AUTO = ("gradient_accumulation_steps", "gradient_clipping", "bf16.enabled", "fp16.enabled")
_AUTO_WHY = "the script decides; accelerate fills in this key if there is no JSON"


def _dynamo(config: dict[str, Any]) -> list[Setting]:
    """Return accelerate's compilation settings, also from the older key dynamo_backend."""
    section = dict(config.get("dynamo_config") or {})
    if config.get("dynamo_backend"):
        section.setdefault("dynamo_backend", config["dynamo_backend"])
    return [
        Setting("launch", ("dynamo_config", _prefixed(key, "dynamo_")), value, f"dynamo_config.{key}", value)
        for key, value in section.items()
    ]


def _check_groups(groups: list[Setting], ranks: Ranks, path: Path) -> None:
    product = 1
    for setting in groups:
        if setting.path[0].endswith("_size"):
            product *= int(setting.value or 1)
    if ranks.num is not None and product not in (1, ranks.num):
        raise ValueError(
            f"{path}: the sizes of parallelism_config need {product} ranks, num_processes is {ranks.num}\n"
            "hint: accelerate refuses this: change one of them"
        )


def _prefixed(key: str, prefix: str) -> str:
    return key if key.startswith(prefix) else prefix + key


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read the settings in a JSON or YAML file."""
    hint = "`slm configs --copy DIR` writes working examples"
    text = read_text(path, hint=hint)
    config = (json_of if path.suffix == ".json" else yaml_of)(text, path, hint=hint)
    if not isinstance(config, dict):
        raise ValueError(f"{path} contains no settings but {config!r}\nhint: {hint}")
    return config


def _fsdp_settings(
    written: dict[str, tuple[Any, str]], ranks: Ranks
) -> tuple[str, list[Setting], list[KeyAccount]]:
    """Return engine, settings and account rows of FSDP keys.

    `written` maps accelerate's name of a key to its value and the key as it is written in the source. FSDP1
    becomes FSDP2, and its NO_SHARD becomes DDP. An absent key has the source's default.
    """
    version, version_source = written.get("fsdp_version", (1, "fsdp_version"))
    if str(version) not in ("1", "2"):
        raise ValueError(f"{version_source} is {version!r}\nhint: use 1 or 2")
    is_fsdp1 = str(version) == "1"
    settings, rows = [], []
    if is_fsdp1:
        engine, settings, rows = _sharding_of_fsdp1(written, ranks)
        if engine == "ddp":
            sharding_keys = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward")
            rows += [
                KeyAccount(source, value, "no counterpart", (), "DDP has no such setting")
                for key, (value, source) in written.items()
                if key not in sharding_keys
            ]
            return engine, [], rows
    for key, (value, source) in written.items():
        if key == "fsdp_version":
            why = _FSDP2 if is_fsdp1 else ""
            settings.append(Setting("fsdp", (key,), 2, source, value, why))
        elif is_fsdp1 and key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            continue  # see _sharding_of_fsdp1
        elif key in _FSDP1_ONLY:
            rows.append(_row_of_fsdp1(key, value, source, is_fsdp1=is_fsdp1))
        elif key not in FSDP_DEFAULTS:
            rows.append(
                KeyAccount(source, value, "ignored", (), "no library reads this key: is it misspelt?")
            )
        else:
            settings.append(_setting(key, value, source))
    present = {setting.path[0] for setting in settings}
    for key in _ALWAYS_WRITTEN:
        if key not in present:
            default = "FULL_STATE_DICT" if is_fsdp1 and key == "fsdp_state_dict_type" else FSDP_DEFAULTS[key]
            settings.append(Setting("fsdp", (key,), default, f"fsdp_config.{key}"))
    if "fsdp_version" not in present:
        why = _FSDP2 if is_fsdp1 else ""
        settings.insert(
            0,
            Setting("fsdp", ("fsdp_version",), 2, "fsdp_config.fsdp_version", None, why),
        )
    return "fsdp", settings, rows


def _setting(key: str, value: Any, source: str) -> Setting:
    if isinstance(FSDP_DEFAULTS[key], bool):
        return Setting("fsdp", (key,), truth(value, source), source, value)
    if key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, list):
        return Setting("fsdp", (key,), ",".join(map(str, value)), source, value)
    if key == "fsdp_state_dict_type" and str(value).upper() == "LOCAL_STATE_DICT":
        why = "FSDP2 refuses LOCAL_STATE_DICT; both types write one file per rank"
        return Setting("fsdp", (key,), "SHARDED_STATE_DICT", source, value, why, "nearest")
    if key in ("fsdp_auto_wrap_policy", "fsdp_state_dict_type"):
        return Setting("fsdp", (key,), str(value).upper(), source, value)
    return Setting("fsdp", (key,), value, source, value)


def _sharding_of_fsdp1(
    written: dict[str, tuple[Any, str]], ranks: Ranks
) -> tuple[str, list[Setting], list[KeyAccount]]:
    """Return engine, settings and rows of FSDP1's sharding strategy."""
    rows = []
    reshard = written.get("fsdp_reshard_after_forward")
    strategy = written.get("fsdp_sharding_strategy")
    why = ""
    if strategy is None and reshard is not None and str(reshard[0]).lower() not in ("true", "false"):
        strategy, why = reshard, _WINS  # the user meant this strategy, but used the wrong key
    elif reshard is not None:
        rows.append(KeyAccount(reshard[1], reshard[0], "ignored", (), _WINS))
    value, source = strategy or ("FULL_SHARD", "fsdp_config.fsdp_sharding_strategy")
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_SHARDING):
        name = list(_SHARDING)[int(name) - 1]
    if name not in _SHARDING:
        raise ValueError(f"{source} is {value!r}\nhint: use one of {', '.join(_SHARDING)}")
    source_value = value if strategy else None
    reshards, is_hybrid = _SHARDING[name]
    if reshards is None:
        why = "NO_SHARD is DDP"
        to_ddp = KeyAccount(source, source_value, "carried", ("distributed_type: MULTI_GPU",), why)
        return "ddp", [], [to_ddp, *rows]
    settings = [Setting("fsdp", ("fsdp_reshard_after_forward",), reshards, source, source_value, why)]
    if is_hybrid:
        shard = ranks_per_node(ranks, f"{source} {value}")
        settings += hybrid_settings(
            ranks, shard, source=source, source_value=source_value, why=why, fate="carried"
        )
    return "fsdp", settings, rows


def _row_of_fsdp1(key: str, value: Any, source: str, *, is_fsdp1: bool) -> KeyAccount:
    always, why = _FSDP1_ONLY[key]
    if not is_fsdp1:
        return KeyAccount(source, value, "ignored", (), _OBSOLETE)
    is_same = str(value).lower() == str(always).lower()
    return KeyAccount(source, value, "default" if is_same else "no counterpart", (), why)
