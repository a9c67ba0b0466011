"""Flags that a Python program gives by name: the same names, types and errors as on the command line."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slm_toolkit.config.flag_metadata import Flag
from slm_toolkit.config.flags import value_type
from slm_toolkit.config.parser import hint_for
from slm_toolkit.config.run_config import FLAGS, RunConfig

Number = TypeVar("Number")


def checked_flags(given: Mapping[str, object], *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of RunConfig that are given: lists of values for flags that make a grid, else values.

    The fields stand in RunConfig's order, which is the order of a grid's rows. A field that is None is not
    given. `leave_out`: fields that the caller does not accept. Raises one ValueError with each unknown name
    and the nearest flag, each value of a wrong type, and each list for a flag that takes one value. Ranges
    and choices are checked by `RunConfig.problems`.
    """
    fields = {f.name: f for f in dataclasses.fields(RunConfig) if f.name not in leave_out}
    names = [f"--{name}" for name in fields]
    checked, problems, hints = {}, [], []
    for name, value in given.items():
        if value is None:
            continue
        if name not in fields:
            problems.append(f"unknown flag: {name}")
            hints += filter(None, [hint_for([f"--{name}"], names)])
            continue
        flag, kind = FLAGS[name], value_type(fields[name].type)
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            problems.append(f"--{name} is an empty list: leave it out")
        elif len(values) > 1 and not flag.grid:
            problems.append(f"--{name} takes one value, not {len(values)}")
        try:
            values = [_converted(name, each, kind, flag) for each in values]
        except ValueError as error:
            problems.append(str(error))
            continue
        checked[name] = values if flag.grid else values[0]
    if problems:
        raise ValueError("\n".join(problems) + (f"\nhint: {'; '.join(hints)}" if hints else ""))
    return {name: checked[name] for name in fields if name in checked}


def checked_value(name: str, value: object, kind: Callable[[str], Number]) -> Number | None:
    """Return a number as argparse's type `kind` parses it; None stays None. Raises ValueError as argparse."""
    if value is None:
        return None
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"argument --{name}: {error}") from None
    except ValueError:
        raise ValueError(f"argument --{name}: invalid {kind.__name__} value: {value!r}") from None


def check_choice(name: str, value: str | None, choices: Collection[str]) -> None:
    """Raises ValueError, in argparse's words, for a value that is neither None nor one of the choices."""
    if value is not None and value not in choices:
        listed = ", ".join(choices)
        raise ValueError(f"argument --{name}: invalid choice: {value!r} (choose from {listed})")


def _converted(name: str, value: object, kind: type, flag: Flag) -> Any:
    if isinstance(value, bool) and kind is str and flag.synonyms:
        value = str(value).lower()  # gradient_checkpointing=True
    if isinstance(value, Path):
        value = str(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and is_whole:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"--{name} is {value!r}: {_KIND_NAMES[kind]}")
    if kind is not str:
        return value
    try:
        return flag.value_of(value)
    except ValueError as error:
        raise ValueError(f"argument --{name}: {error}") from None


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
