"""Read the rows of a dataset from local files, from a folder that `datasets` saved, or from the hub."""

import glob
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import DISK_FULL, first_line
from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS, Source, is_saved_dataset, local_files
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import check_hub
from slm_toolkit.run.data.documents import format_of

STREAM_ABOVE_BYTES = 2**30


def read_rows(source: Source, config: RunConfig) -> tuple[Any, bool, str]:
    """Return the rows of one dataset, read by `datasets`; True if they are streamed; and their format.

    Raises ValueError, with a hint, for data that does not exist, can't be read or is empty.
    """
    files = [] if is_saved_dataset(source.path) else local_files(source.path)
    try:
        rows, streaming = _load(source, files, config)
        if streaming:
            rows = StreamedRows(rows, source.path, files)
        first = next(iter(rows), None)
    except Exception as error:  # datasets raises its own errors and pyarrow's
        if "\nhint: " in str(error):
            raise
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause from None  # the cache's disk is full
        raise ValueError(
            f"can't read dataset {source.path!r}: {fault_in(files) or first_line(cause)}\n"
            "hint: give a hub id, or well-formed .txt (UTF-8), .jsonl or .parquet files"
        ) from None
    if first is None:
        raise ValueError(f"{source.path} contains no text: it has no rows\nhint: give files with text")
    kind = format_of(first, source.path, asked=config.dataset_format, text_column=config.text_column)
    return rows, streaming, kind


def _load(source: Source, files: list[str], config: RunConfig) -> tuple[Any, bool]:
    from datasets import load_dataset, load_dataset_builder, load_from_disk

    path = source.path
    if is_saved_dataset(path):
        rows = load_from_disk(str(typed_path(path))).with_format(None)
        return (rows.to_iterable_dataset(), True) if config.streaming else (rows, False)
    if files:
        kinds = sorted({FILE_FORMATS[Path(file).suffix.lower()] for file in files})
        if len(kinds) > 1:
            raise ValueError(f"{path} mixes {', '.join(kinds)} files\nhint: select one kind with a glob")
        origin = {"path": kinds[0], "data_files": [glob.escape(file) for file in files]}
        if kinds == ["text"]:
            origin["sample_by"] = "document"  # one row per file
        size_bytes = sum(Path(file).stat().st_size for file in files)
    else:
        check_hub(path, "dataset")
        origin = {"path": path, "name": source.configuration}
        size_bytes = load_dataset_builder(**origin).info.download_size or math.inf  # unknown: may be huge
    streaming = config.streaming if config.streaming is not None else size_bytes > STREAM_ABOVE_BYTES
    return load_dataset(**origin, split="train", streaming=streaming), streaming


class BadData(ValueError):
    """A dataset can't be read; the message names the file and the place, with a hint."""


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a stream; every pass reads them again. Raises BadData, which names the place of the error."""

    rows: Any
    path: str
    "as the user gave it"
    files: list[str]
    "empty for the hub"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        try:
            for number, row in enumerate(self.rows, start=1):  # noqa: B007 - for the error
                yield row
        except Exception as error:  # datasets raises its own errors, pyarrow's and Python's
            raise BadData(
                f"{self.path}, after {number:,} rows: {fault_in(self.files) or first_line(error)}\n"
                "hint: correct or remove that row or file, then start again; a resumed stream reads the same "
                "rows again"
            ) from error


_SEARCH_SECONDS = 20.0
"time limit of the search for a fault; after that, the message names only the row"


def fault_in(files: list[str]) -> str | None:
    """Name the first malformed file and the place in it; None if the search finds none in time."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    for file in files:
        place = "can't be read"
        try:
            for place in _places(file):  # noqa: B007 - for the error
                if time.monotonic() > deadline:
                    return None
        except Exception as error:  # pyarrow's errors and Python's
            return f"{file}, {place}: {first_line(error)}"
    return None


def _places(file: str) -> Iterator[str]:
    """Yield each place of a file, then read it."""
    kind = FILE_FORMATS[Path(file).suffix.lower()]
    if kind == "parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as parquet:
            end = 0
            for group in range(parquet.num_row_groups):
                start, end = end + 1, end + parquet.metadata.row_group(group).num_rows
                yield f"rows {start:,} to {end:,}"
                parquet.read_row_group(group)
        return
    with open(file, "rb") as lines:
        is_row = lines.readline().rstrip().endswith(b"}")
        lines.seek(0)
        if file.endswith(".json") and not is_row:  # one value over all lines
            json.load(lines)
            return
        for number, line in enumerate(lines, start=1):
            yield f"line {number:,}"
            text = line.decode("utf-8")
            if kind == "json" and text.strip() and not isinstance(json.loads(text), dict):
                raise ValueError(f"{text.strip()[:80]!r} is not an object with columns")
