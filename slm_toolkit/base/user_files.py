"""Files that a user names, read whole: none that is waited for or huge, settings in plain values alone."""

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

SETTINGS_BYTES = 2**17
"of a YAML or JSON of settings, of prices, of a model's config.json: those that people write have a few KB"
MOST_VALUES = 10_000
"in one such file, those that YAML's aliases and merges repeat counted each time"
MOST_LEVELS = 40
"of mappings and lists inside one another; DeepSpeed's JSON has four"
_LARGEST_BITS = 1023  # of a whole number that a float can hold
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast, where it is there


def typed_path(text: str) -> Path:
    """A path as a shell would read it; `Path.expanduser` raises RuntimeError for a user who is not there."""
    return Path(os.path.expanduser(text))


def is_file(path: Path) -> bool:
    """False, too, for what no file can be called: `Path.is_file` raises OSError for a name too long."""
    return os.path.isfile(path)


def is_dir(path: Path) -> bool:
    return os.path.isdir(path)


def exists(path: Path) -> bool:
    return os.path.exists(path)


def check_name(name: str, what: str) -> str:
    """`name` itself. Raises ValueError for one that a table, a script or a terminal would trip over."""
    if not name.isprintable():
        raise ValueError(f"{what} {name!r} has characters that can't be shown\nhint: give it another name")
    return name


def read_bytes(path: Path | str, *, what: str, hint: str, limit_bytes: int = SETTINGS_BYTES) -> bytes:
    """The bytes of a regular file; a pipe without a writer, a device or a folder is refused, not waited for.

    `what`: what can't be read, as "record" of "can't read record runs/x/record.json: ...".
    Raises ValueError, too, for a file of more than `limit_bytes`, of which no more is read.
    """
    name = f"can't read {what} {path}" if what else f"can't read {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ValueError(f"{name}: {error}\nhint: {hint}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = "folder" if stat.S_ISDIR(found.st_mode) else "pipe, a socket or a device"
            raise ValueError(f"{name}: it is a {kind}, no file\nhint: {hint}")
        chunks, size = [], 0
        at_once = min(max(found.st_size + 1, 2**16), limit_bytes + 1)
        while size <= limit_bytes and (chunk := os.read(descriptor, at_once)):
            chunks.append(chunk)  # until there is no more: a file of /proc has size 0, one may grow meanwhile
            size += len(chunk)
    except OSError as error:
        raise ValueError(f"{name}: {error}\nhint: {hint}") from None
    finally:
        os.close(descriptor)
    if size > limit_bytes:
        raise ValueError(f"{name}: more than {limit_bytes:,} bytes\nhint: {hint}")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_text(path: Path, *, what: str = "", hint: str, limit_bytes: int = SETTINGS_BYTES) -> str:
    """UTF-8, with each line's end as a single newline. Raises ValueError as `read_bytes` does."""
    data = read_bytes(path, what=what, hint=hint, limit_bytes=limit_bytes)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        name = f"{what} {path}" if what else path
        raise ValueError(f"can't read {name}: {error}\nhint: {hint}; is it UTF-8?") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_of(text: str, path: object, *, hint: str, pairs: Any = None) -> Any:
    """What a JSON text says; `pairs`: json's object_pairs_hook, with which the values are not looked at.

    Raises ValueError for what is no JSON, NaN and infinity included, and for more than settings can be.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=pairs)
    except ValueError as error:  # also of a number of over 4300 digits
        reason = str(error).partition(";")[0]
        raise ValueError(f"{path} is not JSON: {reason}\nhint: {hint}") from None
    except RecursionError:
        raise ValueError(_too_deep(path, hint)) from None
    if pairs is None:
        check_values(value, path, hint)
    return value


def yaml_of(text: str, path: object, *, hint: str) -> Any:
    """What a YAML text says, in plain values: mappings by words, lists, text, numbers, true, false, null.

    Raises ValueError for all else: tags, dates, aliases that never end or stand for too much.
    """
    node = yaml_node(text, path, hint=hint)
    loader = YAML_LOADER("")
    try:
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise _not_yaml(error, path, hint) from None
    except (ValueError, OverflowError) as error:  # 2026-99-99 looks like a date, 0x_ like a number
        raise ValueError(f"{path} is not YAML: {error}\nhint: {hint}") from None
    finally:
        loader.dispose()
    check_values(value, path, hint)
    return value


def yaml_node(text: str, path: object, *, hint: str) -> yaml.Node | None:
    """The nodes of a YAML text, each scalar as it is written; None for an empty one.

    Nothing made from them is deep or large: levels are counted before they are composed, which libyaml does
    on the C stack, and aliases are followed before they are constructed, which takes exponential time for
    merges of merges.
    """
    try:
        _check_events(text, path, hint)
        node = yaml.compose(text, Loader=YAML_LOADER)
    except yaml.YAMLError as error:
        raise _not_yaml(_by_python(text) or error, path, hint) from None
    for _ in _each_value(node, _parts_of_node, path, hint):
        pass
    return node


def _parts_of_node(node: yaml.Node | None) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _each_value(
    root: Any, parts_of: Callable[[Any], Iterable[Any]], path: object, hint: str
) -> Iterator[Any]:
    """What lies in `root`, itself included. Raises ValueError for more, or deeper, than settings can be."""
    left, num_values = [(root, 0)], 0
    while left:
        at, level = left.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            raise ValueError(_too_many(path, hint))
        if level > MOST_LEVELS:
            raise ValueError(_too_deep(path, hint))
        yield at
        left += [(each, level + 1) for each in parts_of(at)]


def _check_events(text: str, path: object, hint: str) -> None:
    level = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if getattr(event, "tag", None) is not None:
            line = event.start_mark.line + 1
            raise ValueError(f"{path} has the tag {event.tag} at line {line}\nhint: leave it out; {hint}")
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
            if level > MOST_LEVELS:
                raise ValueError(_too_deep(path, hint))
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1


def _by_python(text: str) -> yaml.YAMLError | None:
    """The error as PyYAML's own parser tells it: libyaml's name other lines."""
    try:
        for _ in yaml.parse(text, Loader=yaml.SafeLoader):
            pass
    except yaml.YAMLError as error:
        return error
    return None


def _not_yaml(error: yaml.YAMLError, path: object, hint: str) -> ValueError:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark else ""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return ValueError(f"{path} is not YAML{where}: {problem}\nhint: {hint}")


def _parts_of_value(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [each for pair in value.items() for each in pair]
    return value if isinstance(value, list) else ()


def check_values(value: Any, path: object, hint: str) -> None:
    """Raises ValueError for what no setting can be, and what trips those who count, compare or print it."""
    for at in _each_value(value, _parts_of_value, path, hint):
        if isinstance(at, dict):
            for key in at:
                if not isinstance(key, str):
                    raise ValueError(f"{path} has the key {key!r}, which is no word\nhint: quote it; {hint}")
        elif not isinstance(at, list) and (problem := _problem(at)):
            raise ValueError(f"{path} holds {problem}\nhint: {hint}")


def _problem(value: Any) -> str | None:
    if isinstance(value, str):
        is_text = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if is_text else f"text that is half a character: {value[:80]!r}"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number {value}, with which nothing can be counted"
    if isinstance(value, int):
        return None if value.bit_length() <= _LARGEST_BITS else "a whole number of over 300 digits"
    return None if value is None else f"the {type(value).__name__} {str(value)!r}: quote it to make it text"


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _too_deep(path: object, hint: str) -> str:
    return f"{path} has more than {MOST_LEVELS} settings inside one another\nhint: {hint}"


def _too_many(path: object, hint: str) -> str:
    return f"{path} holds more than {MOST_VALUES:,} values, with what aliases repeat\nhint: {hint}"
