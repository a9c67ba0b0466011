"""Edit a YAML text with ruamel.yaml's nodes, keeping comments, order and the spelling of values."""

import io

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node
from ruamel.yaml.tokens import CommentToken

from slm_toolkit.doctor.finding import KEEP_LAST, REMOVE, Edit


def edited_yaml(text: str, edits: list[Edit]) -> str:
    """Return the text after `edits`. Raises YAMLError if ruamel.yaml can't parse the text."""
    editor = YAML()
    editor.width = 2**16  # never wrap a line
    editor.explicit_start = text.startswith("---")
    root = editor.compose(text)
    for _, section in root.value:  # ruamel.yaml uses one indentation for all mappings, one for all lists
        if _is_block(section):
            column = section.start_mark.column
            is_mapping = isinstance(section, MappingNode)
            editor.indent(**{"mapping": column} if is_mapping else {"sequence": column + 2, "offset": column})
    for edit in edits:
        _apply(editor, root, edit)
    edited = io.StringIO()
    editor.serialize(root, edited)
    return edited.getvalue()


def _is_block(node: Node) -> bool:
    """Return True for a mapping or list that is written with one entry per line."""
    return isinstance(node, CollectionNode) and bool(node.value) and not node.flow_style


def _apply(editor: YAML, root: MappingNode, edit: Edit) -> None:
    mapping, keys = root, list(edit.keys)
    while len(keys) > 1:
        section = next((value for key, value in reversed(mapping.value) if key.value == keys[0]), None)
        if not isinstance(section, MappingNode):
            break
        mapping, keys = section, keys[1:]
    places = [place for place, (key, _) in enumerate(mapping.value) if key.value == keys[0]]
    if edit.value is KEEP_LAST:
        _remove(mapping, places[:-1])
    elif edit.value is REMOVE:
        _remove(mapping, places if len(keys) == 1 else [])
    else:
        value = edit.value
        for key in reversed(keys[1:]):
            value = {key: value}
        # accelerate reads with PyYAML, so PyYAML decides which strings need quotes
        (entry,) = editor.compose(yaml.safe_dump({keys[0]: value}, sort_keys=False)).value
        _put(mapping, places[-1:], entry)


def _put(mapping: MappingNode, place: list[int], entry: tuple[Node, Node]) -> None:
    """Put the entry at `place`; if `place` is empty, append it to the mapping."""
    old, new = mapping.value[place[0]][1] if place else mapping, entry[1]
    if place and not _is_block(old) and not _is_block(new):
        new.comment = old.comment
    else:
        _move_lines_below(_last_leaf(old), _last_leaf(new))
    at = place[0] if place else len(mapping.value)
    mapping.value[at : at + 1] = [entry]


def _remove(mapping: MappingNode, places: list[int]) -> None:
    for place in reversed(places):
        _, old = mapping.value.pop(place)
        mapping.flow_style = mapping.flow_style or not mapping.value  # written as {}
        _move_lines_below(_last_leaf(old), _last_leaf(mapping.value[place - 1][1]) if place else mapping)


def _last_leaf(node: Node) -> Node:
    """Return the node on the last line: `node` itself, or the last leaf of a block."""
    while _is_block(node):
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _move_lines_below(source: Node, target: Node) -> None:
    """Move the comment lines below `source` to below `target`.

    ruamel.yaml keeps them in the same token as the comment at the end of the source's line.
    """
    token = source.comment[0] if source.comment else None
    at_end, _, below = token.value.partition("\n") if token else ("", "", "")
    if not below:
        return
    if at_end:
        token.value = f"{at_end}\n"
    else:
        source.comment = None
    if not target.comment:
        target.comment = [CommentToken(f"\n{below}", token.start_mark), None]
    elif target.comment[0]:
        target.comment[0].value += below
    else:
        target.comment[1].append(CommentToken(below, token.start_mark))
