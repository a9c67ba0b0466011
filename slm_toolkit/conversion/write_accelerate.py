"""A draft as an accelerate YAML, and the DeepSpeed JSON that it names."""

from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.conversion.command import script_of
from slm_toolkit.conversion.counterparts import INIT_FLAG
from slm_toolkit.conversion.settings import Draft, Row, Setting, nested, of_section, row_of, truth
from slm_toolkit.conversion.trainer_keys import FSDP_KEYS, LAUNCH
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

_TYPES = {"single": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
_SUFFIX = {"single": "ddp", "ddp": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed"}
_OUT = "leave it out of the script's arguments, where it would go before the YAML"
_OWN_OPTIMIZER = "accelerate wants DummyOptim and DummyScheduler in the script for what the JSON builds"


def write_accelerate(draft: Draft, folder: Path | None) -> Written:
    """The YAML and, under DeepSpeed, the JSON beside it, unless the source's own serves as it is."""
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
    how_many = [] if "num_processes" in config else ["--num_processes", "N"]
    yaml_name = in_folder(folder, f"{name}.yaml")
    launcher = ["accelerate", "launch", *how_many, "--config_file", yaml_name]
    return Written(files, [*draft.environment, *launcher, *script_of(draft.script)], account(rows))


def _section(config: dict[str, Any], name: str, settings: list[Setting]) -> list[Row]:
    said = [setting for setting in settings if setting.value is not None]
    if said:
        config[name] = {setting.path[0]: setting.value for setting in said}
    silent = [row_of(setting, "default") for setting in settings if setting.value is None]
    return [placed(setting, f"{name}.{setting.path[0]}", setting.value) for setting in said] + silent


def _deepspeed(
    config: dict[str, Any], files: dict[str, str], draft: Draft, json_name: str, folder: Path | None
) -> list[Row]:
    """The section of the YAML and the file that it names."""
    settings, rows = deepspeed_json(draft, for_our_script=not draft.is_trainers)
    if is_unchanged(draft, settings):
        named = shown(draft.json_path)
        rows = [unchanged_json(draft, f"deepspeed_config.deepspeed_config_file: {named}")]
    else:
        named = in_folder(folder, json_name)
        files[json_name] = json_text(settings)
    if "optimizer" in settings or "scheduler" in settings:
        rows.append(Row("", None, "added", (_OWN_OPTIMIZER,)))
    section: dict[str, Any] = {"deepspeed_config_file": named}
    for setting in of_section(draft.settings, "plugin"):
        key = setting.path[0]
        section[key] = truth(setting.value, key) if key == INIT_FLAG else setting.value
        rows.append(placed(setting, f"deepspeed_config.{key}", section[key]))
    section.setdefault(INIT_FLAG, False)
    config["deepspeed_config"] = section
    return rows


def _launch(config: dict[str, Any], draft: Draft) -> list[Row]:
    """The launcher's own keys, as the source has them or as our own YAMLs do."""
    settings = of_section(draft.settings, "launch")
    said = {setting.path[0] for setting in settings}
    rows, leaves = [], []
    for setting in settings:
        key = setting.path[0]
        if key in ("compute_environment", "distributed_type"):
            rows.append(placed(setting, key, config[key], why=_OUT if draft.is_trainers else ""))
        else:
            leaves.append((setting.path, setting.value))
            rows.append(placed(setting, ".".join(setting.path), setting.value))
    why = "as in our own YAMLs"
    for key, value in LAUNCH.items():
        if key not in said and (draft.engine != "single" or key not in ("rdzv_backend", "same_network")):
            leaves.append(((key,), value))
            rows.append(Row("", None, "added", (f"{key}: {str(value).lower()}",), why))
    config.update(nested(leaves))
    if "num_processes" not in said:
        why = "give --num_processes N to this command, or to accelerate launch"
        rows.append(Row("num_processes", None, "default", (), why))
    return rows
