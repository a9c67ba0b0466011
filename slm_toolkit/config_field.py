"""A field of RunConfig with what its flag needs: help, choices, other names."""

from dataclasses import field
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    bare: str | None = None,
    synonyms: dict[str, str] | None = None,
    grid: bool = False,
    identity: bool = True,
) -> Any:
    """A field and its flag; `grid`: several values in `compare`, `identity`: makes another run.

    `bare`: the value of the flag without one, `synonyms`: other words for values.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "choices": choices,
            "aliases": aliases,
            "bare": bare,
            "synonyms": synonyms or {},
            "grid": grid,
            "id": identity,
        },
    )
