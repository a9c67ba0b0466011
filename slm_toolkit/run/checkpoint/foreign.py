"""Checkpoints that accelerate and DeepSpeed write, read tensor by tensor; no code in them is run.

    pytorch_model_fsdp_0/, optimizer_0/           accelerate under FSDP: torch.distributed.checkpoint (DCP)
    pytorch_model_fsdp.bin, optimizer.bin         the same with FULL_STATE_DICT
    latest, pytorch_model/*_optim_states.pt       accelerate or DeepSpeed under ZeRO-1, 2 or 3

All are pickles around tensors. The index of a DCP folder is unpickled with stand-ins in place of whatever it
names: new classes of ours that only keep what they are given. So nothing is called or changed, and the shards
are read here, not by DCP. Every other file is read by `torch.load` with weights_only=True, DeepSpeed's with
the classes of `_load_pt`. A small file that claims a large tensor is refused.
"""

import io
import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from slm_toolkit.base.user_files import read_bytes
from slm_toolkit.run.engine.training_state import WEIGHTS, parameter_name

_ANOTHER = "give the folder that Accelerator.save_state or DeepSpeed's save_checkpoint wrote"
_MOST_STEPS = 10**12
_MOMENT = re.compile(r"((?:optim(?:izer)?\.)?state\.(.+))\.exp_avg")
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
"of AdamW"
_Shard = tuple[Path, int, int, tuple[int, ...]]
"a rectangular part of a tensor: file, first byte, number of bytes, its first element in the whole tensor"


class ForeignReader(ABC):
    """Reads any stretch of any tensor of another program's checkpoint, as `files.Reader` does of ours."""

    program: str
    "what wrote it, such as DeepSpeed ZeRO-3"
    num_processes: int
    num_steps: int
    "finished steps of the run"
    num_optimizer_steps: int
    num_elements: dict[str, int]
    "elements of each trained parameter, by its name in the Hugging Face model"
    adamw: Mapping[str, Any] = MappingProxyType({})
    "options of the first group of torch's AdamW, if they are known"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[str, torch.Tensor] | None = None
        "the tensor that was read last: a rank may read it in several stretches"

    def read(self, name: str, start: int, size: int) -> torch.Tensor:
        """Return elements `start` to `start + size` of the flattened tensor `kind/parameter`, in fp32.

        Raises ValueError if elements are missing or can't be read.
        """
        if self._last is None or self._last[0] != name:
            kind, _, parameter = name.partition("/")
            with _as_value_error(self.folder):
                if parameter not in self.num_elements:
                    raise ValueError(f"it lacks {kind} of {parameter}")
                parts = list(self._parts(kind, parameter))
                found, expected = sum(len(part) for part in parts), self.num_elements[parameter]
                if found < expected:
                    raise ValueError(f"it lacks {expected - found:,} elements of {name}")
                self._last = name, torch.cat(parts)[:expected].float()
        if start + size > len(self._last[1]):
            missing = f"{start + size - len(self._last[1]):,} elements of {name}"
            raise ValueError(f"{self.folder} lacks {missing}\nhint: {_ANOTHER}")
        return self._last[1][start : start + size]

    @abstractmethod
    def _parts(self, kind: str, parameter: str) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts: 1-D, checked by `_flat`, one after the other; the end may be padding."""


def is_foreign(folder: Path) -> bool:
    """Return whether the folder may be a checkpoint of accelerate or DeepSpeed."""
    return any(find(folder) for find in _READERS.values())


def open_foreign(folder: Path) -> ForeignReader:
    """Return a reader of the folder. Raises ValueError if it is incomplete, or may run code."""
    with _as_value_error(folder):
        reader = next(kind for kind, find in _READERS.items() if find(folder))(folder)
        if not 0 <= reader.num_optimizer_steps <= reader.num_steps <= _MOST_STEPS:
            raise ValueError(f"it says that {reader.num_steps} steps are done")
        return reader


# ---- torch.distributed.checkpoint


class DcpReader(ForeignReader):
    """A folder of accelerate's FSDP, or any DCP folder with a Hugging Face model and its AdamW."""

    program = "FSDP (torch.distributed.checkpoint)"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, list[_Shard]] = {}
        for file in _index_files(folder):
            with _as_value_error(file):
                self._add_index(file)
        self._keys: dict[str, tuple[str, str]] = {}  # by parameter: of its weights, of its state
        for match in filter(None, map(_MOMENT.fullmatch, self._shapes)):
            raw = match[2]
            weights = f"model.{raw}" if f"model.{raw}" in self._shapes else raw
            self._keys[parameter_name(raw)] = weights, match[1]
        if not self._keys:
            raise ValueError("it contains no moments of AdamW (state.<parameter>.exp_avg)")
        self.num_elements = {
            name: math.prod(self._shapes[f"{state}.exp_avg"]) for name, (_, state) in self._keys.items()
        }
        names = {file.name for shards in self._shards.values() for file, *_ in shards}
        ranks = {name.lstrip("_").partition("_")[0] for name in names}  # __<rank>_<number>.distcp
        self.num_processes = len(ranks)
        (first, *_) = self._keys.values()
        self.num_steps = self.num_optimizer_steps = int(self._read(f"{first[1]}.step", 1))

    def _add_index(self, file: Path) -> None:
        """Read the shapes of a DCP folder's tensors, and where their parts are.

        Raises ValueError if the index names a file outside its folder.
        """
        index = _IndexUnpickler(
            io.BytesIO(read_bytes(file, what="", hint=_ANOTHER, limit_bytes=2**28))
        ).load()
        for key, entry in index.state_dict_metadata.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                self._shapes[key] = tuple(map(int, entry.size.arguments[0]))
        for place, info in index.storage_data.items():
            path = file.parent / info.relative_path
            if Path(info.relative_path).name != info.relative_path or not path.is_file():
                raise ValueError(f"it names the file {info.relative_path!r}, which is not in its folder")
            if not 0 <= info.offset <= info.offset + info.length <= path.stat().st_size:
                raise ValueError(f"{path.name} is shorter than it says")
            if getattr(info, "transform_descriptors", None):
                raise ValueError("its shards are compressed, which can't be read")
            if place.fqn in self._shapes:
                offset = place.offset.arguments[0] if place.offset else (0,) * len(self._shapes[place.fqn])
                shard = path, info.offset, info.length, tuple(offset)
                self._shards.setdefault(place.fqn, []).append(shard)

    def _parts(self, kind: str, parameter: str) -> Iterator[torch.Tensor]:
        weights, state = self._keys[parameter]
        key = weights if kind == WEIGHTS else f"{state}.{kind}"
        yield self._read(key, self.num_elements[parameter])

    def _read(self, key: str, num_elements: int) -> torch.Tensor:
        """Return a whole tensor, flattened. Raises ValueError if it has another number of elements."""
        if key not in self._shapes:
            raise ValueError(f"it lacks {key}")
        shape, shards = self._shapes[key], self._shards.get(key, [])
        if math.prod(shape) != num_elements:
            raise ValueError(f"{key} has {math.prod(shape):,} elements, not {num_elements:,}")
        # an element takes two bytes or more, so a small file can't claim a large tensor
        if 2 * num_elements > sum(length for _, _, length, _ in shards):
            raise ValueError(f"the files are too small for {key}")
        whole, num_read = torch.zeros(shape, dtype=torch.float32), 0
        for file, start, length, offsets in shards:
            with file.open("rb") as content, _as_value_error(file):
                content.seek(start)
                data = io.BytesIO(content.read(length))
                part = _checked(torch.load(data, map_location="cpu", weights_only=True))
            ends = [first + size for first, size in zip(offsets, part.shape, strict=True)]
            whole[tuple(map(slice, offsets, ends))] = part
            num_read += part.numel()
        if num_read != num_elements:
            raise ValueError(f"it has {num_read:,} of the {num_elements:,} elements of {key}")
        return whole.view(-1)


class _StandIn:
    """Keeps what a pickle gives it, in place of a class or function of torch."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_StandIn]:
        """Return a new class of ours for every name: whatever a pickle does to it, no other class changes."""
        return type(name, (dict if name == "OrderedDict" else _StandIn,), {})


class WholeReader(ForeignReader):
    """A folder of accelerate's FSDP with FULL_STATE_DICT: two files with whole tensors, by parameter."""

    program = "FSDP (FULL_STATE_DICT)"
    num_processes = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        weights, optimizer = (_load(file) for file in _whole_files(folder))
        self._weights = {parameter_name(name): tensor for name, tensor in weights.items()}
        self._state = {parameter_name(name): state for name, state in optimizer["state"].items()}
        self.num_elements = {name: _checked(state["exp_avg"]).numel() for name, state in self._state.items()}
        (first, *_) = self._state.values()
        self.num_steps = self.num_optimizer_steps = int(first["step"])
        self.adamw = _adamw_of(optimizer["param_groups"])

    def _parts(self, kind: str, parameter: str) -> Iterator[torch.Tensor]:
        yield _flat(self._weights[parameter] if kind == WEIGHTS else self._state[parameter][kind])


# ---- DeepSpeed


class ZeroReader(ForeignReader):
    """A checkpoint of ZeRO-1, 2 or 3, by any number of ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        files = _rank_files(folder)
        first = _load_pt(files[min(files)])["optimizer_state_dict"]
        stage = int(first.get("zero_stage", 1))  # DeepSpeed's BF16_Optimizer does not say it
        count = first["partition_count"]
        self.num_processes = int(max(count) if isinstance(count, list) else count)
        if self.num_processes != len(files) or max(files) != len(files) - 1:
            found = f"{len(files)} files, the last of rank {max(files)}"
            raise ValueError(f"{self.num_processes} ranks wrote it, but it has {found}")
        self._ranks = [_load_pt(files[rank])["optimizer_state_dict"] for rank in sorted(files)]
        states = _load_pt(_model_states(files[0].parent))
        self.num_elements, self._raw = _parameters(states)
        self.num_steps, self.num_optimizer_steps = _steps(states)
        self.program = f"DeepSpeed ZeRO-{stage}"
        self.adamw = _adamw_of(self._inner(first)["param_groups"])
        self._is_stage_3 = stage == 3

    def _parts(self, kind: str, parameter: str) -> Iterator[torch.Tensor]:
        for rank in self._ranks:
            yield from (self._of_3 if self._is_stage_3 else self._of_1_2)(rank, kind, parameter)

    def _inner(self, rank: dict[str, Any]) -> dict[str, Any]:
        """Return torch's state dict of the optimizer inside ZeRO."""
        inner = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
        if not isinstance(inner, dict):
            raise ValueError("it is an elastic checkpoint, which can't be read")
        return inner

    def _of_1_2(self, rank: dict[str, Any], kind: str, parameter: str) -> Iterator[torch.Tensor]:
        """Yield a rank's part of a parameter: ranks have consecutive parts of one flat buffer per group."""
        for group, slices in enumerate(rank["param_slice_mappings"]):
            if (place := slices.get(self._raw[parameter])) is not None:
                if kind == WEIGHTS:
                    flat = rank["single_partition_of_fp32_groups"][group]
                else:
                    flat = self._inner(rank)["state"][group][kind]
                yield _flat(flat)[place.start : place.start + place.numel]

    def _of_3(self, rank: dict[str, Any], kind: str, parameter: str) -> Iterator[torch.Tensor]:
        """Yield a rank's shard of a parameter: all shards are equal, and the last one is padded."""
        start, size = self._shards[parameter]
        first = 0
        for group, weights in enumerate(rank["fp32_flat_groups"]):
            flat = _flat(weights if kind == WEIGHTS else self._inner(rank)["state"][group][kind])
            if start < first + len(flat) and start + size > first:
                yield flat[max(0, start - first) : start + size - first]
            first += len(flat)

    @cached_property
    def _shards(self) -> dict[str, tuple[int, int]]:
        """Start and size of each parameter's shard in a rank's flat groups, one after the other."""
        shards, start = {}, 0
        for name, size in self.num_elements.items():
            shard = -(-size // self.num_processes)
            shards[name] = start, shard
            start += shard
        return shards


def _parameters(states: dict[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the elements of each parameter, and its name in DeepSpeed's files, both by its own name."""
    if states["mp_world_size"] != 1:
        raise ValueError("it was written with tensor parallelism, which can't be read")
    if states.get("frozen_param_shapes"):
        raise ValueError("some of its parameters are frozen, which can't be read")
    sizes, raw_names = {}, {}
    for group in states["param_shapes"]:
        for raw, shape in group.items():
            sizes[parameter_name(raw)] = math.prod(shape)
            raw_names[parameter_name(raw)] = raw
    return sizes, raw_names


def _steps(states: dict[str, Any]) -> tuple[int, int]:
    """Return finished steps, and those that changed the weights."""
    return int(states["global_steps"]), int(states["global_steps"]) - int(states["skipped_steps"])


def _load_pt(file: Path) -> Any:
    """Return the content of a .pt file of DeepSpeed. Raises ValueError if it may be more than data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return _load(file)


# ---- files and tensors


def _load(file: Path) -> Any:
    with _as_value_error(file):
        if not file.is_file():
            raise ValueError("it is no file")
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _checked(tensor: Any) -> torch.Tensor:
    """Return a tensor of floats whose elements are all there. Raises ValueError for everything else."""
    if (
        not isinstance(tensor, torch.Tensor)
        or not tensor.is_floating_point()
        or tensor.layout != torch.strided
    ):
        raise ValueError("an entry is no tensor of floating-point numbers")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise ValueError("a tensor claims more elements than it has")
    return tensor.detach()


def _flat(tensor: Any) -> torch.Tensor:
    return _checked(tensor).reshape(-1)


def _adamw_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of AdamW's first group."""
    return {name: groups[0][name] for name in _OPTIONS if name in groups[0]}


def _index_files(folder: Path) -> list[Path]:
    """Return the indices of DCP: the folder's own, or those of its subfolders."""
    own = folder / ".metadata"
    return [own] if own.is_file() else sorted(file for file in folder.glob("*/.metadata") if file.is_file())


def _whole_files(folder: Path) -> list[Path]:
    files = [folder / "pytorch_model_fsdp.bin", folder / "optimizer.bin"]
    return files if all(file.is_file() for file in files) else []


def _rank_files(folder: Path) -> dict[int, Path]:
    """Return the optimizer states of each rank under ZeRO. Raises ValueError for two files of one rank."""
    found: dict[int, Path] = {}
    for path in sorted(_tagged(folder).glob("*_optim_states.pt")):
        match = _RANK.fullmatch(path.name)
        if match and (other := found.setdefault(int(match[1]), path)) != path:
            raise ValueError(
                f"{path.parent} has two files of rank {match[1]}: {other.name} and {path.name}\n"
                "hint: delete those of the older run"
            )
    return found


def _tagged(folder: Path) -> Path:
    """Return the subfolder that DeepSpeed's file `latest` names; without it, the folder itself."""
    if not (folder / "latest").is_file():
        return folder
    tag = read_bytes(folder / "latest", what="", hint=_ANOTHER).decode(errors="replace").strip()
    return folder / tag if tag not in ("", ".", "..") and Path(tag).name == tag else folder


def _model_states(folder: Path) -> Path:
    """Return rank 0's description of the parameters."""
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


_READERS = {DcpReader: _index_files, WholeReader: _whole_files, ZeroReader: _rank_files}
"each reader, and what finds its files in a folder"


@contextmanager
def _as_value_error(path: Path) -> Iterator[None]:
    """Turn any error of reading a damaged or malicious file into a ValueError that names the path."""
    try:
        yield
    except Exception as error:  # a pickle may raise anything
        if isinstance(error, ValueError) and "hint: " in str(error):
            raise
        said = next(iter(str(error).strip().splitlines()), "")
        if isinstance(error, pickle.UnpicklingError):
            said = "it contains more than tensors and numbers, or is damaged"
        elif isinstance(error, KeyError):
            said = f"it lacks the entry {said}"
        raise ValueError(f"{path} is refused: {said or type(error).__name__}\nhint: {_ANOTHER}") from None
