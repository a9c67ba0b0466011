"""Read a source in any supported form into a draft."""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

from slm_toolkit.base.secrets import hidden
from slm_toolkit.base.user_files import check_name, exists, is_file, json_of, read_text, typed_path, yaml_of
from slm_toolkit.convert.command import command_source, script_of
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
from slm_toolkit.convert.trainer_keys import (
    ALWAYS_WRITTEN,
    ARGUMENTS_READ,
    FSDP1_ONLY,
    FSDP_KEYS,
    FSDP_TRUTHS,
    SHARDING,
    XLA_KEYS,
)
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON, deepspeed_config_path, is_deepspeed_config
from slm_toolkit.strategy.passed_on import YAML_SETTINGS
from slm_toolkit.strategy.strategy import config_dir, read_strategy, shipped_strategies

_FSDP2 = "FSDP2 shards each parameter, FSDP1 the flattened parameters of a layer: the same bytes and traffic"
_WINS = "under FSDP1 accelerate reads fsdp_sharding_strategy (FULL_SHARD if it is absent) and never this key"
_OBSOLETE = "accelerate reads it under fsdp_version 1 only"


def fsdp_settings(
    written: dict[str, tuple[Any, str]], ranks: Ranks, *, is_trainers: bool
) -> tuple[str, list[Setting], list[KeyAccount]]:
    """Return engine, settings and account rows of FSDP keys.

    `written` maps accelerate's name of a key to its value and the key as it is written in the source. FSDP1
    becomes FSDP2, and its NO_SHARD becomes DDP. An absent key has the source's default.
    """
    known = {key.accelerate: key for key in FSDP_KEYS}
    defaults = {k: key.trainer_default if is_trainers else key.launch_default for k, key in known.items()}
    version, version_source = written.get("fsdp_version", (defaults["fsdp_version"], "fsdp_version"))
    if str(version) not in ("1", "2"):
        raise ValueError(f"{version_source} is {version!r}\nhint: use 1 or 2")
    is_fsdp1 = str(version) == "1"
    settings, rows = [], []
    if is_fsdp1:
        engine, settings, rows = _sharding_of_fsdp1(written, ranks, is_trainers=is_trainers)
        if engine == "ddp":
            sharding_keys = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward")
            rows += [
                KeyAccount(source, value, "no counterpart", (), "DDP has no such setting")
                for key, (value, source) in written.items()
                if key not in sharding_keys
            ]
            return engine, [], rows
    why = _FSDP2 if is_fsdp1 else ""
    for key, (value, source) in written.items():
        if key == "fsdp_version":
            settings.append(Setting("fsdp", (key,), 2, source, value, why))
        elif is_fsdp1 and key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            continue  # see _sharding_of_fsdp1
        elif key in FSDP1_ONLY:
            rows.append(_row_of_fsdp1(key, value, source, is_fsdp1=is_fsdp1))
        elif key not in known:
            rows.append(
                KeyAccount(source, value, "ignored", (), "no library reads this key: is it misspelt?")
            )
        else:
            settings.append(_setting(key, value, source))
    present = {setting.path[0] for setting in settings}
    for key in ALWAYS_WRITTEN:
        if key not in present:
            default = "FULL_STATE_DICT" if is_fsdp1 and key == "fsdp_state_dict_type" else defaults[key]
            settings.append(Setting("fsdp", (key,), default, _named(key, is_trainers=is_trainers)))
    if "fsdp_version" not in present:
        source = _named("fsdp_version", is_trainers=is_trainers)
        settings.insert(0, Setting("fsdp", ("fsdp_version",), 2, source, None, why))
    return "fsdp", settings, rows


def _setting(key: str, value: Any, source: str) -> Setting:
    converted = value
    if key in FSDP_TRUTHS:
        converted = truth(value, source)
    elif key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, list):
        converted = ",".join(map(str, value))
    elif key in ("fsdp_auto_wrap_policy", "fsdp_state_dict_type"):
        converted = str(value).upper()
    if converted == "LOCAL_STATE_DICT":
        why = "FSDP2 refuses LOCAL_STATE_DICT; both types write one file per rank"
        return Setting("fsdp", (key,), "SHARDED_STATE_DICT", source, value, why, "nearest")
    return Setting("fsdp", (key,), converted, source, value)


def _sharding_of_fsdp1(
    written: dict[str, tuple[Any, str]], ranks: Ranks, *, is_trainers: bool
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
    value, source = strategy or ("FULL_SHARD", _named("fsdp_sharding_strategy", is_trainers=is_trainers))
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(SHARDING):
        name = list(SHARDING)[int(name) - 1]
    if name not in SHARDING:
        raise ValueError(f"{source} is {value!r}\nhint: use one of {', '.join(SHARDING)}")
    source_value = value if strategy else None
    reshards, is_hybrid = SHARDING[name]
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
    always, why = FSDP1_ONLY[key]
    if not is_fsdp1:
        return KeyAccount(source, value, "ignored", (), _OBSOLETE)
    is_same = str(value).lower() == str(always).lower()
    return KeyAccount(source, value, "default" if is_same else "no counterpart", (), why)


def _named(key: str, *, is_trainers: bool) -> str:
    """Return the key as it would be written in the source."""
    names = {row.accelerate: row.trainer for row in FSDP_KEYS}
    return f"fsdp_config.{names.get(key) or key if is_trainers else key}"


_MARKS = (
    *("fsdp", "fsdp_config", "deepspeed", "output_dir", "per_device_train_batch_size", "learning_rate"),
    *("num_train_epochs", "max_steps"),
)
_NAMES = {key.trainer: key.accelerate for key in FSDP_KEYS if key.trainer}
_NAMES |= {key.removeprefix("fsdp_"): key for key in FSDP1_ONLY if key != "fsdp_sharding_strategy"}
"transformers' name of a key in fsdp_config: accelerate's name"
_SCRIPTS = "an argument of the script that does not depend on sharding"
_JSON_HINT = "transformers expects JSON here"
_OWN_ROWS = "each of its keys has its own row"
_XLA = "sharding on TPUs, for which accelerate's YAML has no key"


def is_training_arguments(config: dict[str, Any]) -> bool:
    """Return True for TrainingArguments, where bf16 is a bool; in a DeepSpeed JSON it is a section."""
    precisions = [config.get(key) for key in ("bf16", "fp16")]
    return any(key in config for key in _MARKS) or any(isinstance(value, bool) for value in precisions)


def is_fsdp_config(config: dict[str, Any]) -> bool:
    """Return True for a file that --fsdp_config accepts."""
    return any(key.removeprefix("fsdp_") in _NAMES for key in config)


def read_trainer(
    config: dict[str, Any],
    name: str,
    launch: list[Setting],
    ranks: Ranks,
    *,
    folder: Path,
    more: tuple[Setting, ...] = (),
) -> Draft:
    """Read TrainingArguments; the files that they name are searched in the working folder and in `folder`.

    `more` contains settings from the environment and the launcher of a command.
    """
    has_fsdp, has_deepspeed = bool(config.get("fsdp")), bool(config.get("deepspeed"))
    if has_fsdp and has_deepspeed:
        raise ValueError(
            "fsdp and deepspeed are both set, which the Trainer refuses\nhint: remove one of them"
        )
    rows = [
        KeyAccount(key, hidden(key, value), "stays", (), _SCRIPTS)
        for key, value in config.items()
        if key not in ARGUMENTS_READ
    ]
    settings = [*launch, *more, *_compilation(config)]
    if "use_cpu" in config:
        settings.append(
            Setting("launch", ("use_cpu",), truth(config["use_cpu"], "use_cpu"), "use_cpu", config["use_cpu"])
        )
    if has_deepspeed:
        deepspeed, path = _loaded(config["deepspeed"], "deepspeed", folder)
        rows += [KeyAccount(k, config[k], "stays", (), _SCRIPTS) for k in ("bf16", "fp16") if k in config]
        settings.append(
            Setting("launch", ("distributed_type",), "DEEPSPEED", "deepspeed", _short(config["deepspeed"]))
        )
        settings += deepspeed_settings(deepspeed, before="deepspeed." if path is None else "")
        settings += init_flag(settings)
        return Draft(name, "deepspeed", ranks, tuple(settings), tuple(rows), True, path, "deepspeed")
    settings += _precision(config)
    if has_fsdp:
        fsdp_config, path = _loaded(config.get("fsdp_config") or {}, "fsdp_config", folder)
        if path is not None:
            rows.append(KeyAccount("fsdp_config", config["fsdp_config"], "default", (), _OWN_ROWS))
        settings.append(Setting("launch", ("distributed_type",), "FSDP", "fsdp", config["fsdp"]))
        keys, other_rows = _fsdp_keys(fsdp_config, config["fsdp"])
        engine, from_fsdp, key_rows = fsdp_settings(keys, ranks, is_trainers=True)
        return Draft(name, engine, ranks, (*settings, *from_fsdp), (*rows, *other_rows, *key_rows), True)
    if config.get("fsdp_config"):
        rows.append(
            KeyAccount("fsdp_config", config["fsdp_config"], "ignored", (), "read only if fsdp is on")
        )
    engine = "single" if ranks.num == 1 else "ddp"
    return Draft(name, engine, ranks, tuple(settings), tuple(rows), True)


def _short(value: Any) -> Any:
    """Return a file's name, or "settings" for settings that are written in place."""
    return value if isinstance(value, str) and not value.startswith("{") else "settings"


def _fsdp_keys(fsdp_config: dict[str, Any], fsdp: Any) -> tuple[dict[str, tuple[Any, str]], list[KeyAccount]]:
    """Return fsdp_config and --fsdp by accelerate's names, each with its value and its key in the source.

    --fsdp accepted words such as full_shard until transformers 5.
    """
    written, rows = {}, []
    for key, value in fsdp_config.items():
        name, source = key.removeprefix("fsdp_"), f"fsdp_config.{key}"
        if name in XLA_KEYS:
            rows.append(KeyAccount(source, value, "no counterpart" if value else "default", (), _XLA))
        else:
            written[_NAMES.get(name, f"unknown {name}")] = (value, source)
    if fsdp is True:
        return written, rows
    is_fsdp1 = str(written.get("fsdp_version", (2, ""))[0]) == "1"
    for word in map(str, fsdp) if isinstance(fsdp, list) else str(fsdp).split():
        source = f"fsdp {word}"
        if word == "offload":
            written.setdefault("fsdp_offload_params", (True, source))
        elif word == "auto_wrap":
            rows.append(KeyAccount(source, True, "default", (), "transformers wraps by layer anyway"))
        elif word.upper() in SHARDING and (is_fsdp1 or word in ("full_shard", "shard_grad_op")):
            value = word if is_fsdp1 else word == "full_shard"
            written.setdefault("fsdp_reshard_after_forward", (value, source))
        else:
            only = " without fsdp_config.version 1 (FSDP1)" if word in map(str.lower, SHARDING) else ""
            raise ValueError(
                f"transformers refuses --fsdp {word}{only}\n"
                "hint: use full_shard, shard_grad_op, offload or auto_wrap; or --fsdp without a value (in a "
                "file: true)"
            )
    return written, rows


def _precision(config: dict[str, Any]) -> list[Setting]:
    on = [key for key in ("bf16", "fp16") if config.get(key) is not None and truth(config[key], key)]
    if len(on) == 2:
        raise ValueError("bf16 and fp16 are both true\nhint: choose one of them")
    why = "the script may keep the argument, since both agree"
    return [Setting("launch", ("mixed_precision",), key, key, config[key], why) for key in on]


def _compilation(config: dict[str, Any]) -> list[Setting]:
    """Return torch_compile and its two options as accelerate's dynamo_config."""
    backend, mode = config.get("torch_compile_backend"), config.get("torch_compile_mode")
    settings = []
    if truth(config.get("torch_compile") or False, "torch_compile") or backend or mode:
        source = "torch_compile_backend" if backend else "torch_compile"
        word = str(backend or "inductor").upper()
        settings.append(
            Setting("launch", ("dynamo_config", "dynamo_backend"), word, source, config.get(source))
        )
    if mode:
        settings.append(Setting("launch", ("dynamo_config", "dynamo_mode"), mode, "torch_compile_mode", mode))
    return settings


def _loaded(value: Any, key: str, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the settings of an argument (a mapping, JSON text or a file name), and the file, if any."""
    if isinstance(value, dict):
        return value, None
    text, path = str(value), None
    if not text.startswith("{"):
        paths = [p for p in (typed_path(text), folder / text) if is_file(p)]
        if not paths:
            raise ValueError(
                f"{key}: no such file: {text}\nhint: searched in {Path.cwd()} and in the source's folder"
            )
        path = paths[0]
        text = read_text(path, hint=_JSON_HINT)
    config = json_of(text, f"{key}: {path or text}", hint=_JSON_HINT)
    if not isinstance(config, dict):
        raise ValueError(f"{key} is {config!r}\nhint: give settings, or the name of a file with settings")
    return config, path


_LONGEST_NAME = 100  # characters of a file name that is taken from the script
_FORMS = (
    "give a shipped strategy, an accelerate YAML (distributed_type), a DeepSpeed JSON (zero_optimization), "
    "TrainingArguments (fsdp, deepspeed), or a command after --"
)


def read_source(words: list[str], *, num_processes: int | None, gpus_per_node: int | None) -> Draft:
    """Read the user's source into a draft. Raises ValueError if its form is unknown."""
    first = words[0]
    if len(words) > 1 or first.startswith("-") or (" " in first and not exists(Path(first))):
        return _read_command(words, num_processes, gpus_per_node)
    shipped = config_dir("accel_configs") / f"{first}.yaml"
    path = shipped if is_file(shipped) else typed_path(first)
    if not is_file(path):
        names = ", ".join(shipped_strategies())
        raise ValueError(f"no such file or strategy: {first}\nhint: {_FORMS}; the strategies are {names}")
    config = _read_mapping(path)
    if "distributed_type" in config:
        return _read_accelerate(config, path, num_processes, gpus_per_node)
    launch, asked_ranks = _launch({}, num_processes, gpus_per_node)
    if is_training_arguments(config):
        return read_trainer(config, path.stem, launch, asked_ranks, folder=path.parent)
    if is_deepspeed_config(config):
        settings = deepspeed_settings(config)
        settings += init_flag(settings)
        return Draft(path.stem, "deepspeed", asked_ranks, (*launch, *settings), json_path=path)
    if is_fsdp_config(config):
        whole = {"fsdp": True, "fsdp_config": config}
        return read_trainer(whole, path.stem, launch, asked_ranks, folder=path.parent)
    raise ValueError(
        f"{path} has an unknown form: its keys are {', '.join(list(config)[:5])}\nhint: {_FORMS}"
    )


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


def _read_command(words: list[str], num_processes: int | None, gpus_per_node: int | None) -> Draft:
    source = command_source(words)
    launch, ranks = _launch(source.launch, num_processes, gpus_per_node)
    script = script_of(source.script)
    is_module = script[0] in ("-m", "--module")
    name = script[1].rpartition(".")[2] if is_module and len(script) > 1 else Path(script[0]).stem
    name = check_name(Path(name).name, "a script called")[:_LONGEST_NAME]
    draft = read_trainer(source.arguments, name, launch, ranks, folder=Path(), more=tuple(source.more))
    rows = [*source.rows]
    if source.script or source.environment:
        others = shlex.join([*source.environment, *source.script])
        rows.append(KeyAccount("all other words", others, "stays", (), "they do not affect sharding"))
    return dataclasses.replace(
        draft,
        rows=(*draft.rows, *rows),
        script=tuple(source.script),
        environment=tuple(source.environment),
    )


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
        section, key = config.get("deepspeed_config") or {}, ""
        settings, json_path = _deepspeed_of_yaml(section, path)
        if json_path is not None:
            named, key = section["deepspeed_config_file"], "deepspeed_config.deepspeed_config_file"
            rows.append(KeyAccount(key, named, "default", (), _OWN_ROWS))
        all_settings = (*launch, *groups, *settings)
        return Draft(path.stem, engine, ranks, all_settings, tuple(rows), json_path=json_path, json_key=key)
    if engine in ("single", "ddp"):
        return Draft(path.stem, engine, ranks, (*launch, *groups), tuple(rows))
    section = (config.get("fsdp_config") or {}).items()
    keys = {_prefixed(key, "fsdp_"): (value, f"fsdp_config.{key}") for key, value in section}
    engine, settings, key_rows = fsdp_settings(keys, ranks, is_trainers=False)
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
    sizes = (int(setting.value or 1) for setting in groups if setting.path[0].endswith("_size"))
    product = math.prod(sizes)
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
        raise ValueError(f"{path} contains no settings but {config!r}\nhint: {_FORMS}")
    return config
