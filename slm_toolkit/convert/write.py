"""Write a draft as an accelerate YAML or a DeepSpeed JSON."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import json_of, read_text
from slm_toolkit.convert.engines import INIT_FLAG, ZERO
from slm_toolkit.convert.read import FSDP_DEFAULTS
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

SCRIPT = "train.py"
"stands for the user's script"
_WORSE = ("added", "ignored", "default", "carried", "nearest", "no counterpart")
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
_LAUNCH = {  # launcher keys for a source that has none, with the values of our YAMLs
    "num_machines": 1,
    "machine_rank": 0,
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "use_cpu": False,
    "debug": False,
}
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
        order = list(FSDP_DEFAULTS)
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
    return Converted(files, [*launcher, SCRIPT], account(rows))


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
    settings, rows = deepspeed_json(draft, for_our_script=True)
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
            rows.append(placed(setting, key, config[key]))
        else:
            leaves.append((setting.path, setting.value))
            rows.append(placed(setting, ".".join(setting.path), setting.value))
    why = "as in our YAMLs"
    not_used = ("rdzv_backend", "same_network") if draft.engine == "single" else ()
    for key, value in _LAUNCH.items():
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
_OF_LAUNCHERS = (
    *("compute_environment", "distributed_type", "same_network", "main_training_function", "rdzv_backend"),
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port"),
)
"settings that torchrun has as its own options, or does not need"


def write_deepspeed_json(draft: Draft, folder: Path | None) -> Converted:
    """Return the DeepSpeed JSON, for a launch without accelerate's YAML."""
    name = f"{draft.name}_as_deepspeed.json"
    config, rows = deepspeed_json(draft, for_our_script=False)
    rows = [*draft.rows, *rows, *_plugin_rows(draft), *_rows_of_launcher(draft)]
    per_node = str(draft.ranks.per_node or "N")
    command = ["torchrun", "--nproc_per_node", per_node, SCRIPT, "--deepspeed", in_folder(folder, name)]
    return Converted({name: json_text(config)}, command, account(rows))


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


def _rows_of_launcher(draft: Draft) -> Iterable[KeyAccount]:
    """Yield the rows of settings that only a launcher has, not the JSON."""
    for setting in (*of_section(draft.settings, "launch"), *of_section(draft.settings, "groups")):
        key, value = setting.path[-1], setting.value
        if key == "num_processes":
            yield account_of(setting, "carried", f"--nproc_per_node {draft.ranks.per_node or 'N'}")
        elif key in _OF_LAUNCHERS:
            yield account_of(setting, "default", why="an option of the launcher")
        else:
            is_off = value in (None, False, 1, "no", "NO", "all", "default")
            yield account_of(setting, "default" if is_off else "no counterpart", why=_LAUNCHER)
