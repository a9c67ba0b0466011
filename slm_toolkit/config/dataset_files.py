"""What `--dataset` names: sources with their weights, and their local files; without importing datasets."""

import glob
import math
import os
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.base.user_files import exists, is_dir, is_file, typed_path

FILE_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"by suffix, as `datasets` names its loaders"
MOST_ENTRIES = 200_000
"of a folder, at any depth: a whole disk is no dataset"
_LONGEST_PATH = 1000  # of a pattern's brackets glob.glob takes time by the square


@dataclass(frozen=True)
class Source:
    """One dataset of several."""

    name: str
    "what its losses are reported under"
    path: str
    "hub id, file, folder or glob"
    weight: float | None
    "share of the sequences, not normalised; None: as many as it has"


def sources_of(text: str) -> tuple[Source, ...]:
    """`A=3,B=1` taken apart; a path that exists as it stands is one dataset, commas or not."""
    parts = [text] if exists(typed_path(text)) else [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"--dataset {text!r} names nothing between commas\nhint: --dataset A=3,B=1")
    pairs = [_path_and_weight(part) for part in parts]
    paths = [path for path, _ in pairs]
    short = [_stem(path) for path in paths]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError(f"--dataset {text} names a dataset twice\nhint: one weight says how much of it")
    return tuple(Source(name, path, weight) for name, (path, weight) in zip(names, pairs, strict=True))


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


def _stem(path: str) -> str:
    """train of data/train.jsonl, c4 of allenai/c4, texts of texts/."""
    name = path.rstrip("/").rpartition("/")[2]
    return Path(name).stem if Path(name).suffix in FILE_FORMATS else name


def is_saved_dataset(dataset: str) -> bool:
    """True for a folder that `Dataset.save_to_disk` wrote."""
    return is_file(typed_path(dataset) / "state.json")


def local_files(dataset: str) -> list[str]:
    """The files of a path, a folder or a glob; empty for what can only be a hub id.

    Raises ValueError, with a hint, where there are none.
    """
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
    if os.path.lexists(path):
        found = [str(path)]  # also where its name has glob's characters, such as [x].jsonl
    else:
        found = sorted(glob.glob(str(path), recursive=True)) if "\0" not in dataset else []
    if odd := [file for file in found if "::" in file]:  # datasets takes what follows for an archive or a URL
        raise ValueError(f"can't read {odd[0]}: '::' in its name\nhint: rename the file")
    if odd := [file for file in found if Path(file).suffix.lower() not in FILE_FORMATS]:
        raise ValueError(f"{odd[0]}: not one of {', '.join(FILE_FORMATS)}\nhint: rename or convert the file")
    if odd := [file for file in found if os.path.lexists(file) and not os.path.isfile(file)]:
        if os.path.exists(odd[0]):
            raise ValueError(
                f"{odd[0]} is no file that can be read again\nhint: a folder, a pipe? give files"
            )
        raise ValueError(
            f"can't read dataset {dataset!r}: {odd[0]}: No such file or directory\nhint: a link to nowhere?"
        )
    looks_local = (
        *(path.suffix.lower() in FILE_FORMATS, any(sign in dataset for sign in "*?[~")),
        *(dataset[:1] in "./", dataset.count("/") > 1),  # a hub id is org/name
    )
    if not found and any(looks_local):
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
            os.path.join(place, name) for name in names if os.path.splitext(name)[1].lower() in FILE_FORMATS
        ]
    if odd := [file for file in found if not os.path.isfile(file)]:
        raise ValueError(f"{odd[0]} is no file that can be read\nhint: remove it, or give files by a glob")
    return sorted(found)
