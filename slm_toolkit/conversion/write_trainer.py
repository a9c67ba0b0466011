"""A draft as TrainingArguments or as a DeepSpeed JSON alone, and the torchrun command that goes with it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slm_toolkit.conversion.command import launch_values, script_of, torchrun_command, torchrun_options
from slm_toolkit.conversion.counterparts import INIT_FLAG
from slm_toolkit.conversion.settings import Draft, Row, of_section, row_of, stage_of, truth
from slm_toolkit.conversion.trainer_keys import (
    DEEPSPEED_ARGUMENTS,
    FSDP_KEYS,
    LAUNCHERS_OWN,
    TORCHRUN,
    USE_GROUPS,
    VARIABLES,
)
from slm_toolkit.conversion.written import (
    Written,
    account,
    deepspeed_json,
    in_folder,
    is_unchanged,
    json_text,
    placed,
    shown,
    unchanged_json,
)

_IN_PIECES = (
    "where only a JSON says ZeRO-3, transformers builds every model in pieces: less host RAM, and weights "
    "drawn from a seed come out as others"
)
_LAUNCHER = "accelerate's launcher alone knows it"
_MUST_AGREE = "transformers refuses an argument that says otherwise"
_BY_VARIABLE = "TrainingArguments have no such key; accelerate inside reads the variable"
_NO_KEY = "TrainingArguments have no such key, torchrun no such option"


def write_deepspeed_json(draft: Draft, folder: Path | None) -> Written:
    """The JSON for whoever starts the script otherwise than with accelerate's YAML."""
    name = f"{draft.name}_as_deepspeed.json"
    config, rows = deepspeed_json(draft, for_our_script=False)
    rows = [*draft.rows, *rows, *_plugin_rows(draft)]
    arguments: dict[str, Any] = {}
    environment, of_launcher = _launcher(draft, arguments)
    words = ["--deepspeed", in_folder(folder, name), *_flags(arguments, draft)]
    command = torchrun_command(draft.settings, environment, script_of(draft.script), words)
    return Written({name: json_text(config)}, command, account([*rows, *of_launcher]))


def write_trainer(draft: Draft, folder: Path | None) -> Written:
    """training_arguments.json, and the file that its fsdp_config or deepspeed names."""
    files, rows = {}, [*draft.rows]
    arguments: dict[str, Any] = {}
    words: list[str] = []
    environment, of_launcher = _launcher(draft, arguments)
    if draft.engine == "fsdp":
        name = f"{draft.name}_as_fsdp_config.json"
        config, variables, found = _fsdp_config(draft)
        environment += variables
        files[name] = json_text(config)
        words = ["--fsdp", "--fsdp_config", in_folder(folder, name), *_flags(arguments, draft)]
        arguments = {"fsdp": True, "fsdp_config": in_folder(folder, name), **arguments}
        rows += found
    elif draft.engine == "deepspeed":
        named, rest, found = _deepspeed(draft, files, folder)
        arguments |= rest
        words = ["--deepspeed", named, *_flags(arguments, draft)]
        arguments = {"deepspeed": named, **arguments}
        rows += [*found, *_plugin_rows(draft)]
    else:
        words = _flags(arguments, draft)
    files = {f"{draft.name}_as_training_arguments.json": json_text(arguments), **files}
    command = torchrun_command(draft.settings, environment, script_of(draft.script), words)
    return Written(files, command, account([*rows, *of_launcher]))


def _fsdp_config(draft: Draft) -> tuple[dict[str, Any], list[str], list[Row]]:
    """What --fsdp_config takes; what it does not, as variables that accelerate reads; the rows."""
    names = {key.accelerate: key.trainer for key in FSDP_KEYS}
    config, variables, rows = {}, [], []
    for setting in of_section(draft.settings, "fsdp"):
        key, value = setting.path[0], setting.value
        if value is None:
            rows.append(row_of(setting, "default"))
        elif name := names[key]:
            is_list = key == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, str)
            config[name] = value.split(",") if is_list else value
            rows.append(placed(setting, f"fsdp_config.{name}", config[name]))
        elif value is False:
            rows.append(row_of(setting, "default"))
        else:
            variables.append(_variable(key, value))
            rows.append(row_of(setting, setting.fate, variables[-1], why=_BY_VARIABLE))
    return config, variables, rows


def _deepspeed(
    draft: Draft, files: dict[str, str], folder: Path | None
) -> tuple[str, dict[str, Any], list[Row]]:
    """The file that --deepspeed takes, and the arguments that must agree with it."""
    config, rows = deepspeed_json(draft, for_our_script=False)
    arguments: dict[str, Any] = {}
    agreeing: list[Row] = []
    for setting in of_section(draft.settings, "deepspeed"):
        names = DEEPSPEED_ARGUMENTS.get(".".join(setting.path), ())
        if setting.value == "auto" or draft.is_trainers or not setting.source:
            continue
        values = setting.value if len(names) > 1 else [setting.value]
        for name, value in zip(names, values, strict=False):
            arguments[name] = value
            agreeing.append(placed(setting, name, value, why=_MUST_AGREE))
    if is_unchanged(draft, config):
        named = shown(draft.json_path)
        return named, arguments, [unchanged_json(draft, f"deepspeed: {named}"), *agreeing]
    name = f"{draft.name}_as_deepspeed.json"
    files[name] = json_text(config)
    return in_folder(folder, name), arguments, rows + agreeing


def _plugin_rows(draft: Draft) -> Iterable[Row]:
    """What stands beside the JSON in accelerate's YAML and nowhere else."""
    for setting in of_section(draft.settings, "plugin"):
        if not setting.source:
            continue
        if setting.path != (INIT_FLAG,):
            yield row_of(setting, "no counterpart", why=_LAUNCHER)
        elif truth(setting.value, INIT_FLAG) or stage_of(draft.settings) < 3:
            yield row_of(setting, "default", why="transformers does the same with the JSON alone")
        else:
            yield row_of(setting, "no counterpart", why=_IN_PIECES)


def _launcher(draft: Draft, arguments: dict[str, Any]) -> tuple[list[str], list[Row]]:
    """Variables of the environment, and rows, of the launcher's keys; fills in what they are as arguments."""
    environment, rows = [*draft.environment], []
    values = launch_values(draft.settings)
    options = {"num_processes": "python"} if values.get("num_processes") == 1 else torchrun_options(values)
    for setting in of_section(draft.settings, "launch"):
        key, value = setting.path[-1], setting.value
        if key == "distributed_type" and draft.is_trainers:
            rows.append(placed(setting, setting.source, True if draft.engine == "fsdp" else setting.said))
        elif key in LAUNCHERS_OWN:
            rows.append(row_of(setting, "default", why="of accelerate's launcher only"))
        elif key in ("num_processes", "rdzv_backend", *TORCHRUN):
            to = [options[key]] if key in options and value is not None else []
            rows.append(row_of(setting, "carried" if to else "default", *to))
        elif key in VARIABLES:
            if str(value).lower() in ("all", "false", "none"):
                rows.append(row_of(setting, "default"))
            else:
                environment.append(_variable(key, value))
                rows.append(row_of(setting, "carried", environment[-1]))
        elif argument := _argument(key, value):
            arguments.update(argument)
            rows += [placed(setting, name, word) for name, word in argument.items()]
        else:
            silent = value in (None, False, "no", "NO", "default") or (
                key == "dynamo_use_dynamic" and not value
            )
            why = "" if silent else _NO_KEY
            rows.append(row_of(setting, "default" if silent else "no counterpart", why=why))
    groups = [setting for setting in of_section(draft.settings, "groups") if setting.value is not None]
    if groups:
        environment.append(f"{USE_GROUPS}=true")
    for setting in groups:
        variable = _variable(setting.path[0], setting.value)
        environment.append(variable)
        rows.append(
            row_of(setting, setting.fate, variable, why="; ".join((_BY_VARIABLE, setting.why)).strip("; "))
        )
    return environment, rows


def _argument(key: str, value: Any) -> dict[str, Any]:
    """The TrainingArguments that say what a key of accelerate's YAML says."""
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
    """NAME=value; accelerate's launcher has its own spelling for a group's key without a name here."""
    name = VARIABLES.get(key, key.upper())
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _flags(arguments: dict[str, Any], draft: Draft) -> list[str]:
    """Arguments as words, but for those that the script has already."""
    said = [(key, value) for key, value in arguments.items() if f"--{key}" not in draft.script]
    return [word for key, value in said for word in (f"--{key}", str(value))]
