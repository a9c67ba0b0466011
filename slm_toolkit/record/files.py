"""Write records to disk completely or not at all, read every version of them, and print their JSON schema."""

import dataclasses
import json
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from slm_toolkit.base.errors import without_controls
from slm_toolkit.base.safe_files import write_new
from slm_toolkit.base.typed_files import PositiveInt, converted, field_problem, typed_dict_of
from slm_toolkit.base.user_files import check_values, exists, is_dir, read_bytes
from slm_toolkit.config.run_config import FLAGS, RunConfig, in_todays_names
from slm_toolkit.record.run_record import RECORD_FILE, SHAPES, RunRecord
from slm_toolkit.record.saved_files import delete, sync
from slm_toolkit.strategy.settings import DeepSpeedSettings
from slm_toolkit.strategy.strategy import check_sections

LIMIT_BYTES = 2**28
"size limit of a record; 100,000 steps on 64 ranks take half of it"
_HINT = f"records are runs/*/{RECORD_FILE}"
_SCHEMA_HINT = "`slm report --schema` prints each field's type; did another tool or a newer version write it?"


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write `folder`/record.json completely or not at all: sync a temporary file to disk, then rename it."""
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
    """Read a record of this version or an older one. Raises ValueError for any other file."""
    data = read_bytes(path, what="record", hint=_HINT, limit_bytes=LIMIT_BYTES)
    try:
        record = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {field_problem(error)}\nhint: {_SCHEMA_HINT}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"can't read record {path}: {error}\nhint: {_HINT}") from None
    if not record.is_of_script:
        record.asked["config"] = in_todays_names(record.asked["config"])
    if problem := _problem(record):
        raise ValueError(f"{path}: {problem}\nhint: {_SCHEMA_HINT}")
    if not data.isascii() or b"\\" in data or b"\x7f" in data:  # its text may have control characters
        record = dataclasses.replace(record, **_without_controls(vars(record)))
    record.asked.setdefault("files", {})
    record.asked.setdefault("num_processes", record.world_size or 1)
    if not record.is_of_script:
        asked = record.asked["config"]
        if asked.pop("parity_task", False):  # of older versions, with fp32_steps
            asked["parity"] = asked.get("max_steps")
        asked.pop("fp32_steps", None)
        for name in ("max_grad_norm", "gradient_accumulation_steps", "dataset"):  # older versions lack these
            asked.setdefault(name, getattr(RunConfig, name))
    return record


def find_records(paths: list[Path]) -> tuple[list[tuple[Path, RunRecord]], list[str]]:
    """Read all records in `paths` (files, and folders at any depth), in order of name.

    Returns the records with their paths, and the error messages of unreadable records.
    """
    files: list[Path] = []
    for path in paths:
        if not exists(path):
            raise ValueError(f"no such folder: {path}\nhint: `slm compare` writes records under runs/")
        files += _record_files(path) if is_dir(path) else [path]
    if len(paths) > 1:  # two paths may lead to the same record
        files = list({os.path.realpath(file): file for file in files}.values())
    records, problems = [], []
    for file in files:
        try:
            records.append((file, read_record(file)))
        except ValueError as error:
            problems.append(str(error))
    return records, problems


def _record_files(folder: Path) -> list[Path]:
    """List the records below a folder by name; skips links to folders and folders that can't be opened."""
    files = [Path(at, RECORD_FILE) for at, _, names in os.walk(folder) if RECORD_FILE in names]
    return sorted(files)


def _problem(record: RunRecord) -> str | None:
    """Return the first problem that RunRecord's types can't express: wrong flags, no world size."""
    asked = record.asked
    try:
        converted(asked["config"], _asked_flags(all_required=not record.is_of_script), prefix="asked.config")
        for name in ("accelerate_config", "deepspeed_config"):
            check_values(asked.get(name), f"invalid field: asked.{name}", hint="")
        check_sections(asked.get("accelerate_config") or {}, Path("invalid field: asked.accelerate_config"))
        converted(asked.get("deepspeed_config") or {}, DeepSpeedSettings, prefix="asked.deepspeed_config")
    except ValueError as error:
        return str(error).partition("\n")[0]
    if not record.is_of_script and (missing := [name for name in SHAPES if name not in record.model]):
        return f"missing field: model.{missing[0]}"
    zero = (asked.get("deepspeed_config") or {}).get("zero_optimization") or {}
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        return f"invalid field: asked.deepspeed_config: zero_optimization.stage is {zero['stage']!r}"
    if record.status == "ok" and record.world_size is None:
        return "invalid field: world_size (null, though the status is ok)"
    return None


@cache
def _asked_flags(*, all_required: bool) -> Any:
    """Make a TypedDict of the RunConfig's fields; most may be missing: older versions had fewer flags."""
    types: dict[str, Any] = {
        name: Literal[(*flag.choices, *flag.synonyms, getattr(RunConfig, name))]
        for name, flag in FLAGS.items()
        if flag.choices is not None
    }
    for name in ("gradient_checkpointing", "profile"):  # switches in older versions
        types[name] |= bool
    sizes = ("seq_len", "per_device_train_batch_size", "gradient_accumulation_steps")
    required = ("seq_len", "numerics", "gradient_checkpointing", "per_device_train_batch_size")
    required = required if all_required else ("numerics",)
    return typed_dict_of(RunConfig, required=required, **types, **dict.fromkeys(sizes, PositiveInt))


def _without_controls(value: Any) -> Any:
    """Return the value with control characters and invisible characters escaped in every text."""
    if isinstance(value, str):
        return without_controls(value)
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(item) for key, item in value.items()}
    return [_without_controls(item) for item in value] if isinstance(value, list) else value


_DECODER = msgspec.json.Decoder(RunRecord)


def schema() -> dict[str, Any]:
    """Return the record's JSON Schema, draft 2020-12. It allows unknown names: later versions add some."""
    return msgspec.json.schema(RunRecord)
