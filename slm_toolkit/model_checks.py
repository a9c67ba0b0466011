"""What values of a model's config.json make sense, whatever its type."""

from collections.abc import Mapping
from typing import Any

LARGEST_SIZE, MOST_LAYERS = 10**9, 10**5

_KIND = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    str: ("a word", lambda value: isinstance(value, str)),
    int: ("a whole number above 0", lambda value: is_size(value)),
    float: (
        "a number above 0",
        lambda value: isinstance(value, float | int) and value is not True and value > 0,
    ),
}


def check_kinds(config: Mapping[str, Any], path: str, **kinds: type) -> None:
    """Raises ValueError with the first key that is there and is not of its kind."""
    for key, kind in kinds.items():
        said, is_kind = _KIND[kind]
        if config.get(key) is not None and not is_kind(config[key]):
            raise ValueError(f"{path}: {key} is {config[key]!r}\nhint: it is {said}")


def check_layers(num_layers: int, path: str) -> None:
    """Raises ValueError for more than can be counted one by one."""
    if num_layers > MOST_LAYERS:
        raise ValueError(f"{path}: {num_layers:,} layers\nhint: at most {MOST_LAYERS:,}")


def is_size(value: object) -> bool:
    """Whether it may be a dimension of a model, or how many there are of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE
