"""Edits of a YAML's or JSON's text in place: comments, order and what is not meant stay as they were.

A JSON is read as the flow style of YAML that it is. A text that can't be edited so is written anew.
"""

import json
from typing import Any

import yaml

from slm_toolkit.finding import KEEP_LAST, REMOVE, Edit
from slm_toolkit.user_files import YAML_LOADER


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
