"""Case: the files of a strategy, read without refusing any setting, with flags, model and machine."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import json_of, read_text, yaml_node
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.finding import Edit, Finding, in_json, in_yaml
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON, deepspeed_config_path
from slm_toolkit.strategy.strategy import settings_of, yaml_around

# Host: the GPUs, RAM, network interfaces and packages of this machine, read without importing torch.

PACKAGES = (
    *("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "torchao"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "kernels"),
)
_INCLUDE, _LIBRARIES = ("/usr/include", "/usr/local/include"), ("/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class Host:
    """A machine and its shell. A field that is None is unknown and is not checked."""

    is_meant: bool = False
    "whether the strategies will run on this machine; if not, its disks, RAM and interfaces are not checked"
    gpu_names: tuple[str, ...] = ()
    "the names that the driver reports"
    num_cores: int | None = None
    ram_bytes: int | None = None
    "RAM that a job may use: the machine's, or the limit of the job's cgroup"
    free_ram_bytes: int | None = None
    shm_bytes: int | None = None
    "size of /dev/shm"
    interfaces: tuple[str, ...] | None = None
    has_libaio: bool | None = None
    "whether DeepSpeed can compile async_io, or has compiled it before"
    has_compiler: bool | None = None
    "whether DeepSpeed can compile its CPU Adam, or has compiled it before"
    versions: Mapping[str, str | None] = field(default_factory=dict)
    "version by name of PACKAGES; None: not installed; no key: unknown"
    variables: Mapping[str, str] = field(default_factory=dict)
    "environment variables of the shell"


def look_here(*, is_meant: bool, ram_bytes: int | None, free_ram_bytes: int | None) -> Host:
    """Return the Host of this machine."""
    import psutil

    from slm_toolkit.hardware.gpus import gpus_here, num_cores
    from slm_toolkit.launch.torch_extensions import extensions_folder

    built = {library.stem for library in extensions_folder().rglob("*.so")}
    "extensions that torch compiled here before; DeepSpeed loads them instead of compiling again"
    return Host(
        is_meant=is_meant,
        gpu_names=gpus_here(),
        num_cores=num_cores(),
        ram_bytes=ram_bytes,
        free_ram_bytes=free_ram_bytes,
        shm_bytes=_size_of("/dev/shm"),
        interfaces=tuple(psutil.net_if_addrs()),
        has_libaio="async_io" in built or (_finds(_INCLUDE, "libaio.h") and _finds(_LIBRARIES, "libaio.so*")),
        has_compiler="cpu_adam" in built or shutil.which(os.environ.get("CXX", "c++")) is not None,
        versions=installed(),
        variables=dict(os.environ),
    )


def installed() -> dict[str, str | None]:
    """Return the installed version of each of PACKAGES; None: not installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def parsed_version(text: str) -> tuple[int, ...]:
    """Return a version's numbers for comparison: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", text)[0]))


def is_older(host: Host, package: str, than: str) -> bool:
    """Return True if the package's version is below `than`; False if it is not installed or not known."""
    installed_version = host.versions.get(package)
    return installed_version is not None and parsed_version(installed_version) < parsed_version(than)


def _finds(folders: tuple[str, ...], name: str) -> bool:
    patterns = (name, f"*/{name}")  # /usr/lib/x86_64-linux-gnu
    return any(next(Path(folder).glob(pattern), None) for folder in folders for pattern in patterns)


def _size_of(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:  # no such file system
        return None
    return status.f_frsize * status.f_blocks


@dataclass(frozen=True)
class Files:
    """A YAML and the DeepSpeed JSON that it names, each as text and parsed."""

    yaml_path: Path
    yaml_text: str
    "empty if a DeepSpeed JSON was given without a YAML"
    config: dict[str, Any]
    json_path: Path | None = None
    "None if the YAML names no JSON, or the named file does not exist"
    json_text: str = ""
    deepspeed: Any = None
    "the JSON's content; None if there is no JSON, or it can't be read"
    json_problem: str | None = None
    "why the JSON's content could not be read"
    duplicates: tuple[tuple[str, tuple[str, ...]], ...] = ()
    "keys that appear twice in the same mapping: the file (yaml or json), and the path of keys"


@dataclass(frozen=True)
class Case:
    """Everything that doctor checks for faults."""

    name: str
    files: Files
    spec: ModelSpec
    flags: RunConfig
    host: Host
    num_gpus: int
    gpus_per_node: int
    gpu_names: tuple[str, ...] = ()
    "canonical names of the target GPUs; empty if this machine's GPUs are not in our table"
    gpus_given: bool = False
    "whether the user gave num_gpus or it was counted on this machine; False: it is assumed"

    @property
    def config(self) -> dict[str, Any]:
        return self.files.config

    @property
    def engine(self) -> str:
        """accelerate's distributed_type in capitals; empty if the YAML has none."""
        distributed_type = self.config.get("distributed_type")
        return "NO" if distributed_type is False else str(distributed_type or "").upper()

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the YAML; an empty dict if it is absent or not a mapping."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def fsdp(self) -> dict[str, Any]:
        """fsdp_config with the prefix `fsdp_` before every key; accelerate adds it where it is missing."""
        section = self.section("fsdp_config") if self.engine == "FSDP" else {}
        return {key if str(key).startswith("fsdp") else f"fsdp_{key}": v for key, v in section.items()}

    @property
    def is_fsdp2(self) -> bool:
        return self.engine == "FSDP" and str(self.fsdp.get("fsdp_version", 1)) == "2"

    @property
    def has_json(self) -> bool:
        """Whether DeepSpeed's settings come from a JSON; otherwise they come from the YAML."""
        return self.engine == "DEEPSPEED" and isinstance(self.files.deepspeed, dict)

    @property
    def zero(self) -> dict[str, Any]:
        """zero_optimization from the JSON, or as accelerate builds it from the YAML."""
        if self.engine != "DEEPSPEED":
            return {}
        if self.has_json:
            content = self.files.deepspeed.get("zero_optimization")
            return content if isinstance(content, dict) else {}
        section = self.section("deepspeed_config")
        zero: dict[str, Any] = {
            "stage": section.get("zero_stage", 2),  # accelerate's default
            "stage3_gather_16bit_weights_on_model_save": section.get("zero3_save_16bit_model"),
        }
        for part in ("offload_optimizer", "offload_param"):
            if str(section.get(f"{part}_device", "none")) != "none":
                zero[part] = {"device": section[f"{part}_device"]}
        return zero

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage, 0 to 3; None under another engine, or if the value is not a stage."""
        stage = self.zero.get("stage", 0)
        if stage == "auto":
            return 2  # accelerate 1.15, DeepSpeedPlugin.zero_stage
        return stage if self.engine == "DEEPSPEED" and stage in (0, 1, 2, 3) else None

    def offload(self, part: str) -> str:
        """Return the device of `offload_optimizer` or `offload_param`: none, cpu or nvme, at any stage."""
        section = self.zero.get(part)
        device = section.get("device", "none") if isinstance(section, dict) else "none"
        return "none" if device in (None, "auto") else str(device)

    def deepspeed_edit(self, key: str, value: Any) -> Edit:
        """Return an edit of the JSON's `key` (with dots), or of the YAML's equivalent if there is no JSON."""
        if self.has_json:
            return in_json(key, value)
        names = {".".join(keys): name for name, keys in KEYS_OF_THE_JSON.items()}
        return in_yaml(f"deepspeed_config.{names.get(key) or names[f'{key}.device']}", value)

    @property
    def num_machines(self) -> int:
        count = self.config.get("num_machines", 1)
        return count if is_count(count) else 1

    @property
    def num_processes(self) -> int | None:
        count = self.config.get("num_processes", 1 if self.engine == "NO" else None)
        return count if is_count(count) else None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that a launch starts: `num_gpus`, or 1 under distributed_type NO."""
        return 1 if self.engine == "NO" else self.num_gpus


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_true(value: object) -> bool:
    return str(value).lower() == "true"


def as_written(value: object) -> str:
    """Return a value as it is written in the files."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def located(finding: Finding, case: Case, topic: str) -> Finding:
    """Fill in a finding's file path, the name of its strategy and, if missing, its topic."""
    paths = {"yaml": case.files.yaml_path, "json": case.files.json_path or case.files.yaml_path}
    return replace(
        finding,
        topic=finding.topic or topic,
        file=str(paths[finding.file]) if finding.file else None,
        strategy=case.name if finding.file or finding.edits else None,
    )


def read_files(path: Path) -> Files:
    """Read a YAML and the JSON that it names, or a DeepSpeed JSON alone.

    Raises ValueError if the file can't be read or has no settings; all other faults become findings.
    """
    text = _read(path)
    if path.suffix == ".json" and "distributed_type" not in (content := _parsed_json(path, text)):
        return Files(path, "", yaml_around(path), path.resolve(), text, content, None, _json_duplicates(text))
    config = settings_of(text, path)
    duplicates = tuple(("yaml", keys) for keys in _yaml_duplicates(yaml_node(text, path, hint=_HINT), ()))
    return with_json(Files(path, text, config, duplicates=duplicates))


def with_json(files: Files) -> Files:
    """Add the DeepSpeed JSON that the YAML names, or `json_problem` if it can't be read."""
    section = files.config.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    is_deepspeed = str(files.config.get("distributed_type")).upper() == "DEEPSPEED"
    if named in (None, "none") or not is_deepspeed:
        return files
    path = deepspeed_config_path(str(named), files.yaml_path)
    if path is None:
        problem = f"{named} not found, neither in this folder nor next to the YAML"
        return Files(**{**vars(files), "json_problem": problem})
    try:
        text = _read(path)
        content = _parsed_json(path, text)
    except ValueError as error:
        problem = str(error).splitlines()[0]
        return Files(**{**vars(files), "json_path": path, "json_problem": problem})
    duplicates = (*files.duplicates, *_json_duplicates(text))
    return Files(files.yaml_path, files.yaml_text, files.config, path, text, content, None, duplicates)


_HINT = "compare with ds_configs/zero2.json"


def _read(path: Path) -> str:
    return read_text(path, hint="give an accelerate YAML file")


def _parsed_json(path: Path, text: str) -> dict[str, Any]:
    content = json_of(text, path, hint=_HINT)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains no DeepSpeed settings\nhint: {_HINT}")
    return content


def _yaml_duplicates(node: yaml.Node | None, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        keys = (*above, str(key.value))
        if key.value in seen:
            yield keys
        seen.add(key.value)
        yield from _yaml_duplicates(value, keys)


@dataclass
class _Pairs:
    """A JSON object as a list of pairs, in which a key may appear twice."""

    items: list[tuple[str, Any]] = field(default_factory=list)


def _json_duplicates(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    def walk(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not isinstance(value, _Pairs):
            return
        names = [name for name, _ in value.items]
        yield from ((*above, name) for name in dict.fromkeys(names) if names.count(name) > 1)
        for name, below in value.items:
            yield from walk(below, (*above, name))

    whole = json.loads(text, object_pairs_hook=lambda pairs: _Pairs(pairs))
    return tuple(("json", keys) for keys in dict.fromkeys(walk(whole, ())))
