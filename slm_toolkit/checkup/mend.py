"""What a strategy's files, and the flags, are after the edits of findings."""

import dataclasses
import json
import os
from pathlib import Path

import yaml

from slm_toolkit.checkup.case import Case, Files, with_json
from slm_toolkit.checkup.splice import with_edits
from slm_toolkit.finding import Edit, Finding
from slm_toolkit.user_files import YAML_LOADER


def edits_of(found: list[Finding]) -> list[Edit]:
    """Of all findings, the gravest's first; none of a key, or of one below it, that was edited before."""
    chosen: list[Edit] = []
    for finding in found:
        if not any(_touch(edit, done) for edit in finding.edits for done in chosen):
            chosen += finding.edits
    return chosen


def _touch(one: Edit, other: Edit) -> bool:
    shorter = min(len(one.keys), len(other.keys))
    return one.file == other.file and one.keys[:shorter] == other.keys[:shorter] and one != other


def mended(case: Case, edits: list[Edit]) -> Case:
    """The case after `edits`; nothing is written."""
    flags = {edit.keys[0]: edit.value for edit in edits if edit.file == "flags"}
    return dataclasses.replace(
        case,
        files=_mended_files(case.files, edits),
        flags=dataclasses.replace(case.flags, **flags) if flags else case.flags,
    )


def _mended_files(files: Files, edits: list[Edit]) -> Files:
    of = {file: [edit for edit in edits if edit.file == file] for file in ("yaml", "json")}
    duplicates = tuple(double for double in files.duplicates if not of[double[0]])
    if of["yaml"] and files.yaml_text:
        is_json = files.yaml_path.suffix == ".json"  # accelerate reads such, too
        text = with_edits(files.yaml_text, of["yaml"], is_json=is_json)
        config = yaml.load(text, YAML_LOADER)
        files = dataclasses.replace(files, yaml_text=text, config=config, duplicates=duplicates)
        if files.json_path is None:  # perhaps it is named, or read, only now
            files = with_json(dataclasses.replace(files, json_problem=None))
    if of["json"] and files.json_text:
        text = with_edits(files.json_text, of["json"], is_json=True)
        content = json.loads(text)
        files = dataclasses.replace(files, json_text=text, deepspeed=content, duplicates=duplicates)
    return files


@dataclasses.dataclass(frozen=True)
class Written:
    """A file that `write_mended` wrote."""

    path: Path
    of: Path
    "the file it is a corrected copy of"


def write_mended(before: Files, after: Files, folder: Path, *, overwrite: bool) -> list[Written]:
    """Write the corrected YAML, and the JSON that it then names, into `folder`.

    Raises ValueError for files that are there, but with `overwrite`, and for a folder that can't be written.
    """
    written, texts = [], {}
    json_path = folder / after.json_path.name if after.json_path is not None else None
    if before.yaml_text:
        text, named = after.yaml_text, ("deepspeed_config", "deepspeed_config_file")
        if json_path is not None and json_path.resolve() != after.json_path.resolve():
            is_json = before.yaml_path.suffix == ".json"
            text = with_edits(text, [Edit("yaml", named, _as_named(json_path))], is_json=is_json)
        texts[folder / before.yaml_path.name] = (text, before.yaml_path)
    if json_path is not None and after.json_text:
        texts[json_path] = (after.json_text, after.json_path)
    there = [path for path in texts if path.exists()]
    if there and not overwrite:
        raise ValueError(f"{there[0]} exists\nhint: another folder after --fix, or --overwrite to replace it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (text, source) in texts.items():
            path.write_text(text)
            written.append(Written(path, source))
    except OSError as error:
        raise ValueError(f"can't write to {folder}: {error.strerror}\nhint: give --fix a folder") from None
    return written


def _as_named(path: Path) -> str:
    """From the working folder, as accelerate looks for it, where it lies below."""
    path = path.resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
