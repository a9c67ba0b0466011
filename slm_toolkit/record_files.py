"""Records on disk: written whole or not at all, read in any version, found in folders."""

import dataclasses
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, get_origin

import orjson

from slm_toolkit.record import RECORD_FILE, SCHEMA_VERSION, STATUSES, RunRecord


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write `folder`/record.json whole or not at all: beside, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD_FILE
    beside = folder / f".{RECORD_FILE}.{socket.gethostname()}.{os.getpid()}"
    beside.write_text(json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n")
    beside.replace(path)
    return path


def read_record(path: Path) -> RunRecord:
    """Read one record, of this version or an older one. Raises ValueError for all else."""
    try:
        with open(path, "rb") as file:  # a third faster than Path.read_bytes
            content = orjson.loads(file.read())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(
            f"can't read record {path}: {error}\nhint: records are runs/*/{RECORD_FILE}"
        ) from None
    content = _in_this_version(content, path)
    if not content.keys() >= _REQUIRED:
        missing = _REQUIRED - content.keys()
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}\nhint: was it written by another tool?")
    if not content.keys() <= _KNOWN:
        content = {key: value for key, value in content.items() if key in _KNOWN}
    if wrong := _ill_typed(content):
        raise ValueError(
            f"{path} holds no proper {', '.join(wrong)}\nhint: `slm report --schema` says what is"
        )
    return RunRecord(**content)


def _ill_typed(content: dict[str, Any]) -> list[str]:
    """Fields that a report would break on; the schema itself would take as long as the whole report."""
    wrong = [name for name, kind in _KINDS if name in content and type(content[name]) is not kind]
    if content["status"] not in STATUSES:
        wrong.append("status")
    if not wrong and type(content["asked"].get("config")) is not dict:
        wrong.append("asked.config")
    if not wrong and type(content["model"].get("num_params")) is not int:
        wrong.append("model.num_params")
    return wrong


def _in_this_version(content: Any, path: Path) -> dict[str, Any]:
    """What an older version wrote, in today's words; fields that came later have their defaults."""
    version = content.get("schema_version", 0) if isinstance(content, dict) else None
    if type(version) is not int or version < 0:
        raise ValueError(f"{path} is no record\nhint: records are runs/*/{RECORD_FILE}")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} is a record of version {version}, newer than {SCHEMA_VERSION}, the newest known here\n"
            "hint: install the slm_toolkit that wrote it, or a newer one"
        )
    content["schema_version"] = SCHEMA_VERSION
    return content


def find_records(paths: list[Path]) -> tuple[list[tuple[Path, RunRecord]], list[str]]:
    """All records in folders (at any depth) and files, in order of name; and what is wrong with others."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such folder: {path}\nhint: `slm compare` writes records under runs/")
        files += _record_files(path) if path.is_dir() else [path]
    if len(paths) > 1:  # a record that two of them reach was launched once
        files = list({file.resolve(): file for file in files}.values())
    records, problems = [], []
    for file in files:
        try:
            records.append((file, read_record(file)))
        except ValueError as error:
            problems.append(str(error))
    return records, problems


def _record_files(folder: Path) -> list[Path]:
    """At any depth, links to folders not followed; `Path.rglob` takes ten times as long, os.walk twice."""
    found, folders = [], [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # of others: not ours to report
            for entry in entries:
                if entry.name == RECORD_FILE:
                    found.append(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return [Path(name) for name in sorted(found, key=lambda name: name.split(os.sep))]


_KNOWN = frozenset(f.name for f in dataclasses.fields(RunRecord))
_REQUIRED = frozenset(
    f.name for f in dataclasses.fields(RunRecord) if f.default is f.default_factory is dataclasses.MISSING
)
_KINDS = [
    (f.name, kind)
    for f in dataclasses.fields(RunRecord)
    if (kind := get_origin(f.type) or f.type) in (str, list, dict)
]
"of the fields that are never null"
