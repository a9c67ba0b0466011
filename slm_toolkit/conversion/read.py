"""A source of any form, taken apart into settings."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from slm_toolkit.conversion.command import command_source, script_of
from slm_toolkit.conversion.fsdp_keys import fsdp_settings
from slm_toolkit.conversion.read_trainer import is_fsdp_config, is_training_arguments, read_trainer
from slm_toolkit.conversion.settings import (
    Draft,
    Ranks,
    Row,
    Setting,
    deepspeed_settings,
    init_flag,
    ranks_of,
)
from slm_toolkit.conversion.trainer_keys import ACCELERATE_KEYS
from slm_toolkit.deepspeed_json import KEYS_OF_THE_JSON, deepspeed_config_path, is_deepspeed_config
from slm_toolkit.strategy import config_dir, read_strategy, shipped_strategies
from slm_toolkit.user_files import check_name, exists, is_file, json_of, read_text, typed_path, yaml_of

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
        rows.append(Row("all other words", others, "stays", (), "nothing of how to shard"))
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
    if unknown := [key for key in config if key not in ACCELERATE_KEYS]:
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
        Row(name, config[name], "ignored", (), f"distributed_type is {config['distributed_type']}")
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
            rows.append(Row(key, named, "default", (), "its keys are accounted for one by one"))
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
