"""Finds the fault in a data file that can't be read: which file, which line or row."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import DISK_FULL
from slm_toolkit.run.data.json_rows import JsonRows, json_rows, kind_of

_SEARCH_SECONDS = 20.0
"to look for the fault; after that, the message only has the row's number"
_HINT = "mend or leave out what is named, then start again; a stream that goes on reads the same rows again"


class BadData(ValueError):
    """A dataset can't be read; the message names the file and the place, with a hint."""


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a stream, pass after pass. Raises BadData with the place of an error, or if a file shrank."""

    rows: Any
    path: str
    "as the user gave it"
    sizes: dict[str, int]
    "bytes of each local file when the run began; empty for the hub"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        try:
            for row in self.rows:
                yield row
                number += 1
        except GeneratorExit:
            raise
        except Exception as error:  # datasets raises its own, pyarrow's and Python's
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            files = (
                [] if isinstance(self.rows, JsonRows) else list(self.sizes)
            )  # JsonRows' errors name the place
            reason = self._lost() or fault_in(files) or first_line(error)
            raise BadData(f"{self.path}, after {number:,} rows: {reason}\nhint: {_HINT}") from error
        if (lost := self._lost()) is not None:
            raise BadData(f"{self.path}, after {number:,} rows: {lost}\nhint: {_HINT}")

    def _lost(self) -> str | None:
        """Names a file that is gone or shorter than before, whose rows would be missing silently."""
        for name, size in self.sizes.items():
            path = Path(name)
            if not path.is_file():
                return f"{name} is gone"
            if path.stat().st_size < size:
                return f"{name} had {size:,} bytes when the run began and has {path.stat().st_size:,} now"
        return None


def fault_in(files: list[str]) -> str | None:
    """The first file whose content is not of its type, and the place; None if no fault is found in time."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    for file in files:
        path = Path(file)
        find_fault = _FINDERS.get(path.suffix.lower())
        try:
            fault = find_fault(path, deadline) if find_fault is not None else None
        except OSError as unreadable:
            fault = unreadable.strerror or first_line(unreadable)
        except TimeoutError:
            return None
        except ValueError as refused:  # whose message names the file
            return first_line(refused)
        if fault is not None:
            return f"{file}, {fault}"
    return None


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _in_json(path: Path, deadline: float) -> str | None:
    """Also finds a value of another type than before: pyarrow takes a column's type from the first rows."""
    kinds: dict[str, type] = {}
    for place, row in json_rows(str(path)):
        _check_time(deadline)
        if kinds and row.keys() != kinds.keys():
            return f"{place} has columns {', '.join(row)}; those before: {', '.join(kinds)}"
        for name, value in row.items():
            before = kinds.get(name, type(None))
            if value is not None and before not in (type(None), type(value)):
                return f"{place}: {name!r} is {kind_of(value)}, {kind_of(before())} before"
            kinds[name] = before if value is None else type(value)
    return None


def _in_text(path: Path, deadline: float) -> str | None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            _check_time(deadline)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number:,}: byte 0x{line[error.start]:02x} is no UTF-8 text"
    return None


def _in_parquet(path: Path, deadline: float) -> str | None:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            before = 0
            for group in range(file.num_row_groups):
                _check_time(deadline)
                rows = file.metadata.row_group(group).num_rows
                try:
                    file.read_row_group(group)
                except (pyarrow.ArrowException, OSError) as error:
                    return f"rows {before + 1:,} to {before + rows:,}: {first_line(error)}"
                before += rows
    except pyarrow.ArrowInvalid as error:
        return f"cut off or no Parquet file: {first_line(error)}"
    return None


_FINDERS: dict[str, Callable[[Path, float], str | None]] = {
    ".jsonl": _in_json,
    ".json": _in_json,
    ".txt": _in_text,
    ".md": _in_text,
    ".parquet": _in_parquet,
}


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
