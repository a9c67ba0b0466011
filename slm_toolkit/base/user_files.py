"""Read the files that a user names: never wait for a pipe, limit the size, accept only plain values."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import yaml

# size limit of a YAML or JSON with settings or prices, and of a config.json; real files have a few KB
SETTINGS_BYTES = 2**17
# limit of nested mappings and lists; DeepSpeed's JSON has four levels
MOST_LEVELS = 40
MOST_ALIASES = 10  # of a YAML's values
_LARGEST_BITS = 1023  # a larger integer may not fit in a float
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if present, is ten times as fast


def typed_path(text: str) -> Path:
    """Expand `~` as a shell does; `Path.expanduser` would raise RuntimeError for an unknown user."""
    return Path(os.path.expanduser(text))


# False for too long a name, for which the methods of Path raise OSError
is_file, is_dir, exists = os.path.isfile, os.path.isdir, os.path.exists


def check_name(name: str, what: str) -> str:
    """Return `name`. Raises ValueError if it has characters that would break a table, script or terminal."""
    if not name.isprintable():
        raise ValueError(f"{what} {name!r} has unprintable characters\nhint: give it another name")
    return name


def read_bytes(path: Path | str, *, what: str, hint: str, limit_bytes: int = SETTINGS_BYTES) -> bytes:
    """Read a regular file.

    `what` names the kind of file in messages: "record" in "can't read record runs/x/record.json: ...".
    Raises ValueError for a pipe, a device or a folder, without waiting for data. Raises ValueError for a file
    of more than `limit_bytes`, without reading the rest.
    """
    name = f"can't read {what} {path}" if what else f"can't read {path}"
    try:
        with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is a pipe, a socket or a device, not a file")
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: also a NUL in the name
        raise ValueError(f"{name}: {error}\nhint: {hint}") from None
    if len(data) > limit_bytes:
        raise ValueError(f"{name}: more than {limit_bytes:,} bytes\nhint: {hint}")
    return data


def read_text(path: Path, *, what: str = "", hint: str, limit_bytes: int = SETTINGS_BYTES) -> str:
    """Read a UTF-8 file; every line end becomes a single newline. Raises ValueError as `read_bytes` does."""
    data = read_bytes(path, what=what, hint=hint, limit_bytes=limit_bytes)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        name = f"{what} {path}" if what else path
        raise ValueError(f"can't read {name}: {error}\nhint: {hint}; is it UTF-8?") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_of(text: str, path: object, *, hint: str) -> Any:
    """Parse a JSON text.

    Raises ValueError for invalid JSON, including NaN and infinity, and for values that `check_values`
    rejects.
    """
    try:
        value = json.loads(text)
    except ValueError as error:  # Python raises it for a number of over 4300 digits, too
        reason = str(error).partition(";")[0]
        raise ValueError(f"{path} is not JSON: {reason}\nhint: {hint}") from None
    except RecursionError:
        raise ValueError(_too_deep(path, hint)) from None
    check_values(value, path, hint)
    return value


def yaml_of(text: str, path: object, *, hint: str) -> Any:
    """Parse a YAML text into plain values: mappings with text keys, lists, text, numbers, true, false, null.

    Raises ValueError for everything else: tags, dates, many aliases.
    """
    node = yaml_node(text, path, hint=hint)
    loader = YAML_LOADER("")
    try:
        value = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # 2026-99-99 looks like a date
        raise _not_yaml(error, path, hint) from None
    finally:
        loader.dispose()
    check_values(value, path, hint)
    return value


def yaml_node(text: str, path: object, *, hint: str) -> yaml.Node | None:
    """Parse a YAML text into nodes whose scalars stay as they are written; None for an empty text.

    Levels are counted before libyaml composes the nodes, because it recurses on the C stack. Few aliases are
    allowed, and none inside itself: aliases of aliases take exponential time and memory.
    """
    try:
        num_aliases, anchors = 0, []  # of the collections that are open
        for event in yaml.parse(text, Loader=YAML_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                anchors.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchors.pop()
            is_alias = isinstance(event, yaml.AliasEvent)
            num_aliases += is_alias
            if getattr(event, "tag", None) is not None or (is_alias and event.anchor in anchors):
                what = f"alias {event.anchor} inside itself" if is_alias else f"tag {event.tag}"
                line = event.start_mark.line + 1
                raise ValueError(f"{path} has the {what} at line {line}\nhint: remove it; {hint}")
            if len(anchors) > MOST_LEVELS or num_aliases > MOST_ALIASES:
                raise ValueError(_too_deep(path, hint))
        return yaml.compose(text, Loader=YAML_LOADER)
    except yaml.YAMLError as error:
        raise _not_yaml(error, path, hint) from None


def _not_yaml(error: Exception, path: object, hint: str) -> ValueError:
    mark = getattr(error, "problem_mark", None)
    line = f" at line {mark.line + 1}" if mark else ""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return ValueError(f"{path} is not YAML{line}: {problem}\nhint: {hint}")


def check_values(value: Any, path: object, hint: str) -> None:
    """Raise ValueError for values that no setting can have, or that would break arithmetic or printing."""
    of_level = [value]
    for _ in range(MOST_LEVELS + 1):
        below: list[Any] = []
        for part in of_level:
            if isinstance(part, dict):
                if odd := [key for key in part if not isinstance(key, str)]:
                    raise ValueError(
                        f"{path} has the key {odd[0]!r}, which is not text\nhint: quote it; {hint}"
                    )
                below += [*part, *part.values()]
            elif isinstance(part, list):
                below += part
            elif problem := _problem(part):
                raise ValueError(f"{path} contains {problem}\nhint: {hint}")
        if not below:
            return
        of_level = below
    raise ValueError(_too_deep(path, hint))


def _problem(value: Any) -> str | None:
    if isinstance(value, str):
        is_text = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if is_text else f"text with an unpaired surrogate: {value[:80]!r}"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number {value}, which is not finite"
    if isinstance(value, int):
        return None if value.bit_length() <= _LARGEST_BITS else "an integer of over 300 digits"
    return None if value is None else f"the {type(value).__name__} {str(value)!r}: quote it to make it text"


def _too_deep(path: object, hint: str) -> str:
    return f"{path} has over {MOST_LEVELS} nested levels, or over {MOST_ALIASES} aliases\nhint: {hint}"
