"""What a conversion ends in, and what all its writers share: the account and the DeepSpeed JSON."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.conversion.counterparts import ZERO
from slm_toolkit.conversion.settings import Draft, Row, Setting, nested, of_section, ranks_per_node
from slm_toolkit.user_files import json_of, read_text

_WORSE = ("added", "ignored", "stays", "default", "carried", "nearest", "no counterpart")
"of two fates of one key the later one counts"


@dataclass(frozen=True)
class Written:
    """The result."""

    files: dict[str, str]
    "name: text"
    command: list[str]
    "what to launch, with the files"
    rows: list[Row]


def placed(setting: Setting, key: str, value: Any, *, why: str = "") -> Row:
    """The row of a setting that is in the result under `key`."""
    to = f"{key}: {json.dumps(value)}" if not isinstance(value, str) else f"{key}: {value}"
    fate = setting.fate if setting.source else "added"
    return Row(setting.source, setting.said, fate, (to,), why or setting.why)


def account(rows: Iterable[Row]) -> list[Row]:
    """One row for each key of the source, and one for all that was added for the same reason."""
    merged: dict[tuple[str, ...], Row] = {}
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


def deepspeed_json(draft: Draft, *, for_our_script: bool) -> tuple[dict[str, Any], list[Row]]:
    """The DeepSpeed JSON, and a row for each of its keys.

    An hpZ of size "auto" is a word that slm_toolkit.train alone understands: others get the ranks of a node.
    """
    leaves, rows = [], []
    for setting in of_section(draft.settings, "deepspeed"):
        key, value, why = ".".join(setting.path), setting.value, ""
        if key == f"{ZERO}zero_hpz_partition_size" and value == "auto" and not for_our_script:
            value = ranks_per_node(draft.ranks, f"{key} auto")
            why = "the ranks of a node; auto is a word of slm_toolkit.train only"
        leaves.append((setting.path, value))
        rows.append(placed(setting, key, value, why=why))
    return nested(leaves), rows


def is_unchanged(draft: Draft, config: dict[str, Any]) -> bool:
    """Whether the JSON is what is in the file that it was read from."""
    if draft.json_path is None or draft.json_path.suffix != ".json":  # YAML can hold the same settings
        return False
    hint = "compare with ds_configs/zero2.json"
    return json_of(read_text(draft.json_path, hint=hint), draft.json_path, hint=hint) == config


def unchanged_json(draft: Draft, to: str) -> Row:
    """The row of a file that serves as it is."""
    num_keys = len(of_section(draft.settings, "deepspeed"))
    why = "the file serves as it is, with all its keys"
    return Row(draft.json_key or draft.json_path.name, f"{num_keys} keys", "carried", (to,), why)


def shown(path: Path) -> str:
    """A path as seen from the working folder, absolute where it lies outside."""
    relative = os.path.relpath(path)
    return os.path.realpath(path) if relative.startswith("..") else relative


def in_folder(folder: Path | None, name: str) -> str:
    """How a file of the result is named by another."""
    return name if folder is None else str(folder / name)
