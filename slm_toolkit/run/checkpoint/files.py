"""Files of a checkpoint: stretches of tensors in safetensors files, and a manifest with their checksums.

    checkpoints/step_6/checkpoint.json       the run, the elements in each file, the SHA-256 of each file
    checkpoints/step_6/rank_0.safetensors    rank 0's share: flat tensors, `weights/<parameter>`, ...

There is no pickle, so reading a checkpoint runs no code. A folder named step_<k> is complete, because it gets
that name after all files are written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from safetensors import SafetensorError, safe_open

from slm_toolkit.base.typed_files import field_problem
from slm_toolkit.base.user_files import read_bytes
from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.record.saved_files import put_in_place, sync

if TYPE_CHECKING:
    import torch

FORMAT = 3
"format 1 was accelerate's, with one format per engine; format 2 did not describe its data"
MANIFEST_FILE = "checkpoint.json"
_HINT = "resume from another checkpoint"
_MANIFEST_BYTES = 2**28
_MOST_STEPS = 10**12
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]
DATA, NUM_HELD_OUT = "data", "num_held_out"
"keys of a run's description: a list of its data; the number of sequences held out of a stream"


@dataclass(frozen=True)
class RankFile:
    """The file that one rank wrote."""

    name: Annotated[str, msgspec.Meta(pattern=r"^rank_\d+\.safetensors$")]
    num_bytes: Count
    sha256: str
    starts: dict[str, Count]
    "for each tensor in the file: the index of its first element in the whole, flattened tensor"
    sizes: dict[str, Count]


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except its tensors."""

    step: Count
    "finished steps of the run"
    optimizer_steps: Count
    "finished steps that changed the weights"
    order: Count
    "one more than that of the newest checkpoint in the folder; dates are unreliable because clocks jump"
    run: dict[str, Any]
    "see `run_description`: settings that a resuming run must share"
    written_by: dict[str, Any]
    "see `launch_description`: the launch that wrote the checkpoint"
    frozen: str | None
    "fingerprint of the frozen weights under an adapter"
    scaler: dict[str, Any] | None
    "state of fp16's gradient scaler"
    num_elements: dict[str, Count]
    "elements of each whole tensor"
    files: tuple[RankFile, ...]


def step_name(step: int) -> str:
    return f"step_{step}"


def file_of_rank(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def write_rank_file(folder: Path, rank: int, tensors: dict[str, tuple[int, torch.Tensor]]) -> RankFile:
    """Write {name: (start, 1-D CPU tensor)} and sync it to disk; no two tensors may share memory.

    Raises OSError, for example on a full disk.
    """
    from safetensors.torch import save_file

    path = folder / file_of_rank(rank)
    try:
        save_file({name: tensor for name, (_, tensor) in tensors.items()}, path)
    except SafetensorError as error:  # it contains only the text of Rust's io::Error
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else 5, str(error), str(path)) from None
    path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return RankFile(
        name=path.name,
        num_bytes=path.stat().st_size,
        sha256=digest,
        starts={name: start for name, (start, _) in tensors.items()},
        sizes={name: tensor.numel() for name, (_, tensor) in tensors.items()},
    )


def unfinished(folder: Path, step: int, token: str) -> Path:
    """Return the folder of a checkpoint that is not complete yet; `token` differs between launches."""
    return folder / f".{step_name(step)}.{token}.unfinished"


def finish(unfinished_folder: Path, manifest: Manifest) -> Path:
    """Write the manifest next to the ranks' files and rename the folder, which makes the checkpoint exist.

    An older checkpoint of the same step stays until then, even if the process is killed.
    """
    final = unfinished_folder.parent / step_name(manifest.step)
    with (unfinished_folder / MANIFEST_FILE).open("w") as file:
        content = dataclasses.asdict(manifest)
        json.dump({"format": FORMAT, "sha256": digest_of(content), **content}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(unfinished_folder)
    put_in_place(unfinished_folder, final)
    return final


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises ValueError if it is unreadable or changed after it was written."""
    path = checkpoint / MANIFEST_FILE
    data = read_bytes(path, what="", hint=_HINT, limit_bytes=_MANIFEST_BYTES)
    try:
        content = msgspec.json.decode(data)
        version = content.pop("format")
        is_as_written = content.pop("sha256") == digest_of(content)
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError):
        raise ValueError(f"{path} is not a checkpoint manifest of this version\nhint: {_HINT}") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, but this version reads {FORMAT}\nhint: {_HINT}")
    try:
        manifest = msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        changed = f"{path} has changed since it was written: {field_problem(error)}"
        raise ValueError(f"{changed}\nhint: {_HINT}") from None
    if not is_as_written:
        raise ValueError(f"{path} has changed since it was written\nhint: {_HINT}")
    # a run of an earlier version did what is the default of a flag that came later
    defaults = {name: flag.default for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    return dataclasses.replace(manifest, run=defaults | manifest.run)


def damage(checkpoint: Path, files: tuple[RankFile, ...]) -> str | None:
    """Describe the first fault in these files of a checkpoint; None if they are as they were written."""
    for file in files:
        path = checkpoint / file.name
        try:
            size = path.stat().st_size
            if not path.is_file():
                return f"{path} is not a file"
            if size != file.num_bytes:
                return f"{path} has {size:,} bytes, but {file.num_bytes:,} were written"
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                    return f"{path} has changed since it was written"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return None


class Checkpoint:
    """A checkpoint; reads any stretch of any of its tensors, whichever ranks wrote it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._open: dict[str, Any] = {}

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int, str]]]:
        """For each tensor, its parts: (first element, last element + 1, file)."""
        places: dict[str, list[tuple[int, int, str]]] = {}
        for file in self.manifest.files:
            for name, start in file.starts.items():
                places.setdefault(name, []).append((start, start + file.sizes[name], file.name))
        return {name: sorted(parts) for name, parts in places.items()}

    def read(self, name: str, start: int, size: int) -> torch.Tensor:
        """Return elements `start` to `start + size` of the flattened tensor.

        Raises ValueError if elements are missing.
        """
        import torch

        parts, read_to, end = [], start, start + size
        for first, last, file in self._places.get(name, []):
            if first <= read_to < min(last, end):
                part = self._tensor(file, name)
                parts.append(part[read_to - first : min(end, last) - first])
                read_to = min(end, last)
        if read_to < end:
            raise ValueError(
                f"{self.path} lacks {end - read_to:,} elements of {name}, starting at {read_to:,}\n"
                f"hint: {_HINT}"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of_rank(self, rank: int, name: str) -> torch.Tensor | None:
        """Return rank `rank`'s own tensor of this name; None if the checkpoint does not contain it."""
        file = file_of_rank(rank)
        is_saved = any(file == other for *_, other in self._places.get(name, []))
        return self._tensor(file, name)[:] if is_saved else None

    def _tensor(self, file: str, name: str) -> Any:
        """Return a tensor of a file, for slicing."""
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file} can't be read: {error}\nhint: {_HINT}") from None
        return self._open[file].get_slice(name)


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, without the format and the hash itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
