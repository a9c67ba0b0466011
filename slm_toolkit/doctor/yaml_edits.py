"""Edit the lines of a YAML text, keeping comments, order and the spelling of values."""

from typing import Any

import yaml

from slm_toolkit.doctor.finding import KEEP_LAST, REMOVE, Edit, with_value


def edited_yaml(text: str, edits: list[Edit]) -> str:
    """Return the text after `edits`. Raises YAMLError if the whole text is a {flow: mapping}."""
    for edit in edits:
        text = _edited(text, edit.keys, edit.value)
    return text


def _edited(text: str, keys: tuple[str, ...], value: Any) -> str:
    mapping, depth = yaml.compose(text, Loader=yaml.SafeLoader), 0
    while len(keys) > depth + 1:
        section = next((below for key, below in reversed(mapping.value) if key.value == keys[depth]), None)
        if not isinstance(section, yaml.MappingNode):
            break
        mapping, depth = section, depth + 1
    *above, name = keys[: depth + 1]
    if mapping.flow_style and not above:
        raise yaml.YAMLError("its lines can't be kept")
    if mapping.flow_style:
        old = yaml.safe_load(text[mapping.start_mark.index : mapping.end_mark.index])
        return _edited(text, tuple(above), with_value(old, keys[depth:], value))
    lines = text.splitlines(keepends=True)
    entries = [entry for entry in mapping.value if entry[0].value == name]
    if value in (REMOVE, KEEP_LAST):
        removed = entries[:-1] if value is KEEP_LAST else entries if len(keys) == depth + 1 else []
        if len(removed) == len(mapping.value):
            return _edited(text, tuple(above), {}) if above else "{}"
        for key, old in reversed(removed):
            del lines[key.start_mark.line : _last_line(old) + 1]
        return "".join(lines)
    for key_below in reversed(keys[depth + 1 :]):
        value = {key_below: value}
    if not entries:
        new = yaml.safe_dump({name: value}, sort_keys=False).splitlines(keepends=True)
        place = _last_line(mapping) + 1
        lines[place:place] = [" " * mapping.start_mark.column + line for line in new]
        return "".join(lines)
    key, old = entries[-1]
    line, start, end = key.end_mark.line, key.end_mark.column + 1, key.end_mark.column + 1
    if old.start_mark.line == line:
        end = old.end_mark.column
    del lines[line + 1 : _last_line(old) + 1]
    flow = yaml.safe_dump([value], sort_keys=False, default_flow_style=True, width=2**16)[1:-2]
    lines[line] = f"{lines[line][:start]} {flow}{lines[line][end:]}"
    return "".join(lines)


def _last_line(node: yaml.Node) -> int:
    """Return the number of the node's last line, without the comments below it."""
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.line
