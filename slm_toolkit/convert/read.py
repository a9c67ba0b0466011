"""A source of any form, taken apart into settings."""

import dataclasses
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
    ALWAYS_SAID,
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

_FSDP2 = "FSDP2 shards each parameter, FSDP1 a layer's flattened ones: the same bytes, the same traffic"
_WINS = (
    "under FSDP1 accelerate takes fsdp_sharding_strategy, FULL_SHARD where it is absent, and never this key"
)
_OBSOLETE = "accelerate reads it under fsdp_version 1 only"


def fsdp_settings(
    said: dict[str, tuple[Any, str]], ranks: Ranks, *, is_trainers: bool
) -> tuple[str, list[Setting], list[KeyAccount]]:
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
            of_sharding = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward")
            rows += [
                KeyAccount(source, value, "no counterpart", (), "DDP has no such setting")
                for key, (value, source) in said.items()
                if key not in of_sharding
            ]
            return engine, [], rows
    for key, (value, source) in said.items():
        if key == "fsdp_version":
            why = _FSDP2 if is_fsdp1 else ""
            settings.append(Setting("fsdp", (key,), 2, source, value, why))
        elif is_fsdp1 and key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            continue  # dealt with above
        elif key in FSDP1_ONLY:
            rows.append(_row_of_fsdp1(key, value, source, is_fsdp1=is_fsdp1))
        elif key not in known:
            rows.append(
                KeyAccount(source, value, "ignored", (), "no library reads such a key: is it misspelt?")
            )
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
    if key in FSDP_TRUTHS:
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
) -> tuple[str, list[Setting], list[KeyAccount]]:
    """What FSDP1 was asked to shard."""
    rows = []
    reshard = said.get("fsdp_reshard_after_forward")
    asked = said.get("fsdp_sharding_strategy")
    why = ""
    if asked is None and reshard is not None and str(reshard[0]).lower() not in ("true", "false"):
        asked, why = reshard, _WINS  # what was meant, and what is wrong with it
    elif reshard is not None:
        rows.append(KeyAccount(reshard[1], reshard[0], "ignored", (), _WINS))
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
        return "ddp", [], [KeyAccount(source, shown, "carried", ("distributed_type: MULTI_GPU",), why), *rows]
    settings = [Setting("fsdp", ("fsdp_reshard_after_forward",), reshards, source, shown, why)]
    if is_hybrid:
        shard = ranks_per_node(ranks, f"{source} {value}")
        settings += hybrid_settings(ranks, shard, source=source, said=shown, why=why, fate="carried")
    return "fsdp", settings, rows


def _row_of_fsdp1(key: str, value: Any, source: str, *, is_fsdp1: bool) -> KeyAccount:
    always, why = FSDP1_ONLY[key]
    if not is_fsdp1:
        return KeyAccount(source, value, "ignored", (), _OBSOLETE)
    same = str(value).lower() == str(always).lower()
    return KeyAccount(source, value, "default" if same else "no counterpart", (), why)


def _named(key: str, *, is_trainers: bool) -> str:
    """The key as the source would write it."""
    names = {row.accelerate: row.trainer for row in FSDP_KEYS}
    return f"fsdp_config.{names.get(key) or key if is_trainers else key}"


_MARKS = (
    *("fsdp", "fsdp_config", "deepspeed", "output_dir", "per_device_train_batch_size", "learning_rate"),
    *("num_train_epochs", "max_steps"),
)
_NAMES = {key.trainer: key.accelerate for key in FSDP_KEYS if key.trainer}
_NAMES |= {key.removeprefix("fsdp_"): key for key in FSDP1_ONLY if key != "fsdp_sharding_strategy"}
"transformers' names in fsdp_config: accelerate's"
_SCRIPTS = "an argument of the script's, whatever shards"
_JSON_HINT = "transformers reads JSON there"
_XLA = "TPUs' own sharding, which accelerate's YAML cannot ask for"


def is_training_arguments(config: dict[str, Any]) -> bool:
    """Whether a file holds TrainingArguments; bf16 is a word there, and a section in a DeepSpeed JSON."""
    words = [config.get(key) for key in ("bf16", "fp16")]
    return any(key in config for key in _MARKS) or any(isinstance(word, bool) for word in words)


def is_fsdp_config(config: dict[str, Any]) -> bool:
    """Whether a file is what --fsdp_config takes."""
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
    """The settings of TrainingArguments; files that they name are looked for here and in `folder`.

    `more`: what the environment and the launcher of a command say beside them.
    """
    has_fsdp, has_deepspeed = bool(config.get("fsdp")), bool(config.get("deepspeed"))
    if has_fsdp and has_deepspeed:
        raise ValueError(
            "fsdp and deepspeed are both asked for\nhint: the Trainer refuses that: leave out one"
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
        asked, path = _loaded(config["deepspeed"], "deepspeed", folder)
        rows += [KeyAccount(k, config[k], "stays", (), _SCRIPTS) for k in ("bf16", "fp16") if k in config]
        settings.append(
            Setting("launch", ("distributed_type",), "DEEPSPEED", "deepspeed", _short(config["deepspeed"]))
        )
        settings += deepspeed_settings(asked, before="deepspeed." if path is None else "")
        settings += init_flag(settings)
        return Draft(name, "deepspeed", ranks, tuple(settings), tuple(rows), True, path, "deepspeed")
    settings += _precision(config)
    if has_fsdp:
        asked, path = _loaded(config.get("fsdp_config") or {}, "fsdp_config", folder)
        if path is not None:
            rows.append(
                KeyAccount(
                    "fsdp_config",
                    config["fsdp_config"],
                    "default",
                    (),
                    "its keys are accounted for one by one",
                )
            )
        settings.append(Setting("launch", ("distributed_type",), "FSDP", "fsdp", config["fsdp"]))
        said, found = _fsdp_keys(asked, config["fsdp"])
        engine, of_fsdp, of_keys = fsdp_settings(said, ranks, is_trainers=True)
        return Draft(name, engine, ranks, (*settings, *of_fsdp), (*rows, *found, *of_keys), True)
    if config.get("fsdp_config"):
        rows.append(
            KeyAccount("fsdp_config", config["fsdp_config"], "ignored", (), "read only where fsdp is on")
        )
    engine = "single" if ranks.num == 1 else "ddp"
    return Draft(name, engine, ranks, tuple(settings), tuple(rows), True)


def _short(value: Any) -> Any:
    """A file's name as it is, settings as their number."""
    return value if isinstance(value, str) and not value.startswith("{") else "settings"


def _fsdp_keys(asked: dict[str, Any], fsdp: Any) -> tuple[dict[str, tuple[Any, str]], list[KeyAccount]]:
    """accelerate's names of what fsdp_config says, and of the words that --fsdp took until transformers 5."""
    said, rows = {}, []
    for key, value in asked.items():
        name, source = key.removeprefix("fsdp_"), f"fsdp_config.{key}"
        if name in XLA_KEYS:
            rows.append(KeyAccount(source, value, "no counterpart" if value else "default", (), _XLA))
        else:
            said[_NAMES.get(name, f"unknown {name}")] = (value, source)
    if fsdp is True:
        return said, rows
    is_fsdp1 = str(said.get("fsdp_version", (2, ""))[0]) == "1"
    for word in map(str, fsdp) if isinstance(fsdp, list) else str(fsdp).split():
        source = f"fsdp {word}"
        if word == "offload":
            said.setdefault("fsdp_offload_params", (True, source))
        elif word == "auto_wrap":
            rows.append(KeyAccount(source, True, "default", (), "transformers wraps by layer anyway"))
        elif word.upper() in SHARDING and (is_fsdp1 or word in ("full_shard", "shard_grad_op")):
            value = word if is_fsdp1 else word == "full_shard"
            said.setdefault("fsdp_reshard_after_forward", (value, source))
        else:
            only = " without fsdp_config.version 1 (FSDP1)" if word in map(str.lower, SHARDING) else ""
            raise ValueError(
                f"transformers refuses --fsdp {word}{only}\n"
                "hint: full_shard, shard_grad_op, offload, auto_wrap; or --fsdp alone, true in a file"
            )
    return said, rows


def _precision(config: dict[str, Any]) -> list[Setting]:
    asked = {key: truth(config[key], key) for key in ("bf16", "fp16") if config.get(key) is not None}
    if all(asked.get(key) for key in ("bf16", "fp16")):
        raise ValueError("bf16 and fp16 are both true\nhint: one of them")
    return [
        Setting(
            "launch",
            ("mixed_precision",),
            key,
            key,
            config[key],
            "the script may keep the argument: they agree",
        )
        for key, is_on in asked.items()
        if is_on
    ]


def _compilation(config: dict[str, Any]) -> list[Setting]:
    """torch_compile and its two options as accelerate's dynamo_config."""
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
    """The settings that an argument holds, names, or spells as JSON; and the file they came from."""
    if isinstance(value, dict):
        return value, None
    text, path = str(value), None
    if not text.startswith("{"):
        found = [p for p in (typed_path(text), folder / text) if is_file(p)]
        if not found:
            raise ValueError(
                f"{key}: no such file: {text}\nhint: looked for from {Path.cwd()} and beside the source"
            )
        path = found[0]
        text = read_text(path, hint=_JSON_HINT)
    config = json_of(text, f"{key}: {path or text}", hint=_JSON_HINT)
    if not isinstance(config, dict):
        raise ValueError(f"{key} is {config!r}\nhint: it holds settings, or names a file of them")
    return config, path


_LONGEST_NAME = 100  # of files that are called as the script is
_FORMS = (
    "a shipped strategy, an accelerate YAML (distributed_type), a DeepSpeed JSON (zero_optimization), "
    "TrainingArguments (fsdp, deepspeed), or a command behind --"
)


def read_source(words: list[str], *, num_processes: int | None, gpus_per_node: int | None) -> Draft:
    """The settings of what the user named. Raises ValueError for what is in none of the forms."""
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
        f"{path} is in no form that is known: it has {', '.join(list(config)[:5])}\nhint: {_FORMS}"
    )


def _launch(
    said: dict[str, Any], num_processes: int | None, gpus_per_node: int | None
) -> tuple[list[Setting], Ranks]:
    """Settings of accelerate's launcher, as the source says them; --num_processes goes before it."""
    settings = [Setting("launch", (key,), value, source, value) for key, (value, source) in said.items()]
    if num_processes is not None:
        settings = [setting for setting in settings if setting.path != ("num_processes",)]
        settings.append(
            Setting("launch", ("num_processes",), num_processes, "--num_processes", num_processes)
        )
    values = {setting.path[0]: setting.value for setting in settings}
    return settings, ranks_of(values.get("num_processes"), values.get("num_machines"), gpus_per_node)


def _read_command(words: list[str], num_processes: int | None, gpus_per_node: int | None) -> Draft:
    found = command_source(words)
    launch, ranks = _launch(found.launch, num_processes, gpus_per_node)
    script = script_of(found.script)
    is_module = script[0] in ("-m", "--module")
    name = script[1].rpartition(".")[2] if is_module and len(script) > 1 else Path(script[0]).stem
    name = check_name(Path(name).name, "a script called")[:_LONGEST_NAME]
    draft = read_trainer(found.arguments, name, launch, ranks, folder=Path(), more=tuple(found.more))
    rows = [*found.rows]
    if found.script or found.environment:
        others = shlex.join([*found.environment, *found.script])
        rows.append(KeyAccount("all other words", others, "stays", (), "nothing of how to shard"))
    return dataclasses.replace(
        draft,
        rows=(*draft.rows, *rows),
        script=tuple(found.script),
        environment=tuple(found.environment),
    )


def _read_accelerate(
    config: dict[str, Any], path: Path, num_processes: int | None, gpus_per_node: int | None
) -> Draft:
    engine = read_strategy(path).engine  # with its checks, of the DeepSpeed JSON, too
    if unknown := [key for key in config if key not in YAML_SETTINGS]:
        raise ValueError(f"{path}: accelerate refuses the key {unknown[0]}\nhint: is it one of another file?")
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        raise ValueError(
            f"{path}: SageMaker's configurations are not converted\nhint: compute_environment: LOCAL_MACHINE"
        )
    said = {key: (value, key) for key, value in config.items() if not isinstance(value, dict)}
    if said.pop("fp16", (False,))[0] is True:  # of earlier versions
        said.setdefault("mixed_precision", ("fp16", "fp16"))
    if (precision := said.get("mixed_precision")) is not None:  # YAML reads a bare no as false
        said["mixed_precision"] = ("no" if precision[0] is False else str(precision[0]), precision[1])
    launch, ranks = _launch(said, num_processes, gpus_per_node)
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
        if json_path is not None:
            key, named = (
                "deepspeed_config.deepspeed_config_file",
                config["deepspeed_config"]["deepspeed_config_file"],
            )
            rows.append(KeyAccount(key, named, "default", (), "its keys are accounted for one by one"))
            draft = Draft(path.stem, engine, ranks, (*launch, *groups, *settings), tuple(rows))
            return dataclasses.replace(draft, json_path=json_path, json_key=key)
        return Draft(path.stem, engine, ranks, (*launch, *groups, *settings), tuple(rows))
    if engine in ("single", "ddp"):
        return Draft(path.stem, engine, ranks, (*launch, *groups), tuple(rows))
    section = (config.get("fsdp_config") or {}).items()
    keys = {_prefixed(key, "fsdp_"): (value, f"fsdp_config.{key}") for key, value in section}
    engine, settings, found = fsdp_settings(keys, ranks, is_trainers=False)
    _check_groups(groups, ranks, path)
    return Draft(path.stem, engine, ranks, (*launch, *settings, *groups), (*rows, *found))


def _deepspeed_of_yaml(section: dict[str, Any], path: Path) -> tuple[list[Setting], Path | None]:
    """The JSON that is named, or the settings in its place; and what only the YAML says."""
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
        said = {setting.path for setting in settings}
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", *_AUTO):
            if (path_in_json := tuple(key.split("."))) not in said:
                settings.append(Setting("deepspeed", path_in_json, "auto", why=_AUTO_WHY))
    return [*settings, *init_flag(settings)], json_path


_AUTO = ("gradient_accumulation_steps", "gradient_clipping", "bf16.enabled", "fp16.enabled")
_AUTO_WHY = "the script says it; accelerate fills such keys in when it finds no JSON"


def _dynamo(config: dict[str, Any]) -> list[Setting]:
    """accelerate's compilation settings, also of its earlier files."""
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
            f"{path}: the sizes of parallelism_config make {product} ranks, num_processes is {ranks.num}\n"
            "hint: accelerate refuses that: change one of them"
        )


def _prefixed(key: str, prefix: str) -> str:
    return key if key.startswith(prefix) else prefix + key


def _read_mapping(path: Path) -> dict[str, Any]:
    """The settings in a JSON or YAML file."""
    hint = "`slm configs --copy DIR` writes good ones"
    text = read_text(path, hint=hint)
    config = (json_of if path.suffix == ".json" else yaml_of)(text, path, hint=hint)
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no settings but {config!r}\nhint: {_FORMS}")
    return config
