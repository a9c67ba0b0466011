"""The local files that `--dataset` names, found without importing datasets or torch."""

import glob
import os
from pathlib import Path

from slm_toolkit.base.user_files import is_dir, is_file, typed_path

FILE_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"by suffix, as `datasets` names its loaders"
MOST_ENTRIES = 200_000
"of a folder, at any depth: a whole disk is no dataset"
_LONGEST_PATH = 1000  # of a pattern's brackets glob.glob takes time by the square


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
