"""The sources of `--dataset`, with their weights and local files. Does not import datasets."""

import glob
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.base.user_files import exists, is_dir, is_file, typed_path

# suffix: name of the loader in `datasets`
FILE_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_HUB_CONFIGURATION = r"(\w[\w.-]*(?:/[\w.-]+)?):([^:/*?]+)"
_LOCAL = r"^[./]|[*?[~]|/.*/"  # a hub id is org/name


@dataclass(frozen=True)
class Source:
    """One dataset of several."""

    name: str
    "name under which its losses are reported"
    path: str
    "hub id, file, folder or glob"
    weight: float | None
    "share of the sequences, not normalised; None: all of its sequences"
    configuration: str | None = None
    "of a hub dataset with several"


def sources_of(text: str) -> tuple[Source, ...]:
    """Split `A=3,B:CONFIGURATION=1` into sources.

    A path that exists is one dataset, even if it has commas.
    """
    parts = [text] if exists(typed_path(text)) else [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"--dataset {text!r} has an empty name between commas\nhint: --dataset A=3,B=1")
    pairs = [_path_and_weight(part) for part in parts]
    typed = [path for path, _ in pairs]
    paths, configurations = zip(*map(_path_and_configuration, typed), strict=True)
    # train for data/train.jsonl, c4 for allenai/c4:en, texts for texts/
    short = [Path(path).stem if Path(path).suffix in FILE_FORMATS else Path(path).name for path in paths]
    names = [
        name if name and short.count(name) == 1 else path for name, path in zip(short, typed, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"--dataset {text} names a dataset twice\nhint: name it once, with a weight")
    weights = [weight for _, weight in pairs]
    return tuple(map(Source, names, paths, weights, configurations))


def _path_and_weight(part: str) -> tuple[str, float | None]:
    path, equals, number = part.rpartition("=")
    if not equals or exists(typed_path(part)):
        return part, None
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not 0 < weight < math.inf:
        raise ValueError(f"--dataset {part}: the weight {number!r} is not a number above 0")
    return path, weight


def _path_and_configuration(path: str) -> tuple[str, str | None]:
    found = re.fullmatch(_HUB_CONFIGURATION, path)
    if not found or Path(path).suffix in FILE_FORMATS or exists(typed_path(path)):
        return path, None
    return found[1], found[2]


def is_saved_dataset(dataset: str) -> bool:
    """True if `Dataset.save_to_disk` wrote this folder."""
    return is_file(typed_path(dataset) / "state.json")


def local_files(dataset: str) -> list[str]:
    """Return the files of a path, folder or glob; an empty list if the text can only be a hub id.

    Raises ValueError, with a hint, if there are no files.
    """
    path = typed_path(dataset)
    found: list[str] = []
    if is_dir(path):
        found = _files_under(path)
    elif os.path.lexists(path):
        found = [str(path)]  # even if its name has characters of a glob, such as [x].jsonl
    elif "\0" not in dataset:
        found = sorted(glob.glob(str(path), recursive=True))
    for file in found:
        if "::" in file:  # datasets reads the rest as an archive or a URL
            raise ValueError(f"can't read {file}: '::' in its name\nhint: rename the file")
        if Path(file).suffix.lower() not in FILE_FORMATS:
            raise ValueError(f"{file}: not one of {', '.join(FILE_FORMATS)}\nhint: rename or convert it")
        if not os.path.isfile(file):
            raise ValueError(f"{file} is a broken link, a folder or a pipe\nhint: give files, or a glob")
    looks_local = path.suffix.lower() in FILE_FORMATS or re.search(_LOCAL, dataset)
    if not found and looks_local:
        raise ValueError(f"no such file: {dataset}\nhint: paths are relative to {Path.cwd()}")
    return found


def _files_under(folder: Path) -> list[str]:
    """Return the data files of a folder at any depth. Links to folders are not followed."""
    found = [
        os.path.join(below, name)
        for below, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in FILE_FORMATS
    ]
    if not found:
        raise ValueError(f"{folder} has no .txt, .jsonl or .parquet file\nhint: give a folder that has some")
    return sorted(found)
