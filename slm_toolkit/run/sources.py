"""The rows of a dataset: local files of several kinds, a folder that `datasets` saved, or the hub."""

import glob
import math
import os
from pathlib import Path
from typing import Any

from slm_toolkit.config import RunConfig
from slm_toolkit.config_data import Source
from slm_toolkit.disk_full import DISK_FULL
from slm_toolkit.hub import check_hub
from slm_toolkit.run.bad_data import StreamedRows, fault_in, first_line
from slm_toolkit.run.formats import format_of, unreadable_text
from slm_toolkit.user_files import is_dir, is_file, typed_path

STREAM_ABOVE_BYTES = 2**30
MOST_ENTRIES = 200_000
"of a folder, at any depth, that are looked at: the whole disk is no dataset"
_LONGEST_PATH = 1000  # of a pattern's brackets glob.glob takes time by the square
_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_rows(source: Source, config: RunConfig) -> tuple[Any, bool, str]:
    """The rows of one dataset through `datasets`, whether they are streamed, and their format.

    Raises ValueError, with a hint, for data that isn't there, can't be read or holds nothing.
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

    folder = typed_path(source.path)
    if is_file(folder / "state.json"):  # of Dataset.save_to_disk
        rows = _saved(folder)
        if not config.streaming:
            return rows, False
        return StreamedRows(rows.to_iterable_dataset(), source.path, {}), True
    files = _local_files(source.path)
    if files:
        kinds = {_FORMATS[Path(file).suffix.lower()] for file in files}
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
        origin = {"path": kinds.pop(), "data_files": files}
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
        rows = load_dataset(**origin, split="train", streaming=streaming)
        next(iter(rows), None)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"can't find dataset {source.path!r}: {str(error).splitlines()[0]}\n"
            "hint: give a hub id, or .txt, .jsonl or .parquet files by path, folder or glob"
        ) from None
    except (
        Exception
    ) as error:  # datasets raises its own and pyarrow's for files that are not what their names say
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
            raise error.__cause__ from None  # of the cache
        reason = fault_in(files) or first_line(error.__cause__ or error)
        raise ValueError(
            f"can't read dataset {source.path!r}: {reason}\nhint: is it UTF-8 and well-formed?"
        ) from None
    return (StreamedRows(rows, source.path, sizes) if streaming else rows), streaming


def _sizes(dataset: str, files: list[str]) -> dict[str, int]:
    """Bytes of each file. Raises ValueError for one that went away meanwhile, or is a link to nowhere."""
    try:
        return {file: Path(file).stat().st_size for file in files}
    except OSError as error:
        raise ValueError(
            f"can't read dataset {dataset!r}: {error.filename}: {error.strerror}\n"
            "hint: was it there when the run began? is it a link to nowhere?"
        ) from None


def _local_files(dataset: str) -> list[str]:
    """Files that a path, a folder or a glob names; empty for what can only be a hub id."""
    path = typed_path(dataset)
    if len(dataset) > _LONGEST_PATH:
        raise ValueError(f"no such file: {dataset}\nhint: a path has at most {_LONGEST_PATH:,} characters")
    if is_dir(path):
        found = _files_under(path)
        if not found:
            raise ValueError(
                f"{dataset} holds no .txt, .jsonl or .parquet file\nhint: give a folder that does"
            )
        return found
    found = sorted(glob.glob(str(path), recursive=True)) if "\0" not in dataset else []
    if odd := [file for file in found if Path(file).suffix.lower() not in _FORMATS]:
        raise ValueError(f"{odd[0]}: not one of {', '.join(_FORMATS)}\nhint: rename or convert the file")
    if odd := [file for file in found if os.path.lexists(file) and not os.path.isfile(file)]:
        if os.path.exists(odd[0]):
            raise ValueError(
                f"{odd[0]} is no file that can be read again\nhint: a folder, a pipe? give files"
            )
        raise ValueError(
            f"can't read dataset {dataset!r}: {odd[0]}: No such file or directory\nhint: a link to nowhere?"
        )
    looks_local = (
        path.suffix.lower() in _FORMATS or any(sign in dataset for sign in "*?[~") or dataset[:1] in "./"
    )
    if not found and looks_local:
        raise ValueError(f"no such file: {dataset}\nhint: paths are relative to {Path.cwd()}")
    return found


def _files_under(folder: Path) -> list[str]:
    """At any depth, links to folders not followed; of pipes and devices, none."""
    found, num_entries = [], 0
    for place, folders, names in os.walk(folder):
        num_entries += len(folders) + len(names)
        if num_entries > MOST_ENTRIES:
            raise ValueError(
                f"{folder} holds over {MOST_ENTRIES:,} files\nhint: give the folder of the data alone"
            )
        found += [
            os.path.join(place, name) for name in names if os.path.splitext(name)[1].lower() in _FORMATS
        ]
    if odd := [file for file in found if not os.path.isfile(file)]:
        raise ValueError(f"{odd[0]} is no file that can be read\nhint: remove it, or give files by a glob")
    return sorted(found)


def _saved(folder: Path) -> Any:
    """What `Dataset.save_to_disk` wrote. Raises ValueError for what it did not, or not whole."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # its own, pyarrow's and KeyErrors, by what is missing
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"can't read dataset {str(folder)!r}: {reason}\nhint: save it again") from None
