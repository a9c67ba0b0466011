"""Reads the rows of JSON files; refuses files that would crash or stall the reader of `datasets`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_LEVELS = 100
"of nested objects and lists: pyarrow parses recursively, and 200,000 levels crash the process"
MOST_COLUMNS = 10_000
"of all rows of a dataset, nested ones included: datasets takes over 200 s for a million"
_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number"}
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class JsonRows:
    """The rows of several JSON files, pass after pass, each with at least the columns of the first row."""

    files: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        columns, of_first = _Columns(), {}
        for file in self.files:
            for _, row in json_rows(file, columns):
                of_first = of_first or dict.fromkeys(row)
                yield {**of_first, **row}


def json_rows(file: str, columns: "_Columns | None" = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .jsonl or .json file, each with its place ("line 3"; "row 3" of an array).

    A file holds an object per line, objects over several lines, or an array of objects or texts.
    Raises ValueError, with a hint, for a value that is not a row, and for more levels or columns than the
    limits above; `columns` counts towards them.
    """
    columns = columns or _Columns()
    for place, value in _values(file):
        row = {"text": value} if isinstance(value, str) and place.startswith("row") else value
        if not isinstance(row, dict):
            what = f"{place} is {kind_of(row)}, not an object with columns"
            raise ValueError(f"{file}, {what}\nhint: give each row as {{'text': ...}}")
        if too_much := columns.add(row):
            raise ValueError(f"{file}, {place}: {too_much}\nhint: keep only the columns that are trained on")
        yield place, row


def kind_of(value: Any) -> str:
    return {**_KINDS, float: "a number", type(None): "null"}[type(value)]


class _Columns:
    """All columns that the rows have had so far, each with its nested columns."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.num_names = 0

    def add(self, row: dict[str, Any]) -> str | None:
        """Add a row's columns; describes a limit that they exceed, if any."""
        left: list[tuple[dict[str, Any], Any, int]] = [(self.names, row, 1)]
        while left:
            names, value, level = left.pop()
            if level > MOST_LEVELS:
                return f"more than {MOST_LEVELS} objects or lists inside one another"
            if isinstance(value, list):
                left += [(names, each, level + 1) for each in value if isinstance(each, dict | list)]
                continue
            for name, each in value.items():
                if name not in names:
                    names[name] = {}
                    self.num_names += 1
                if isinstance(each, dict | list):
                    left.append((names[name], each, level + 1))
            if self.num_names > MOST_COLUMNS:
                return f"more than {MOST_COLUMNS:,} columns so far"
        return None


def _values(file: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with open(file, "rb") as lines:
        try:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                value = None if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"[") else _of_line(line)
                if value is None:
                    yield from _over_lines((line + lines.read()).decode("utf-8-sig"), number)
                    return
                yield f"line {number:,}", value[0]
            return
        except RecursionError:
            reason = f"line {number:,} has too many objects inside one another"
        except json.JSONDecodeError as error:
            reason = f"line {number + error.lineno - 1:,}: {error.msg} (column {error.colno})"
        except UnicodeDecodeError:
            reason = f"line {number:,}: no UTF-8 text"
        except ValueError as error:  # a whole number of over 4300 digits
            reason = f"line {number:,}: {str(error).partition(';')[0]}"
    raise ValueError(f"{file}, {reason}\nhint: is it well-formed JSON?")


def _of_line(line: bytes) -> tuple[Any] | None:
    """The line's value; None if it continues in the next line, or if another value follows."""
    try:
        return (json.loads(line, strict=False),)
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) or error.msg == "Extra data":
            return None
        raise


def _over_lines(text: str, line: int) -> Iterator[tuple[str, Any]]:
    """Values with only blanks between them; for an array, its elements."""
    decoder = json.JSONDecoder(strict=False)
    end = 0
    while (start := _BLANKS.match(text, end).end()) < len(text):
        line += text.count("\n", end, start)
        value, end = decoder.raw_decode(text, start)
        if isinstance(value, list):
            yield from ((f"row {number:,}", each) for number, each in enumerate(value, start=1))
        else:
            yield f"line {line:,}", value
        line += text.count("\n", start, end)
