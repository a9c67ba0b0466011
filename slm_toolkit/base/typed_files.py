"""Decode files into typed values with msgspec; errors name the file and the field."""

import csv
import dataclasses
import re
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

# limit of every number: it fits Parquet's int64, and products of a few such numbers stay finite
LARGEST = 10**18
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
PositiveInt = Annotated[int, Meta(ge=1, le=LARGEST)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
Text = Annotated[str, Meta(min_length=1)]
T = TypeVar("T")


def converted(value: Any, kind: type[T], *, prefix: str = "", from_text: bool = False) -> T:
    """Convert a decoded value to `kind`. With `from_text`, numbers may be text, as in CSV.

    Raises ValueError without a hint if the value doesn't fit; `prefix` comes before the field's name.
    """
    try:
        return msgspec.convert(value, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise ValueError(field_problem(error, prefix=prefix)) from None


def csv_rows(file: Path, kind: type[T], *, hint: str = "") -> tuple[T, ...]:
    """Read the rows of a CSV file; an empty cell is None. Raises ValueError with the line's number."""
    rows = []
    with file.open(newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            cells = {name: cell or None for name, cell in row.items()}
            try:
                rows.append(converted(cells, kind, from_text=True))
            except ValueError as error:
                advice = f"\nhint: {hint}" * bool(hint)
                raise ValueError(f"{file}, line {reader.line_num}: {error}{advice}") from None
    return tuple(rows)


def field_problem(error: msgspec.ValidationError, *, prefix: str = "") -> str:
    """Return `invalid field: losses[2] (expected float, got str)`, or `missing field: asked.config`."""
    reason, _, place = str(error).replace("`", "").partition(" - at ")
    field = (prefix + place.replace("$", "", 1)).removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field (\w+)", reason):
        return f"missing field: {f'{field}.{missing[1]}'.removeprefix('.')}"
    reason = reason[0].lower() + reason[1:]
    return f"invalid field: {field} ({reason})" if field else reason


def typed_dict_of(kind: type, *, required: tuple[str, ...] = (), **types: Any) -> Any:
    """Make a TypedDict with a dataclass's fields; its numbers must not be negative.

    `required` names fields with a default that must still be present. `types` replaces the types of fields
    that differ in the file, and adds fields that only the file has.
    """
    hints = {name: _not_negative(hint) for name, hint in get_type_hints(kind).items()} | types
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING and field.name not in required:
            hints[field.name] = NotRequired[hints[field.name]]
    return TypedDict(kind.__name__, hints)


def _not_negative(hint: Any) -> Any:
    if hint is int:
        return Count
    if hint is float:
        return NonNegative
    if not (parts := get_args(hint)):
        return hint
    origin = Union if get_origin(hint) is UnionType else get_origin(hint)
    return origin[tuple(_not_negative(part) for part in parts)]
