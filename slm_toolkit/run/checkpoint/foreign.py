"""Checkpoints that accelerate and DeepSpeed write, read tensor by tensor; nothing in them can run code.

    pytorch_model_fsdp_0/, optimizer_0/           accelerate under FSDP: torch.distributed.checkpoint (DCP)
    pytorch_model_fsdp.bin, optimizer.bin         the same with FULL_STATE_DICT
    latest, pytorch_model/*_optim_states.pt       accelerate or DeepSpeed under ZeRO-1, 2 or 3
    latest_universal, universal/zero/<parameter>  DeepSpeed's ds_to_universal

Both formats are pickles around tensors. A DCP index may name only classes that describe tensors (_OF_INDEX),
and `torch.load` reads everything else with weights_only=True and the classes of _OF_DEEPSPEED. A file with
another class is refused before anything of it is created.
"""

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

from slm_toolkit.run.engine.training_state import WEIGHTS, parameter_name

_ANOTHER = "hint: give the folder that Accelerator.save_state or DeepSpeed's save_checkpoint wrote"
_METADATA = "torch.distributed.checkpoint.metadata"
_OF_INDEX = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *((_METADATA, name) for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("torch", name) for name in ("float64", "float32", "float16", "bfloat16")),
        *(("torch", name) for name in ("int64", "int32", "int16", "int8", "uint8", "bool")),
        *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
        ("collections", "OrderedDict"),
    }
)
"what the index of a DCP folder consists of: module and name of each class or function"
_MOMENT = re.compile(r"(?:optim(?:izer)?\.)?state\.(.+)\.exp_avg")
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


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
    "options of torch's AdamW, if they are known"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[str, torch.Tensor] | None = None
        "the tensor that was read last: a rank may read it in several stretches"

    def read(self, name: str, start: int, size: int) -> torch.Tensor:
        """Return elements `start` to `start + size` of the flattened tensor `kind/parameter`.

        Raises ValueError if elements are missing or can't be read.
        """
        if self._last is None or self._last[0] != name:
            kind, _, parameter = name.partition("/")
            self._last = name, self._whole(kind, parameter)
        tensor = self._last[1]
        if tensor.numel() < start + size:
            missing = f"{start + size - tensor.numel():,} elements of {name}"
            raise ValueError(f"{self.folder} lacks {missing}\n{_ANOTHER}")
        return tensor[start : start + size]

    @abstractmethod
    def _whole(self, kind: str, parameter: str) -> torch.Tensor:
        """Return a whole tensor, flattened."""


def is_foreign(folder: Path) -> bool:
    """Return whether the folder may be a checkpoint of accelerate or DeepSpeed."""
    return any(find(folder) for find in (_index_files, _whole_files, _rank_files, _universal_folders))


def open_foreign(folder: Path) -> ForeignReader:
    """Return a reader of the folder. Raises ValueError if it is incomplete, or may run code."""
    try:
        if _index_files(folder):
            return DcpReader(folder)
        if _whole_files(folder):
            return WholeReader(folder)
        return ZeroReader(folder) if _rank_files(folder) else UniversalReader(folder)
    except OSError as error:
        raise ValueError(f"{folder} can't be read: {error}\n{_ANOTHER}") from None


# ---- torch.distributed.checkpoint


class DcpReader(ForeignReader):
    """A folder of accelerate's FSDP, or any DCP folder with a Hugging Face model and its AdamW."""

    program = "FSDP (torch.distributed.checkpoint)"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sizes: dict[str, torch.Size] = {}
        self._folders: dict[str, Path] = {}
        shard_names: set[str] = set()
        for file in _index_files(folder):
            index = _index(file)
            for key, entry in index.state_dict_metadata.items():
                if hasattr(entry, "size"):
                    self._sizes[key], self._folders[key] = entry.size, file.parent
            shard_names |= {info.relative_path for info in index.storage_data.values()}
        keys = {match[1]: match for key in self._sizes if (match := _MOMENT.fullmatch(key))}
        if not keys:
            raise ValueError(
                f"{folder} contains no moments of AdamW (…state.<parameter>.exp_avg)\n{_ANOTHER}"
            )
        self._state_keys = {
            parameter_name(name): match[0].removesuffix(".exp_avg") for name, match in keys.items()
        }
        self._weight_keys = {
            parameter_name(name): f"model.{name}" if f"model.{name}" in self._sizes else name for name in keys
        }
        self.num_elements = {
            name: math.prod(self._sizes[f"{key}.exp_avg"]) for name, key in self._state_keys.items()
        }
        self.num_processes = max(1, len({name.split("_")[2] for name in shard_names if name.count("_") > 2}))
        steps = {int(self._load(f"{key}.step")) for key in list(self._state_keys.values())[:1]}
        self.num_steps = self.num_optimizer_steps = max(steps)

    def _whole(self, kind: str, parameter: str) -> torch.Tensor:
        key = self._weight_keys if kind == WEIGHTS else self._state_keys
        if parameter not in key:
            raise ValueError(f"{self.folder} lacks {kind} of {parameter}\n{_ANOTHER}")
        return self._load(key[parameter] if kind == WEIGHTS else f"{key[parameter]}.{kind}")

    def _load(self, key: str) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        if key not in self._sizes:
            raise ValueError(f"{self.folder} lacks {key}\n{_ANOTHER}")
        tensor = torch.zeros(self._sizes[key], dtype=torch.float32)
        try:
            with _all_kinds_of_harm(self.folder):
                dcp.load({key: tensor}, storage_reader=_reader_of(self._folders[key]), no_dist=True)
        except dcp.CheckpointException as error:
            raise ValueError(
                f"{self.folder}: {key} can't be read: {_first_line(error)}\n{_ANOTHER}"
            ) from None
        return tensor.view(-1)


def _reader_of(folder: Path) -> Any:
    """Return DCP's own reader of a folder, with the restricted index."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _index(folder / ".metadata")

    return Reader(folder)


def _index(file: Path) -> Any:
    """Return the Metadata of a DCP folder. Raises ValueError if the file does more than describe tensors."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    with file.open("rb") as content, _all_kinds_of_harm(file):
        index = _IndexUnpickler(content).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it contains {type(index).__name__}, not an index")
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        for info in index.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise TypeError(f"it names a file outside its folder: {info.relative_path}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_INDEX:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class WholeReader(ForeignReader):
    """A folder of accelerate's FSDP with FULL_STATE_DICT: two files with whole tensors, by parameter."""

    program = "FSDP (FULL_STATE_DICT)"
    num_processes = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        weights, optimizer = (_load(file) for file in _whole_files(folder))
        with _all_kinds_of_harm(folder):
            self._weights = {parameter_name(name): tensor for name, tensor in weights.items()}
            self._state = {parameter_name(name): state for name, state in optimizer["state"].items()}
            self.num_elements = {name: state["exp_avg"].numel() for name, state in self._state.items()}
            self.num_steps = max(int(state["step"]) for state in self._state.values())
            self.adamw = _adamw_of(optimizer["param_groups"])
        self.num_optimizer_steps = self.num_steps

    def _whole(self, kind: str, parameter: str) -> torch.Tensor:
        tensor = self._weights.get(parameter)
        if kind != WEIGHTS:
            tensor = self._state.get(parameter, {}).get(kind)
        if tensor is None:
            raise ValueError(f"{self.folder} lacks {kind} of {parameter}\n{_ANOTHER}")
        return tensor.detach().reshape(-1).float()


# ---- DeepSpeed


class ZeroReader(ForeignReader):
    """A checkpoint of ZeRO-1, 2 or 3, by any number of ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        files = _rank_files(folder)
        self._ranks = [_load_pt(files[rank])["optimizer_state_dict"] for rank in sorted(files)]
        stage = int(self._ranks[0]["zero_stage"])
        count = self._ranks[0]["partition_count"]
        self.num_processes = max(count) if isinstance(count, list) else count
        if sorted(files) != list(range(self.num_processes)):
            raise ValueError(
                f"{folder} has files of ranks {', '.join(map(str, sorted(files)))}, not of all "
                f"{self.num_processes}\nhint: copy the files of all machines into one folder"
            )
        states = _load_pt(_model_states(files[0].parent))
        if states["mp_world_size"] != 1:
            raise ValueError(f"{folder} was written with tensor parallelism, which can't be read\n{_ANOTHER}")
        self.program = f"DeepSpeed ZeRO-{stage}"
        self.adamw = _adamw_of(self._inner(self._ranks[0])["param_groups"])
        self.num_steps = int(states["global_steps"])
        self._shapes = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
        self.num_elements = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._flat = self._flat_3 if stage == 3 else self._flat_1_2
        self.num_optimizer_steps = self.num_steps - int(states["skipped_steps"])

    def _whole(self, kind: str, parameter: str) -> torch.Tensor:
        if parameter not in self.num_elements:
            raise ValueError(f"{self.folder} lacks {kind} of {parameter}\n{_ANOTHER}")
        whole = torch.cat([part for rank in self._ranks for part in self._flat(rank, kind, parameter)])
        return whole.detach()[: self.num_elements[parameter]].float()

    def _inner(self, rank: dict[str, Any]) -> dict[str, Any]:
        """Return torch's state dict of the optimizer inside ZeRO."""
        inner = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
        if not isinstance(inner, dict):
            raise ValueError(f"{self.folder} is an elastic checkpoint, which can't be read\n{_ANOTHER}")
        return inner

    def _flat_1_2(self, rank: dict[str, Any], kind: str, parameter: str) -> Iterator[torch.Tensor]:
        """Yield a rank's part of a parameter: ranks have consecutive parts of one flat buffer per group."""
        for group, slices in enumerate(rank["param_slice_mappings"]):
            if parameter in slices:
                if kind == WEIGHTS:
                    flat = rank["single_partition_of_fp32_groups"][group]
                else:
                    flat = self._inner(rank)["state"][group][kind]
                place = slices[parameter]
                yield flat[place.start : place.start + place.numel]

    def _flat_3(self, rank: dict[str, Any], kind: str, parameter: str) -> Iterator[torch.Tensor]:
        """Yield a rank's shard of a parameter: all shards are equal, and the last one is padded."""
        start, size = self._shards[parameter]
        first = 0
        for group, weights in enumerate(rank["fp32_flat_groups"]):
            flat = weights if kind == WEIGHTS else self._inner(rank)["state"][group][kind]
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


class UniversalReader(ForeignReader):
    """A checkpoint of DeepSpeed's ds_to_universal: a folder for each parameter."""

    program = "DeepSpeed universal"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self._zero,) = _universal_folders(folder)
        states = _load_pt(_model_states(self._zero.parent))
        self.num_processes, self.num_steps = int(states["dp_world_size"]), int(states["global_steps"])
        shapes = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
        self.num_elements = {name: math.prod(shape) for name, shape in shapes.items()}
        self.num_optimizer_steps = self.num_steps - int(states["skipped_steps"])

    def _whole(self, kind: str, parameter: str) -> torch.Tensor:
        file = self._zero / parameter / ("fp32.pt" if kind == WEIGHTS else f"{kind}.pt")
        content = _load_pt(file)
        tensor = content["param"] if isinstance(content, dict) else content
        return tensor.detach().reshape(-1)[: self.num_elements[parameter]].float()


def _load_pt(file: Path) -> Any:
    """Return the content of a .pt file of DeepSpeed. Raises ValueError if it may be more than data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return _load(file)


def _load(file: Path) -> Any:
    with _all_kinds_of_harm(file):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _adamw_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of AdamW's first group."""
    return {name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay") if name in groups[0]}


# ---- files


def _index_files(folder: Path) -> list[Path]:
    """Return the indices of DCP: the folder's own, or those of its subfolders."""
    own = folder / ".metadata"
    return [own] if own.is_file() else sorted(folder.glob("*/.metadata"))


def _whole_files(folder: Path) -> list[Path]:
    files = [folder / "pytorch_model_fsdp.bin", folder / "optimizer.bin"]
    return files if all(file.is_file() for file in files) else []


def _rank_files(folder: Path) -> dict[int, Path]:
    """Return the optimizer states of each rank under ZeRO."""
    found = {}
    for path in sorted(_tagged(folder, "latest").glob("*_optim_states.pt")):
        if match := _RANK.fullmatch(path.name):
            found[int(match[1])] = path
    return found


def _universal_folders(folder: Path) -> list[Path]:
    zero = _tagged(folder, "latest_universal") / "zero"
    return [zero] if zero.is_dir() else []


def _tagged(folder: Path, file: str) -> Path:
    """Return the subfolder that DeepSpeed's file `latest` names; without it, the folder itself."""
    try:
        tag = (folder / file).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return folder
    return folder / tag if tag and Path(tag).name == tag else folder


def _model_states(folder: Path) -> Path:
    """Return rank 0's description of the parameters."""
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


@contextmanager
def _all_kinds_of_harm(file: Path) -> Iterator[None]:
    """Turn whatever a damaged or malicious file raises into ValueError."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a pickle may raise anything
        if type(error) is ValueError and "hint: " in str(error):
            raise
        raise ValueError(f"{file} is refused: {_first_line(error)}\n{_ANOTHER}") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
