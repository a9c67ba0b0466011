"""Records on disk: written whole or not at all, read in any version, found in folders."""

import dataclasses
import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from slm_toolkit.base.errors import without_controls
from slm_toolkit.base.safe_files import write_new
from slm_toolkit.base.user_files import MOST_LEVELS, exists, is_dir, read_bytes
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.check import is_deep, may_be_deep, wrong_fields
from slm_toolkit.record.run_record import RECORD_FILE, SCHEMA_VERSION, RunRecord
from slm_toolkit.record.saved_files import delete, sync

LIMIT_BYTES = 2**28
"of a record: a hundred thousand steps on 64 ranks take half of it"
_HINT = f"records are runs/*/{RECORD_FILE}"


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write `folder`/record.json whole or not at all: to another file, renamed once it is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD_FILE
    unfinished = folder / f".{RECORD_FILE}.{socket.gethostname()}.{os.getpid()}"
    try:
        write_new(unfinished, json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n")
        sync(unfinished)
        unfinished.replace(path)
    except OSError:
        delete(unfinished)
        raise
    sync(folder)
    return path


def read_record(path: Path) -> RunRecord:
    """Read one record, of this version or an older one. Raises ValueError for all else."""
    data = read_bytes(path, what="record", hint=_HINT, limit_bytes=LIMIT_BYTES)
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"can't read record {path}: {error}\nhint: {_HINT}") from None
    controls = _may_control(data)  # are spelt out in all of it
    if data.count(b"{") + data.count(b"[") > MOST_LEVELS and is_deep(
        content if controls else may_be_deep(content)
    ):
        raise ValueError(f"{path} has objects inside one another that no record has\nhint: {_HINT}")
    if controls:
        content = _without_controls(content)
    content = _in_this_version(content, path)
    if not content.keys() >= _REQUIRED:
        missing = _REQUIRED - content.keys()
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}\nhint: was it written by another tool?")
    if not content.keys() <= _KNOWN:
        content = {key: value for key, value in content.items() if key in _KNOWN}
    if wrong := wrong_fields(content):
        raise ValueError(
            f"{path} holds no proper {', '.join(wrong[:10])}\nhint: `slm report --schema` says what is"
        )
    record = RunRecord(**content)
    record.asked.setdefault("files", {})
    record.asked.setdefault("num_processes", record.world_size or 1)
    for name, default in _ASKED_LATER.items():
        record.asked["config"].setdefault(name, default)
    return record


def _in_this_version(content: Any, path: Path) -> dict[str, Any]:
    """What an older version wrote, in today's words; fields that came later have their defaults."""
    version = content.get("schema_version", 0) if isinstance(content, dict) else None
    if type(version) is not int or version < 0:
        raise ValueError(f"{path} is no record\nhint: {_HINT}")
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
        if not exists(path):
            raise ValueError(f"no such folder: {path}\nhint: `slm compare` writes records under runs/")
        files += _record_files(path) if is_dir(path) else [path]
    if len(paths) > 1:  # a record that two of them reach was launched once
        files = list({os.path.realpath(file): file for file in files}.values())
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


def _may_control(data: bytes) -> bool:
    """Whether some text may hold what a terminal obeys or nobody sees: JSON has nearly all of it as escapes,
    and a record with other letters is looked at, too."""
    return not data.isascii() or _ESCAPE.search(data) is not None


def _without_controls(value: Any) -> Any:
    """The same, with such characters spelt out: a log's colours, and what somebody hid in a name."""
    if isinstance(value, str):
        return without_controls(value)
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(each) for key, each in value.items()}
    return [_without_controls(each) for each in value] if isinstance(value, list) else value


_ESCAPE = re.compile(rb"\\[ubfr]|\x7f")
_ASKED_LATER = {
    name: getattr(RunConfig, name) for name in ("max_grad_norm", "gradient_accumulation_steps", "dataset")
}
"flags that are read without asking whether they are there"
_KNOWN = frozenset(f.name for f in dataclasses.fields(RunRecord))
_REQUIRED = frozenset(
    f.name for f in dataclasses.fields(RunRecord) if f.default is f.default_factory is dataclasses.MISSING
)
