"""Reads the rows of a dataset: from local files, a folder that `datasets` saved, or the hub."""

import contextlib
import glob
import math
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import DISK_FULL
from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS, Source, is_saved_dataset, local_files
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.hub import check_hub
from slm_toolkit.run.data.bad_data import BadData, StreamedRows, fault_in, first_line
from slm_toolkit.run.data.formats import format_of, unreadable_text
from slm_toolkit.run.data.json_rows import MOST_COLUMNS, JsonRows

STREAM_ABOVE_BYTES = 2**30


def read_rows(source: Source, config: RunConfig) -> tuple[Any, bool, str]:
    """The rows of one dataset through `datasets`, whether they are streamed, and their format.

    Raises ValueError, with a hint, for data that does not exist, can't be read or is empty.
    """
    rows, streaming = _load(source, config)
    with unreadable_text():
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"{source.path} holds no text: not one row\nhint: give files with text")
    kind = format_of(first, source.path, asked=config.dataset_format, text_column=config.text_column)
    if kind == "text" and not streaming:
        column = rows.with_format(None)[config.text_column]
        with unreadable_text():
            has_text = any(not isinstance(text, str) or text.strip() for text in column if text is not None)
        if not has_text:
            raise ValueError(
                f"{source.path} holds no text\nhint: column {config.text_column!r} is blank throughout"
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
                f"{source.path} mixes {', '.join(sorted(kinds))} files\nhint: give one kind by a glob"
            )
        sizes = _sizes(source.path, files)
        size_bytes = sum(sizes.values())
        if size_bytes == 0:
            raise ValueError(
                f"{source.path} holds no text: {len(files)} empty files\nhint: give files with text"
            )
        origin = {"path": kinds.pop(), "data_files": [glob.escape(file) for file in files]}
        if origin["path"] == "text":
            origin["sample_by"] = "document"  # a file is a document
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
    except Exception as error:  # datasets raises its own errors and pyarrow's for files of another content
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
            raise error.__cause__ from None  # the disk of the cache is full
        reason = fault_in(files) or first_line(error.__cause__ or error)
        raise ValueError(
            f"can't read dataset {source.path!r}: {reason}\nhint: is it UTF-8 and well-formed?"
        ) from None
    return (StreamedRows(rows, source.path, sizes) if streaming else rows), streaming


def _sizes(dataset: str, files: list[str]) -> dict[str, int]:
    """The size of each file in bytes.

    Raises ValueError for a file that is gone, is a broken link, would be unpacked by `datasets` (2 MB may
    become 2 GB) or has too many columns.
    """
    try:
        for file in files:
            if kind := _packed_as(file):
                raise ValueError(f"{file} is packed as {kind}\nhint: unpack it, and give what is in it")
            if file.lower().endswith(".parquet"):
                _check_parquet(file)
        return {file: Path(file).stat().st_size for file in files}
    except OSError as error:
        raise ValueError(
            f"can't read dataset {dataset!r}: {error.filename}: {error.strerror}\n"
            "hint: was it there when the run began? is it a link to nowhere?"
        ) from None


def _packed_as(file: str) -> str | None:
    """The kind of archive that `datasets` would take a file for, and unpack; None if it would not."""
    from datasets.utils.extract import Extractor

    try:
        return Extractor.infer_extractor_format(file)
    except OSError:
        raise
    except Exception:  # raised while unpacking: EOFError, zlib.error, ...
        return "an archive that is cut off or damaged"


def _check_parquet(file: str) -> None:
    """Raises ValueError for more columns than `datasets` reads in some seconds."""
    import pyarrow
    import pyarrow.parquet

    with contextlib.suppress(pyarrow.ArrowException, OSError):  # reading it will name the fault
        _check_columns(file, pyarrow.parquet.read_metadata(file).num_columns)


def _check_columns(file: str, num_columns: int) -> None:
    if num_columns > MOST_COLUMNS:
        raise ValueError(
            f"{file} has {num_columns:,} columns, more than {MOST_COLUMNS:,}\n"
            "hint: keep only the columns that are trained on"
        )


def _saved(folder: Path) -> Any:
    """A dataset that `Dataset.save_to_disk` wrote. Raises ValueError if it can't be loaded."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # its own errors, pyarrow's or a KeyError, depending on what is missing
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"can't read dataset {str(folder)!r}: {reason}\nhint: save it again") from None
