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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
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


@dataclass
class ForeignReader:
    """Reads any stretch of any tensor of another program's checkpoint, as `files.Reader` does of ours."""

    folder: Path
    program: str
    "what wrote it, such as DeepSpeed ZeRO-3"
    num_processes: int
    num_steps: int
    "finished steps of the run"
    num_optimizer_steps: int
    num_elements: dict[str, int]
    "elements of each trained parameter, by its name in the Hugging Face model"
    parts: Callable[[str, str], Iterable[torch.Tensor]]
    """returns a tensor, given its kind and parameter, in parts: 1-D, checked by `_flat`, one after the other;
    the end may be padding"""
    adamw: dict[str, Any] = field(default_factory=dict)
    "options of the first group of torch's AdamW, if they are known"
    last: tuple[str, torch.Tensor] | None = None
    "the tensor that was read last: a rank may read it in several stretches"

    def read(self, name: str, start: int, size: int) -> torch.Tensor:
        """Return elements `start` to `start + size` of the flattened tensor `kind/parameter`, in fp32.

        Raises ValueError if elements are missing or can't be read.
        """
        with _as_value_error(self.folder):
            if self.last is None or self.last[0] != name:
                kind, _, parameter = name.partition("/")
                if parameter not in self.num_elements:
                    raise ValueError(f"it lacks {kind} of {parameter}")
                whole = torch.cat(list(self.parts(kind, parameter)))
                self.last = name, whole[: self.num_elements[parameter]].float()
            stretch = self.last[1][start : start + size]
            if len(stretch) < size:
                raise ValueError(f"it lacks {size - len(stretch):,} elements of {name}")
        return stretch


def is_foreign(folder: Path) -> bool:
    """Return whether the folder may be a checkpoint of accelerate or DeepSpeed."""
    return any(find(folder) for find in _OPENERS)


def open_foreign(folder: Path) -> ForeignReader:
    """Return a reader of the folder. Raises ValueError if it is incomplete, or may run code."""
    with _as_value_error(folder):
        reader = next(opened for find, opened in _OPENERS.items() if find(folder))(folder)
        if not 0 <= reader.num_optimizer_steps <= reader.num_steps <= _MOST_STEPS:
            raise ValueError(f"it says that {reader.num_steps} steps are done")
        return reader


# ---- torch.distributed.checkpoint


def _open_dcp(folder: Path) -> ForeignReader:
    """Open a folder of accelerate's FSDP, or any DCP folder with a Hugging Face model and its AdamW."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, list[_Shard]] = {}
    for file in _index_files(folder):
        with _as_value_error(file):
            _read_index(file, shapes, shards)
    keys = {}  # by parameter: of its weights, of its state
    for match in filter(None, map(_MOMENT.fullmatch, shapes)):
        of_model = f"model.{match[2]}"
        keys[parameter_name(match[2])] = of_model if of_model in shapes else match[2], match[1]
    if not keys:
        raise ValueError("it contains no moments of AdamW (state.<parameter>.exp_avg)")
    num_elements = {name: math.prod(shapes[f"{state}.exp_avg"]) for name, (_, state) in keys.items()}

    def read(key: str, size: int) -> torch.Tensor:
        if key not in shapes:
            raise ValueError(f"it lacks {key}")
        if math.prod(shapes[key]) != size:
            raise ValueError(f"{key} has {math.prod(shapes[key]):,} elements, not {size:,}")
        return _put_together(key, shapes[key], shards.get(key, []))

    def parts(kind: str, parameter: str) -> list[torch.Tensor]:
        weights, state = keys[parameter]
        return [read(weights if kind == WEIGHTS else f"{state}.{kind}", num_elements[parameter])]

    names = {file.name for of_tensor in shards.values() for file, *_ in of_tensor}
    ranks = {name.lstrip("_").partition("_")[0] for name in names}  # __<rank>_<number>.distcp
    (_, state), *_ = keys.values()
    steps = int(read(f"{state}.step", 1))
    program = "FSDP (torch.distributed.checkpoint)"
    return ForeignReader(folder, program, len(ranks), steps, steps, num_elements, parts)


def _read_index(file: Path, shapes: dict[str, tuple[int, ...]], shards: dict[str, list[_Shard]]) -> None:
    """Add the shapes of a DCP folder's tensors, and where their parts are.

    Raises ValueError if the index names a file outside its folder.
    """
    content = read_bytes(file, what="", hint=_ANOTHER, limit_bytes=2**28)
    index = _IndexUnpickler(io.BytesIO(content)).load()
    for key, entry in index.state_dict_metadata.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            shapes[key] = tuple(map(int, entry.size.arguments[0]))
    for place, info in index.storage_data.items():
        path = file.parent / info.relative_path
        if Path(info.relative_path).name != info.relative_path or not path.is_file():
            raise ValueError(f"it names the file {info.relative_path!r}, which is not in its folder")
        if not 0 <= info.offset <= info.offset + info.length <= path.stat().st_size:
            raise ValueError(f"{path.name} is shorter than it says")
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its shards are compressed, which can't be read")
        if place.fqn in shapes:
            first = place.offset.arguments[0] if place.offset else (0,) * len(shapes[place.fqn])
            shards.setdefault(place.fqn, []).append((path, info.offset, info.length, tuple(first)))


def _put_together(key: str, shape: tuple[int, ...], shards: list[_Shard]) -> torch.Tensor:
    """Return a whole tensor, flattened. Raises ValueError if a part is missing or is no tensor."""
    whole_size, num_read = math.prod(shape), 0
    # an element takes two bytes or more, so a small file can't claim a large tensor
    if 2 * whole_size > sum(length for _, _, length, _ in shards):
        raise ValueError(f"the files are too small for {key}")
    whole = torch.zeros(shape, dtype=torch.float32)
    for file, start, length, firsts in shards:
        with file.open("rb") as content, _as_value_error(file):
            content.seek(start)
            data = io.BytesIO(content.read(length))
            part = _checked(torch.load(data, map_location="cpu", weights_only=True))
        area = [slice(first, first + size) for first, size in zip(firsts, part.shape, strict=True)]
        whole[tuple(area)] = part
        num_read += part.numel()
    if num_read != whole_size:
        raise ValueError(f"it has {num_read:,} of the {whole_size:,} elements of {key}")
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


def _open_whole(folder: Path) -> ForeignReader:
    """Open a folder of accelerate's FSDP with FULL_STATE_DICT: two files with whole tensors, by parameter."""
    weights, optimizer = (_load(file) for file in _whole_files(folder))
    weights = {parameter_name(name): tensor for name, tensor in weights.items()}
    states = {parameter_name(name): state for name, state in optimizer["state"].items()}

    def parts(kind: str, parameter: str) -> list[torch.Tensor]:
        return [_flat(weights[parameter] if kind == WEIGHTS else states[parameter][kind])]

    steps = int(next(iter(states.values()))["step"])
    num_elements = {name: _checked(state["exp_avg"]).numel() for name, state in states.items()}
    adamw = _adamw_of(optimizer["param_groups"])
    return ForeignReader(folder, "FSDP (FULL_STATE_DICT)", 1, steps, steps, num_elements, parts, adamw)


# ---- DeepSpeed


def _open_zero(folder: Path) -> ForeignReader:
    """Open a checkpoint of ZeRO-1, 2 or 3, by any number of ranks."""
    files = _rank_files(folder)
    ranks = [_load_pt(file)["optimizer_state_dict"] for _, file in sorted(files.items())]
    stage = int(ranks[0].get("zero_stage", 1))  # DeepSpeed's BF16_Optimizer does not say it
    count = ranks[0]["partition_count"]
    num_ranks = int(max(count) if isinstance(count, list) else count)
    if num_ranks != len(files) or max(files) != len(files) - 1:
        found = f"{len(files)} files, the last of rank {max(files)}"
        raise ValueError(f"{num_ranks} ranks wrote it, but it has {found}")
    inners = [rank.get("base_optimizer_state", rank.get("optimizer_state_dict")) for rank in ranks]
    if not all(isinstance(inner, dict) for inner in inners):
        raise ValueError("it is an elastic checkpoint, which can't be read")
    states = _load_pt(_model_states(files[0].parent))
    if states["mp_world_size"] != 1:
        raise ValueError("it was written with tensor parallelism, which can't be read")
    if states.get("frozen_param_shapes"):
        raise ValueError("some of its parameters are frozen, which can't be read")
    raw_shapes = {raw: shape for group in states["param_shapes"] for raw, shape in group.items()}
    raw_names = {parameter_name(raw): raw for raw in raw_shapes}
    num_elements = {name: math.prod(raw_shapes[raw]) for name, raw in raw_names.items()}
    sizes = {name: -(-size // num_ranks) for name, size in num_elements.items()}
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    of_weights = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def parts(kind: str, parameter: str) -> Iterator[torch.Tensor]:
        for rank, inner in zip(ranks, inners, strict=True):
            flats = rank[of_weights]
            if kind != WEIGHTS:
                flats = [inner["state"][group][kind] for group in range(len(flats))]
            if stage == 3:
                yield from _shard(flats, starts[parameter], sizes[parameter])
                continue
            # ranks have consecutive parts of one flat buffer per group
            for flat, slices in zip(flats, rank["param_slice_mappings"], strict=True):
                if (place := slices.get(raw_names[parameter])) is not None:
                    yield _flat(flat)[place.start : place.start + place.numel]

    steps = int(states["global_steps"])
    return ForeignReader(
        folder,
        f"DeepSpeed ZeRO-{stage}",
        num_ranks,
        steps,
        steps - int(states["skipped_steps"]),
        num_elements,
        parts,
        _adamw_of(inners[0]["param_groups"]),
    )


def _shard(flats: list[torch.Tensor], start: int, size: int) -> Iterator[torch.Tensor]:
    """Yield a rank's shard of a parameter under ZeRO-3: all shards are equal, and the last one is padded."""
    for flat in map(_flat, flats):  # one after the other
        yield flat[max(0, start) : max(0, start + size)]
        start -= len(flat)


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


_OPENERS = {_index_files: _open_dcp, _whole_files: _open_whole, _rank_files: _open_zero}
"what finds a program's files in a folder, and what opens them"


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
