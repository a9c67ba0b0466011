"""Read the rows of JSON files, and refuse files that would crash or stall the reader of `datasets`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_LEVELS = 100
"limit for nested objects and lists, because pyarrow parses recursively, and 200,000 levels crash the process"
MOST_COLUMNS = 10_000
"limit for all rows of a dataset, including nested columns: datasets takes over 200 s for a million"
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class JsonRows:
    """Rows of several JSON files, each with at least the columns of the first row. Every pass reads again.

    A file contains an object per line, objects over several lines, or an array of objects or texts. Raises
    ValueError, with a hint, for a value that is not a row, and for more levels or columns than the limits.
    """

    files: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names: set[tuple] = set()
        first_columns: dict[str, None] = {}
        for file in self.files:
            for place, value in _values(file):
                row = {"text": value} if isinstance(value, str) and place.startswith("row") else value
                if not isinstance(row, dict):
                    problem = f"{place} is {str(row)[:80]}, not an object with columns"
                    raise ValueError(f"{file}, {problem}\nhint: give each row as {{'text': ...}}")
                if excess := _add_names(names, (), row):
                    raise ValueError(f"{file}, {place}: {excess}\nhint: keep only the columns to train on")
                first_columns = first_columns or dict.fromkeys(row)
                yield {**first_columns, **row}


def _add_names(names: set[tuple], parent: tuple, value: Any) -> str | None:
    """Add the names of a value's columns. Return a description of the limit that they exceed; else None."""
    if len(parent) >= MOST_LEVELS:
        return f"more than {MOST_LEVELS} levels of objects or lists"
    if isinstance(value, list):
        items = [("", item) for item in value if isinstance(item, dict | list)]
    else:
        items = value.items()
    for name, item in items:
        path = (*parent, name)
        names.add(path)
        if isinstance(item, dict | list) and (excess := _add_names(names, path, item)):
            return excess
    return f"more than {MOST_COLUMNS:,} columns so far" if len(names) > MOST_COLUMNS else None


def _values(file: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with open(file, "rb") as lines:
        try:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                try:
                    value = json.loads(line, strict=False)
                except json.JSONDecodeError as error:
                    if error.pos < len(error.doc.rstrip()) and error.msg != "Extra data":
                        raise
                    value = []  # the value continues in the next line, or another value follows
                if isinstance(value, list):
                    yield from _over_lines((line + lines.read()).decode("utf-8-sig"), number)
                    return
                yield f"line {number:,}", value
            return
        except json.JSONDecodeError as error:
            reason = f"line {number + error.lineno - 1:,}: {error.msg} (column {error.colno})"
        except (ValueError, RecursionError) as error:  # not UTF-8; a number of over 4300 digits; many levels
            reason = f"line {number:,}: {str(error).partition(';')[0]}"
    raise ValueError(f"{file}, {reason}\nhint: check that it is well-formed JSON")


def _over_lines(text: str, line: int) -> Iterator[tuple[str, Any]]:
    """Yield values that are separated only by blanks; of an array, its elements."""
    decoder = json.JSONDecoder(strict=False)
    end = 0
    while (start := _BLANKS.match(text, end).end()) < len(text):
        line += text.count("\n", end, start)
        value, end = decoder.raw_decode(text, start)
        if isinstance(value, list):
            yield from ((f"row {number:,}", item) for number, item in enumerate(value, start=1))
        else:
            yield f"line {line:,}", value
        line += text.count("\n", start, end)
