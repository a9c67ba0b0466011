"""Read the rows of a dataset from local files, from a folder that `datasets` saved, or from the hub."""

import contextlib
import glob
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import DISK_FULL, first_line
from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS, Source, is_saved_dataset, local_files
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import check_hub
from slm_toolkit.run.data.documents import format_of, unreadable_text
from slm_toolkit.run.data.json_rows import MOST_COLUMNS, JsonRows, json_rows, kind_of

STREAM_ABOVE_BYTES = 2**30


def read_rows(source: Source, config: RunConfig) -> tuple[Any, bool, str]:
    """Return the rows of one dataset, read by `datasets`; True if they are streamed; and their format.

    Raises ValueError, with a hint, for data that does not exist, can't be read or is empty.
    """
    rows, streaming = _load(source, config)
    with unreadable_text():
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"{source.path} contains no text: it has no rows\nhint: give files with text")
    kind = format_of(first, source.path, asked=config.dataset_format, text_column=config.text_column)
    if kind == "text" and not streaming:
        column = rows.with_format(None)[config.text_column]
        with unreadable_text():
            has_text = any(not isinstance(text, str) or text.strip() for text in column if text is not None)
        if not has_text:
            raise ValueError(
                f"{source.path} contains no text: column {config.text_column!r} is blank in all rows\n"
                "hint: give files with text, or name another column with --text_column"
            )
    return rows, streaming, kind


def _load(source: Source, config: RunConfig) -> tuple[Any, bool]:
    from datasets import load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    if is_saved_dataset(source.path):
        rows = _saved(typed_path(source.path))
        if not config.streaming:
            return rows, False
        return StreamedRows(rows.to_iterable_dataset(), source.path, {}), True
    files = local_files(source.path)
    if files:
        kinds = {FILE_FORMATS[Path(file).suffix.lower()] for file in files}
        if len(kinds) > 1:
            raise ValueError(
                f"{source.path} mixes {', '.join(sorted(kinds))} files\nhint: select one kind with a glob"
            )
        sizes = _sizes(source.path, files)
        size_bytes = sum(sizes.values())
        if size_bytes == 0:
            raise ValueError(
                f"{source.path} contains no text: {len(files)} empty files\nhint: give files with text"
            )
        origin = {"path": kinds.pop(), "data_files": [glob.escape(file) for file in files]}
        if origin["path"] == "text":
            origin["sample_by"] = "document"  # one row per file
    else:
        check_hub(source.path, "dataset")
        origin = {"path": source.path, "name": config.dataset_config_name}
        sizes, size_bytes = {}, 0
    try:
        if not files:
            size_bytes = load_dataset_builder(**origin).info.download_size or math.inf  # unknown: may be huge
        streaming = config.streaming if config.streaming is not None else size_bytes > STREAM_ABOVE_BYTES
        if files and origin["path"] == "json":
            checked = StreamedRows(JsonRows(tuple(files)), source.path, sizes)
            if streaming:
                return checked, True
            for _ in checked:
                continue
        rows = load_dataset(**origin, split="train", streaming=streaming)
        next(iter(rows), None)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"can't find dataset {source.path!r}: {str(error).splitlines()[0]}\n"
            "hint: give a hub id, or .txt, .jsonl or .parquet files by path, folder or glob"
        ) from None
    except BadData:
        raise
    except Exception as error:  # datasets raises its own errors and pyarrow's for malformed files
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
            raise error.__cause__ from None  # the cache's disk is full
        reason = fault_in(files) or first_line(error.__cause__ or error)
        raise ValueError(
            f"can't read dataset {source.path!r}: {reason}\nhint: check that it is UTF-8 and well-formed"
        ) from None
    return (StreamedRows(rows, source.path, sizes) if streaming else rows), streaming


def _sizes(dataset: str, files: list[str]) -> dict[str, int]:
    """Return each file's size in bytes.

    Raises ValueError for a file that does not exist, is a broken link, or has too many columns, and for an
    archive, which `datasets` would unpack (2 MB may become 2 GB).
    """
    try:
        for file in files:
            if kind := _packed_as(file):
                raise ValueError(f"{file} is packed as {kind}\nhint: unpack it, and give the unpacked files")
            if file.lower().endswith(".parquet"):
                _check_parquet(file)
        return {file: Path(file).stat().st_size for file in files}
    except OSError as error:
        raise ValueError(
            f"can't read dataset {dataset!r}: {error.filename}: {error.strerror}\n"
            "hint: check whether it still exists, or is a broken link"
        ) from None


def _packed_as(file: str) -> str | None:
    """Return the kind of archive that `datasets` would unpack this file as; None for any other file."""
    from datasets.utils.extract import Extractor

    try:
        return Extractor.infer_extractor_format(file)
    except OSError:
        raise
    except Exception:  # raised while unpacking: EOFError, zlib.error, ...
        return "an archive that is truncated or damaged"


def _check_parquet(file: str) -> None:
    """Raise ValueError for more columns than `datasets` can read within seconds."""
    import pyarrow
    import pyarrow.parquet

    with contextlib.suppress(pyarrow.ArrowException, OSError):  # reading the rows will report this error
        _check_columns(file, pyarrow.parquet.read_metadata(file).num_columns)


def _check_columns(file: str, num_columns: int) -> None:
    if num_columns > MOST_COLUMNS:
        raise ValueError(
            f"{file} has {num_columns:,} columns, more than {MOST_COLUMNS:,}\n"
            "hint: keep only the columns to train on"
        )


def _saved(folder: Path) -> Any:
    """Load a dataset that `Dataset.save_to_disk` wrote. Raises ValueError if it can't be loaded."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # its own errors, pyarrow's or a KeyError, depending on what is missing
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"can't read dataset {str(folder)!r}: {reason}\nhint: save it again") from None


# Find the fault in an unreadable data file: the file, and the line or row.

_SEARCH_SECONDS = 20.0
"time limit of the search; after that, the message names only the row"
_HINT = "correct or remove that row or file, then start again; a resumed stream reads the same rows again"


class BadData(ValueError):
    """A dataset can't be read; the message names the file and the place, with a hint."""


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a stream; every pass reads them again. Raises BadData, which names the place of the error.

    A file that was removed or has become shorter is an error, too.
    """

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
        except Exception as error:  # datasets raises its own errors, pyarrow's and Python's
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            error_names_place = isinstance(self.rows, JsonRows)
            files = [] if error_names_place else list(self.sizes)
            reason = self._lost() or fault_in(files) or first_line(error)
            raise BadData(f"{self.path}, after {number:,} rows: {reason}\nhint: {_HINT}") from error
        if (lost := self._lost()) is not None:
            raise BadData(f"{self.path}, after {number:,} rows: {lost}\nhint: {_HINT}")

    def _lost(self) -> str | None:
        """Name a file that is gone or shorter than before: its rows would be missing silently."""
        for name, size in self.sizes.items():
            path = Path(name)
            if not path.is_file():
                return f"{name} is gone"
            if path.stat().st_size < size:
                return f"{name} had {size:,} bytes when the run began and now has {path.stat().st_size:,}"
        return None


def fault_in(files: list[str]) -> str | None:
    """Name the first malformed file and the place in it; None if the search finds none in time."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    for file in files:
        path = Path(file)
        find_fault = _FINDERS.get(path.suffix.lower())
        try:
            fault = find_fault(path, deadline) if find_fault is not None else None
        except TimeoutError:  # an OSError, too
            return None
        except OSError as unreadable:
            fault = unreadable.strerror or first_line(unreadable)
        except ValueError as refused:  # its message already names the file
            return first_line(refused)
        if fault is not None:
            return f"{file}, {fault}"
    return None


def _in_json(path: Path, deadline: float) -> str | None:
    """Find the fault in a JSON file.

    A change of a column's type is a fault, too, because pyarrow takes the type from the first rows.
    """
    kinds: dict[str, type] = {}
    for place, row in json_rows(str(path)):
        _check_time(deadline)
        if kinds and row.keys() != kinds.keys():
            return f"{place} has columns {', '.join(row)}; earlier rows have {', '.join(kinds)}"
        for name, value in row.items():
            before = kinds.get(name, type(None))
            if value is not None and before not in (type(None), type(value)):
                return f"{place}: {name!r} is {kind_of(value)}, but {kind_of(before())} in earlier rows"
            kinds[name] = before if value is None else type(value)
    return None


def _in_text(path: Path, deadline: float) -> str | None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            _check_time(deadline)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number:,}: byte 0x{line[error.start]:02x} is not UTF-8 text"
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
        return f"truncated, or not a Parquet file: {first_line(error)}"
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
