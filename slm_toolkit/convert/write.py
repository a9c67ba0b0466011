"""Write a draft as an accelerate YAML, a DeepSpeed JSON or TrainingArguments."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import json_of, read_text
from slm_toolkit.convert.command import launch_values, script_of, torchrun_command, torchrun_options
from slm_toolkit.convert.engines import INIT_FLAG, ZERO
from slm_toolkit.convert.settings import (
    Draft,
    KeyAccount,
    Setting,
    account_of,
    nested,
    of_section,
    ranks_per_node,
    stage_of,
    truth,
)
from slm_toolkit.convert.trainer_keys import (
    DEEPSPEED_ARGUMENTS,
    FSDP_KEYS,
    LAUNCH,
    LAUNCHERS_OWN,
    TORCHRUN,
    USE_GROUPS,
    VARIABLES,
)

_WORSE = ("added", "ignored", "stays", "default", "carried", "nearest", "no counterpart")
"if one key has two fates, the account shows the later one in this list"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: files, launch command and account."""

    files: dict[str, str]
    "text by file name"
    command: list[str]
    "the command that launches the script with these files"
    rows: list[KeyAccount]


def placed(setting: Setting, key: str, value: Any, *, why: str = "") -> KeyAccount:
    """Return the account's row of a setting that is written under `key`."""
    to = f"{key}: {json.dumps(value)}" if not isinstance(value, str) else f"{key}: {value}"
    fate = setting.fate if setting.source else "added"
    return KeyAccount(setting.source, setting.source_value, fate, (to,), why or setting.why)


def account(rows: Iterable[KeyAccount]) -> list[KeyAccount]:
    """Merge rows: one per key of the source, and one for all keys that were added for the same reason."""
    merged: dict[tuple[str, ...], KeyAccount] = {}
    for row in rows:
        name = (row.key,) if row.key else ("", row.why)
        before = merged.get(name)
        if before is None:
            merged[name] = row
            continue
        fate = max(before.fate, row.fate, key=_WORSE.index)
        kept = [r.why for r in (before, row) if r.fate == fate or r.to]
        whys = dict.fromkeys(why for text in kept for why in text.split("; ") if why)
        to = tuple(dict.fromkeys((*before.to, *row.to)))
        merged[name] = dataclasses.replace(before, fate=fate, to=to, why="; ".join(whys))
    return list(merged.values())


def json_text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def deepspeed_json(draft: Draft, *, for_our_script: bool) -> tuple[dict[str, Any], list[KeyAccount]]:
    """Return the DeepSpeed JSON, and a row for each of its keys.

    Only slm_toolkit.train understands an hpZ of size "auto": other scripts get the ranks of a node.
    """
    leaves, rows = [], []
    for setting in of_section(draft.settings, "deepspeed"):
        key, value, why = ".".join(setting.path), setting.value, ""
        if key == f"{ZERO}zero_hpz_partition_size" and value == "auto" and not for_our_script:
            value = ranks_per_node(draft.ranks, f"{key} auto")
            why = "the ranks of a node; only slm_toolkit.train understands auto"
        leaves.append((setting.path, value))
        rows.append(placed(setting, key, value, why=why))
    return nested(leaves), rows


def is_unchanged(draft: Draft, config: dict[str, Any]) -> bool:
    """Return True if the JSON equals the file from which it was read."""
    if draft.json_path is None or draft.json_path.suffix != ".json":  # the file may be a YAML
        return False
    hint = "compare with ds_configs/zero2.json"
    return json_of(read_text(draft.json_path, hint=hint), draft.json_path, hint=hint) == config


def unchanged_json(draft: Draft, to: str) -> KeyAccount:
    """Return the row of a DeepSpeed JSON that is used unchanged."""
    num_keys = len(of_section(draft.settings, "deepspeed"))
    why = "the file is used unchanged, with all its keys"
    return KeyAccount(draft.json_key or draft.json_path.name, f"{num_keys} keys", "carried", (to,), why)


def path_to_show(path: Path) -> str:
    """Return a path relative to the working folder, or absolute if it is outside."""
    relative = os.path.relpath(path)
    return os.path.realpath(path) if relative.startswith("..") else relative


def in_folder(folder: Path | None, name: str) -> str:
    """Return the name by which one file of the result refers to another."""
    return name if folder is None else str(folder / name)


_TYPES = {"single": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
_SUFFIX = {"single": "ddp", "ddp": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed"}
_OUT = "remove it from the script's arguments: there it would override the YAML"
_OWN_OPTIMIZER = (
    "use DummyOptim and DummyScheduler in the script: accelerate needs them for the JSON's sections"
)


def write_accelerate(draft: Draft, folder: Path | None) -> Converted:
    """Return the YAML and, under DeepSpeed, the JSON, unless the source's JSON is used unchanged."""
    name = f"{draft.name}_as_{_SUFFIX[draft.engine]}"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _TYPES[draft.engine],
    }
    files: dict[str, str] = {}
    rows = [*draft.rows]
    if draft.engine == "fsdp":
        order = [key.accelerate for key in FSDP_KEYS]
        settings = sorted(
            of_section(draft.settings, "fsdp"), key=lambda setting: order.index(setting.path[0])
        )
        rows += _section(config, "fsdp_config", settings)
    rows += _section(config, "parallelism_config", of_section(draft.settings, "groups"))
    if draft.engine == "deepspeed":
        rows += _deepspeed(config, files, draft, f"{name}.json", folder)
    rows += _launch(config, draft)
    head = f"# {draft.name}, converted by `slm convert`\n"
    files = {f"{name}.yaml": head + yaml.safe_dump(config, sort_keys=False, width=200), **files}
    num_processes = [] if "num_processes" in config else ["--num_processes", "N"]
    yaml_name = in_folder(folder, f"{name}.yaml")
    launcher = ["accelerate", "launch", *num_processes, "--config_file", yaml_name]
    return Converted(files, [*draft.environment, *launcher, *script_of(draft.script)], account(rows))


def _section(config: dict[str, Any], name: str, settings: list[Setting]) -> list[KeyAccount]:
    written = [setting for setting in settings if setting.value is not None]
    if written:
        config[name] = {setting.path[0]: setting.value for setting in written}
    not_written = [account_of(setting, "default") for setting in settings if setting.value is None]
    rows = [placed(setting, f"{name}.{setting.path[0]}", setting.value) for setting in written]
    return rows + not_written


def _deepspeed(
    config: dict[str, Any], files: dict[str, str], draft: Draft, json_name: str, folder: Path | None
) -> list[KeyAccount]:
    """Fill in the YAML's deepspeed_config and the JSON that it names; return their rows."""
    settings, rows = deepspeed_json(draft, for_our_script=not draft.is_trainers)
    if is_unchanged(draft, settings):
        named = path_to_show(draft.json_path)
        rows = [unchanged_json(draft, f"deepspeed_config.deepspeed_config_file: {named}")]
    else:
        named = in_folder(folder, json_name)
        files[json_name] = json_text(settings)
    if "optimizer" in settings or "scheduler" in settings:
        rows.append(KeyAccount("", None, "added", (_OWN_OPTIMIZER,)))
    section: dict[str, Any] = {"deepspeed_config_file": named}
    for setting in of_section(draft.settings, "plugin"):
        key = setting.path[0]
        section[key] = truth(setting.value, key) if key == INIT_FLAG else setting.value
        rows.append(placed(setting, f"deepspeed_config.{key}", section[key]))
    section.setdefault(INIT_FLAG, False)
    config["deepspeed_config"] = section
    return rows


def _launch(config: dict[str, Any], draft: Draft) -> list[KeyAccount]:
    """Fill in the launcher's keys, from the source or from the defaults of our YAMLs; return their rows."""
    settings = of_section(draft.settings, "launch")
    source_keys = {setting.path[0] for setting in settings}
    rows, leaves = [], []
    for setting in settings:
        key = setting.path[0]
        if key in ("compute_environment", "distributed_type"):
            rows.append(placed(setting, key, config[key], why=_OUT if draft.is_trainers else ""))
        else:
            leaves.append((setting.path, setting.value))
            rows.append(placed(setting, ".".join(setting.path), setting.value))
    why = "as in our YAMLs"
    not_used = ("rdzv_backend", "same_network") if draft.engine == "single" else ()
    for key, value in LAUNCH.items():
        if key not in source_keys and key not in not_used:
            leaves.append(((key,), value))
            rows.append(KeyAccount("", None, "added", (f"{key}: {str(value).lower()}",), why))
    config.update(nested(leaves))
    if "num_processes" not in source_keys:
        why = "add --num_processes N to this command, or to accelerate launch"
        rows.append(KeyAccount("num_processes", None, "default", (), why))
    return rows


_IN_PIECES = (
    "with a JSON alone, transformers always builds the model in shards under ZeRO-3: this needs less host "
    "RAM, but weights drawn from a seed differ"
)
_LAUNCHER = "only accelerate's launcher reads it"
_MUST_AGREE = "transformers refuses an argument with another value"
_BY_VARIABLE = "TrainingArguments have no such key; accelerate reads the environment variable"
_NO_KEY = "TrainingArguments have no such key, and torchrun no such option"


def write_deepspeed_json(draft: Draft, folder: Path | None) -> Converted:
    """Return the DeepSpeed JSON, for a launch without accelerate's YAML."""
    name = f"{draft.name}_as_deepspeed.json"
    config, rows = deepspeed_json(draft, for_our_script=False)
    rows = [*draft.rows, *rows, *_plugin_rows(draft)]
    arguments: dict[str, Any] = {}
    environment, of_launcher = _launcher(draft, arguments)
    words = ["--deepspeed", in_folder(folder, name), *_flags(arguments, draft)]
    command = torchrun_command(draft.settings, environment, script_of(draft.script), words)
    return Converted({name: json_text(config)}, command, account([*rows, *of_launcher]))


def write_trainer(draft: Draft, folder: Path | None) -> Converted:
    """Return training_arguments.json, and the file that its fsdp_config or deepspeed names."""
    files, rows = {}, [*draft.rows]
    arguments: dict[str, Any] = {}
    words: list[str] = []
    environment, of_launcher = _launcher(draft, arguments)
    if draft.engine == "fsdp":
        name = f"{draft.name}_as_fsdp_config.json"
        config, variables, config_rows = _fsdp_config(draft)
        environment += variables
        files[name] = json_text(config)
        words = ["--fsdp", "--fsdp_config", in_folder(folder, name), *_flags(arguments, draft)]
        arguments = {"fsdp": True, "fsdp_config": in_folder(folder, name), **arguments}
        rows += config_rows
    elif draft.engine == "deepspeed":
        named, agreeing, config_rows = _deepspeed_of_trainer(draft, files, folder)
        arguments |= agreeing
        words = ["--deepspeed", named, *_flags(arguments, draft)]
        arguments = {"deepspeed": named, **arguments}
        rows += [*config_rows, *_plugin_rows(draft)]
    else:
        words = _flags(arguments, draft)
    files = {f"{draft.name}_as_training_arguments.json": json_text(arguments), **files}
    command = torchrun_command(draft.settings, environment, script_of(draft.script), words)
    return Converted(files, command, account([*rows, *of_launcher]))


def _fsdp_config(draft: Draft) -> tuple[dict[str, Any], list[str], list[KeyAccount]]:
    """Return the content of --fsdp_config, environment variables for all other settings, and the rows."""
    names = {key.accelerate: key.trainer for key in FSDP_KEYS}
    config, variables, rows = {}, [], []
    for setting in of_section(draft.settings, "fsdp"):
        key, value = setting.path[0], setting.value
        if value is None:
            rows.append(account_of(setting, "default"))
        elif name := names[key]:
            is_list = key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, str)
            config[name] = value.split(",") if is_list else value
            rows.append(placed(setting, f"fsdp_config.{name}", config[name]))
        elif value is False:
            rows.append(account_of(setting, "default"))
        else:
            variables.append(_variable(key, value))
            rows.append(account_of(setting, setting.fate, variables[-1], why=_BY_VARIABLE))
    return config, variables, rows


def _deepspeed_of_trainer(
    draft: Draft, files: dict[str, str], folder: Path | None
) -> tuple[str, dict[str, Any], list[KeyAccount]]:
    """Return the file for --deepspeed, the arguments that must agree with it, and the rows."""
    config, rows = deepspeed_json(draft, for_our_script=False)
    arguments: dict[str, Any] = {}
    agreeing: list[KeyAccount] = []
    for setting in of_section(draft.settings, "deepspeed"):
        names = DEEPSPEED_ARGUMENTS.get(".".join(setting.path), ())
        if setting.value == "auto" or draft.is_trainers or not setting.source:
            continue
        values = setting.value if len(names) > 1 else [setting.value]
        for name, value in zip(names, values, strict=False):
            arguments[name] = value
            agreeing.append(placed(setting, name, value, why=_MUST_AGREE))
    if is_unchanged(draft, config):
        named = path_to_show(draft.json_path)
        return named, arguments, [unchanged_json(draft, f"deepspeed: {named}"), *agreeing]
    name = f"{draft.name}_as_deepspeed.json"
    files[name] = json_text(config)
    return in_folder(folder, name), arguments, rows + agreeing


def _plugin_rows(draft: Draft) -> Iterable[KeyAccount]:
    """Yield the rows of settings that only accelerate's YAML can have, not the JSON."""
    for setting in of_section(draft.settings, "plugin"):
        if not setting.source:
            continue
        if setting.path != (INIT_FLAG,):
            yield account_of(setting, "no counterpart", why=_LAUNCHER)
        elif truth(setting.value, INIT_FLAG) or stage_of(draft.settings) < 3:
            yield account_of(setting, "default", why="transformers does the same with a JSON alone")
        else:
            yield account_of(setting, "no counterpart", why=_IN_PIECES)


def _launcher(draft: Draft, arguments: dict[str, Any]) -> tuple[list[str], list[KeyAccount]]:
    """Convert the launcher's keys to environment variables and arguments.

    Adds to `arguments`; returns the variables and the rows.
    """
    environment, rows = [*draft.environment], []
    values = launch_values(draft.settings)
    options = {"num_processes": "python"} if values.get("num_processes") == 1 else torchrun_options(values)
    for setting in of_section(draft.settings, "launch"):
        key, value = setting.path[-1], setting.value
        if key == "distributed_type" and draft.is_trainers:
            rows.append(
                placed(setting, setting.source, True if draft.engine == "fsdp" else setting.source_value)
            )
        elif key in LAUNCHERS_OWN:
            rows.append(account_of(setting, "default", why="only accelerate's launcher needs it"))
        elif key in ("num_processes", "rdzv_backend", *TORCHRUN):
            to = [options[key]] if key in options and value is not None else []
            rows.append(account_of(setting, "carried" if to else "default", *to))
        elif key in VARIABLES:
            if str(value).lower() in ("all", "false", "none"):
                rows.append(account_of(setting, "default"))
            else:
                environment.append(_variable(key, value))
                rows.append(account_of(setting, "carried", environment[-1]))
        elif argument := _argument(key, value):
            arguments.update(argument)
            rows += [placed(setting, name, word) for name, word in argument.items()]
        else:
            is_off = value in (None, False, "no", "NO", "default") or (
                key == "dynamo_use_dynamic" and not value
            )
            why = "" if is_off else _NO_KEY
            rows.append(account_of(setting, "default" if is_off else "no counterpart", why=why))
    groups = [setting for setting in of_section(draft.settings, "groups") if setting.value is not None]
    if groups:
        environment.append(f"{USE_GROUPS}=true")
    for setting in groups:
        variable = _variable(setting.path[0], setting.value)
        environment.append(variable)
        rows.append(
            account_of(
                setting, setting.fate, variable, why="; ".join((_BY_VARIABLE, setting.why)).strip("; ")
            )
        )
    return environment, rows


def _argument(key: str, value: Any) -> dict[str, Any]:
    """Return the TrainingArguments that are equivalent to a key of accelerate's YAML."""
    if key == "mixed_precision" and value in ("bf16", "fp16"):
        return {value: True}
    if key == "use_cpu" and value:
        return {"use_cpu": True}
    if key == "dynamo_backend" and str(value).upper() != "NO":
        return {"torch_compile": True, "torch_compile_backend": str(value).lower()}
    if key == "dynamo_mode" and value not in (None, "default"):
        return {"torch_compile_mode": value}
    return {}


def _variable(key: str, value: Any) -> str:
    """Return NAME=value; a key that VARIABLES does not list becomes a name in capitals, as in accelerate."""
    name = VARIABLES.get(key, key.upper())
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _flags(arguments: dict[str, Any], draft: Draft) -> list[str]:
    """Return the arguments as words of a command, except those that the script already has."""
    missing = [(key, value) for key, value in arguments.items() if f"--{key}" not in draft.script]
    return [word for key, value in missing for word in (f"--{key}", str(value))]
