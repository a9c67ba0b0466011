"""Apply the edits of findings to a strategy's files."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.safe_files import write_beside
from slm_toolkit.base.user_files import YAML_LOADER
from slm_toolkit.doctor.case import Case, Files, with_json
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding, as_yaml, with_value


def with_edits(text: str, edits: list[Edit], *, is_json: bool) -> str:
    """Return the text after `edits`, in their order. A YAML whose layout can't be kept is rewritten whole."""
    if is_json:
        return _edited_json(text, edits)
    content, edited = _changed(yaml.load(text, YAML_LOADER), edits), text
    try:
        for edit in edits:
            edited = _edited_yaml(edited, edit)
        is_right = yaml.load(edited, YAML_LOADER) == content
    except yaml.YAMLError:
        is_right = False
    return edited if is_right else yaml.safe_dump(content, sort_keys=False)


def _edited_yaml(text: str, edit: Edit) -> str:
    """Return the text after one edit; all other lines and comments stay."""
    section, keys, above = yaml.compose(text, yaml.SafeLoader), edit.keys, []
    while True:
        entries = [(key, value) for key, value in section.value if key.value == keys[0]]
        if len(keys) == 1 or not entries or not isinstance(entries[-1][1], yaml.MappingNode):
            break
        section, keys, above = entries[-1][1], keys[1:], entries
    value = edit.value
    for key in reversed(keys[1:]):
        value = {key: value}
    if entries and edit.value is not REMOVE:
        key, old = entries[-1]
        return f"{text[: key.end_mark.index]}: {as_yaml(value)}{text[_end(old) :]}"
    if section.flow_style:
        raise yaml.YAMLError(f"{edit.key} is not on a line of its own")
    lines = text.split("\n")
    if edit.value is not REMOVE:
        indent = " " * section.value[0][0].start_mark.column
        lines.insert(_line(text, _end(section)) + 1, f"{indent}{keys[0]}: {as_yaml(value)}")
    elif len(keys) == 1:
        for key, old in reversed(above if len(entries) == len(section.value) else entries):
            del lines[_line(text, key.start_mark.index) : _line(text, _end(old)) + 1]
    return "\n".join(lines)


def _line(text: str, index: int) -> int:
    """Return the number of the line, from 0, of a place in the text."""
    return text.count("\n", 0, index)


def _end(node: yaml.Node) -> int:
    """Return where a node's text ends, before the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.index


def _edited_json(text: str, edits: list[Edit]) -> str:
    """Return the JSON after `edits`, with the same key order, indentation and spelling of numbers (5e8)."""
    content = _changed(json.loads(text, parse_float=lambda number: f"\0{number}"), edits)
    indent = re.search(r'\n([ \t]+)"', text)
    edited = json.dumps(content, indent=indent and indent[1], ensure_ascii=False)
    return re.sub(r'"\\u0000([-+.\deE]+)"', r"\1", edited) + text[len(text.rstrip()) :]


def _changed(content: Any, edits: list[Edit]) -> Any:
    for edit in edits:
        content = with_value(content, edit.keys, edit.value)
    return content


def edits_of(findings: list[Finding]) -> list[Edit]:
    """Return the edits of all findings in order; skip a finding that changes a key of an earlier edit."""
    chosen: list[Edit] = []
    for finding in findings:
        if not any(_touch(edit, done) for edit in finding.edits for done in chosen):
            chosen += finding.edits
    return chosen


def _touch(edit: Edit, other: Edit) -> bool:
    shorter = min(len(edit.keys), len(other.keys))
    return edit.file == other.file and edit.keys[:shorter] == other.keys[:shorter] and edit != other


def mended(case: Case, edits: list[Edit]) -> Case:
    """Return the case after `edits`; no file is written."""
    files = case.files
    of_yaml, of_json = ([edit for edit in edits if edit.file == file] for file in ("yaml", "json"))
    if of_yaml and files.yaml_text:
        is_json = files.yaml_path.suffix == ".json"  # accelerate also reads its config from JSON
        text = with_edits(files.yaml_text, of_yaml, is_json=is_json)
        files = dataclasses.replace(files, yaml_text=text, config=_changed(files.config, of_yaml))
        if files.json_path is None:  # the corrected YAML may name a JSON that can be read
            files = with_json(files)
    if of_json and files.json_text:
        text = with_edits(files.json_text, of_json, is_json=True)
        files = dataclasses.replace(files, json_text=text, deepspeed=json.loads(text))
    return dataclasses.replace(case, files=files)


def write_mended(before: Files, after: Files, folder: Path, *, overwrite: bool) -> dict[Path, Path]:
    """Write the corrected YAML, and the JSON that it then names, into `folder`; return each with its source.

    Raises ValueError if a file exists and `overwrite` is False, or if the folder can't be written.
    """
    texts, sources = {}, {}
    json_path = folder / after.json_path.name if after.json_path is not None else None
    if before.yaml_text:
        text, named = after.yaml_text, ("deepspeed_config", "deepspeed_config_file")
        if json_path is not None and json_path.resolve() != after.json_path.resolve():
            is_json = before.yaml_path.suffix == ".json"
            text = with_edits(text, [Edit("yaml", named, _as_named(json_path))], is_json=is_json)
        texts[folder / before.yaml_path.name] = text
        sources[folder / before.yaml_path.name] = before.yaml_path
    if json_path is not None and after.json_text:
        texts[json_path], sources[json_path] = after.json_text, after.json_path
    return {path: sources[path] for path in write_beside(texts, flag="--fix", overwrite=overwrite)}


def _as_named(path: Path) -> str:
    """Return the path relative to the working folder if it is below it (accelerate searches there)."""
    path = path.resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
