"""Recognize secrets by the names of their variables, flags and keys, and never write or show them."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = re.compile(
    r"(?:^|_)(?:token|api_?key|access_?key|secret|secret_?key|password|passwd|credentials?|auth)$",
    re.IGNORECASE,
)
_OF_A_TOKENIZER = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask)_token$", re.IGNORECASE)
_LEAST_CHARACTERS = 8  # of a secret to hide: a shorter value also occurs as an ordinary word
_HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Return whether a variable, flag or key with this name holds a secret: HF_TOKEN, hub_token, ..."""
    name = name.replace("-", "_")
    return _NAMES.search(name) is not None and _OF_A_TOKENIZER.search(name) is None


def without_secrets(words: Iterable[str]) -> list[str]:
    """Return a command's words with each secret replaced by `***`.

    A secret is the value of a flag with a secret's name, or the value of such an environment variable.
    """
    values = [
        value for name, value in os.environ.items() if is_secret(name) and len(value) >= _LEAST_CHARACTERS
    ]
    safe_words, hide_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        has_secret_name = is_secret(name.lstrip("-"))
        if hide_next and not word.startswith("--"):
            word = _HIDDEN
        elif has_secret_name and equals:
            word = f"{name}={_HIDDEN}"
        for value in values:
            word = word.replace(value, _HIDDEN)
        hide_next = has_secret_name and not equals and word.startswith("-")
        safe_words.append(word)
    return safe_words


def check_no_secrets(config: Mapping[str, Any], path: object) -> None:
    """Raise ValueError if a setting is a secret: settings are copied into launch files and records."""
    remaining: list[tuple[str, Any]] = list(config.items())
    while remaining:
        name, value = remaining.pop()
        if isinstance(value, dict):
            remaining += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, str) and value.strip() and is_secret(name.rpartition(".")[2]):
            raise ValueError(
                f"{path}: {name} is a secret and would be copied into records\n"
                "hint: remove it, and set an environment variable such as HF_TOKEN or WANDB_API_KEY"
            )


def hidden(name: str, value: Any) -> Any:
    """Return a setting's value, or `***` if the setting is a secret."""
    return _HIDDEN if is_secret(name) and isinstance(value, str) else value
