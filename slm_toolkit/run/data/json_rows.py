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
_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number"}
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class JsonRows:
    """Rows of several JSON files, each with at least the columns of the first row. Every pass reads again."""

    files: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        columns, first_columns = _Columns(), {}
        for file in self.files:
            for _, row in json_rows(file, columns):
                first_columns = first_columns or dict.fromkeys(row)
                yield {**first_columns, **row}


def json_rows(file: str, columns: "_Columns | None" = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a .jsonl or .json file, each with its place ("line 3"; "row 3" of an array).

    A file contains an object per line, objects over several lines, or an array of objects or texts.
    Raises ValueError, with a hint, for a value that is not a row, and for more levels or columns than the
    limits above. `columns`: the columns of earlier files, which count towards the limit.
    """
    columns = columns or _Columns()
    for place, value in _values(file):
        row = {"text": value} if isinstance(value, str) and place.startswith("row") else value
        if not isinstance(row, dict):
            problem = f"{place} is {kind_of(row)}, not an object with columns"
            raise ValueError(f"{file}, {problem}\nhint: give each row as {{'text': ...}}")
        if excess := columns.add(row):
            raise ValueError(f"{file}, {place}: {excess}\nhint: keep only the columns to train on")
        yield place, row


def kind_of(value: Any) -> str:
    return {**_KINDS, float: "a number", type(None): "null"}[type(value)]


class _Columns:
    """All columns of the rows so far, each with its nested columns."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.num_names = 0

    def add(self, row: dict[str, Any]) -> str | None:
        """Add a row's columns. Return a description of the limit that they exceed; else None."""
        pending: list[tuple[dict[str, Any], Any, int]] = [(self.names, row, 1)]
        while pending:
            names, value, level = pending.pop()
            if level > MOST_LEVELS:
                return f"more than {MOST_LEVELS} levels of objects or lists"
            if isinstance(value, list):
                pending += [(names, item, level + 1) for item in value if isinstance(item, dict | list)]
                continue
            for name, item in value.items():
                if name not in names:
                    names[name] = {}
                    self.num_names += 1
                if isinstance(item, dict | list):
                    pending.append((names[name], item, level + 1))
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
            reason = f"line {number:,} has too many levels of objects or lists"
        except json.JSONDecodeError as error:
            reason = f"line {number + error.lineno - 1:,}: {error.msg} (column {error.colno})"
        except UnicodeDecodeError:
            reason = f"line {number:,}: not UTF-8 text"
        except ValueError as error:  # a whole number of over 4300 digits
            reason = f"line {number:,}: {str(error).partition(';')[0]}"
    raise ValueError(f"{file}, {reason}\nhint: check that it is well-formed JSON")


def _of_line(line: bytes) -> tuple[Any] | None:
    """Return the line's value in a tuple; None if it continues in the next line, or another value follows."""
    try:
        return (json.loads(line, strict=False),)
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) or error.msg == "Extra data":
            return None
        raise


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
