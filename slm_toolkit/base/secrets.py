"""Secrets, which stay in the environment: known by the names of what holds them, never written or shown."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = re.compile(
    r"(?:^|_)(?:token|api_?key|access_?key|secret|secret_?key|password|passwd|credentials?|auth)$",
    re.IGNORECASE,
)
_OF_A_TOKENIZER = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask)_token$", re.IGNORECASE)
_LEAST_CHARACTERS = 8  # of a secret: a shorter value is a word that stands in many places
_HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret: HF_TOKEN, WANDB_API_KEY, hub_token."""
    name = name.replace("-", "_")
    return _NAMES.search(name) is not None and _OF_A_TOKENIZER.search(name) is None


def without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command with what must not be seen hidden: by its name, or by its value."""
    values = [
        value for name, value in os.environ.items() if is_secret(name) and len(value) >= _LEAST_CHARACTERS
    ]
    found, hide_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        named = is_secret(name.lstrip("-"))
        if hide_next and not word.startswith("--"):
            word = _HIDDEN
        elif named and equals:
            word = f"{name}={_HIDDEN}"
        for value in values:
            word = word.replace(value, _HIDDEN)
        hide_next = named and not equals and word.startswith("-")
        found.append(word)
    return found


def check_no_secrets(config: Mapping[str, Any], path: object) -> None:
    """Raises ValueError for settings that hold one: they are copied into launch files and records."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}.{key}", below) for key, below in value.items()]
        elif isinstance(value, str) and value.strip() and is_secret(name.rpartition(".")[2]):
            raise ValueError(
                f"{path}: {name} is a secret, which would be copied into records\n"
                "hint: leave it out; the environment has it, as in HF_TOKEN or WANDB_API_KEY"
            )


def hidden(name: str, value: Any) -> Any:
    """A setting's value as it may be shown."""
    return _HIDDEN if is_secret(name) and isinstance(value, str) else value
