"""What a strategy's files, and the flags, are after the edits of findings; comments and order stay.

A JSON is read as the flow style of YAML that it is. A text that can't be edited so is written anew.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import YAML_LOADER
from slm_toolkit.doctor.case import Case, Files, with_json
from slm_toolkit.doctor.finding import KEEP_LAST, REMOVE, Edit, Finding


def with_edits(text: str, edits: list[Edit], *, is_json: bool) -> str:
    """The text after `edits`, of which each holds for the result of those before."""
    for edit in edits:
        wanted = _changed(_parsed(text, is_json), edit.keys, edit.value)
        try:
            new = _spliced(text, edit, is_json=is_json)
            is_right = _parsed(new, is_json) == wanted
        except (_NotInPlace, yaml.YAMLError, json.JSONDecodeError):
            is_right = False
        text = new if is_right else _written(wanted, is_json)
    return text


class _NotInPlace(Exception):
    """The text's layout is none that we edit."""


def _parsed(text: str, is_json: bool) -> Any:
    return json.loads(text) if is_json else yaml.load(text, YAML_LOADER)


def _written(value: Any, is_json: bool) -> str:
    return json.dumps(value, indent=2) + "\n" if is_json else yaml.safe_dump(value, sort_keys=False)


def _changed(value: Any, keys: tuple[str, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `keys`; mappings on the way are made where there are none."""
    mapping = dict(value) if isinstance(value, dict) else {}
    if len(keys) > 1:
        if new not in (REMOVE, KEEP_LAST) or isinstance(mapping.get(keys[0]), dict):
            mapping[keys[0]] = _changed(mapping.get(keys[0]), keys[1:], new)
    elif new is REMOVE:
        mapping.pop(keys[0], None)
    elif new is not KEEP_LAST:
        mapping[keys[0]] = new
    return mapping


def _spliced(text: str, edit: Edit, *, is_json: bool) -> str:
    mapping, keys = yaml.compose(text), list(edit.keys)
    while len(keys) > 1:
        below = _find(mapping, keys[0])
        if not isinstance(below, yaml.MappingNode):
            break
        mapping = below
        keys.pop(0)
    places = [place for place, (key, _) in enumerate(mapping.value) if key.value == keys[0]]
    if edit.value is KEEP_LAST:
        for place in reversed(places[:-1]):
            text = _without(text, mapping, place)
        return text
    if edit.value is REMOVE:
        for place in reversed(places if len(keys) == 1 else []):
            text = _without(text, mapping, place)
        return text
    value = edit.value
    for key in reversed(keys[1:]):
        value = {key: value}
    if places:
        _, old = mapping.value[places[-1]]
        return text[: old.start_mark.index] + _inline(value, mapping, is_json) + text[_end(old, text) :]
    return _inserted(text, mapping, keys[0], value, is_json)


def _find(mapping: yaml.Node, key: str) -> yaml.Node | None:
    return next((value for name, value in reversed(mapping.value) if name.value == key), None)


def _without(text: str, mapping: yaml.MappingNode, place: int) -> str:
    """Without the entry at `place`, and its line where it has one of its own."""
    key, value = mapping.value[place]
    if not mapping.flow_style:
        return text[: _line_start(text, key.start_mark.index)] + text[_line_end(text, _end(value, text)) :]
    if place + 1 < len(mapping.value):
        return text[: key.start_mark.index] + text[mapping.value[place + 1][0].start_mark.index :]
    before = mapping.value[place - 1][1].end_mark.index if place else mapping.start_mark.index + 1
    after = value.end_mark.index if place else mapping.end_mark.index - 1
    return text[:before] + text[after:]


def _inserted(text: str, mapping: yaml.MappingNode, key: str, value: Any, is_json: bool) -> str:
    """With an entry more, after the last."""
    if not mapping.value:
        raise _NotInPlace
    first, last = mapping.value[0][0], mapping.value[-1][1]
    indent = " " * first.start_mark.column
    if mapping.flow_style:
        is_one_line = mapping.start_mark.line == mapping.end_mark.line
        between = ", " if is_one_line else f",\n{indent}"
        entry = f"{json.dumps(key) if is_json else key}: {_inline(value, mapping, is_json)}"
        return text[: last.end_mark.index] + between + entry + text[last.end_mark.index :]
    at = _line_end(text, _end(last, text))
    entry = yaml.safe_dump({key: value}, sort_keys=False).rstrip("\n")
    lines = "".join(f"{indent}{line}\n" for line in entry.splitlines())
    return text[:at] + ("" if text[:at].endswith("\n") else "\n") + lines + text[at:]


def _inline(value: Any, mapping: yaml.MappingNode, is_json: bool) -> str:
    """A value as it stands after its key."""
    if is_json:
        indent = " " * mapping.value[0][0].start_mark.column if mapping.value else ""
        return json.dumps(value, indent=2).replace("\n", f"\n{indent}")
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).strip()
    return yaml.safe_dump(value).strip().removesuffix("...").strip()


def _end(node: yaml.Node, text: str) -> int:
    """Where a value ends; a block mapping's own mark lies behind the comments that follow it."""
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last, text)
    return node.end_mark.index


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


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
