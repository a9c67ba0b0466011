"""Case: a strategy's files as they stand, read without refusing anything, beside flags, model and machine."""

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

# Host: what a launch from here would find, seen without torch: GPUs, RAM, interfaces, packages.

PACKAGES = (
    *("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "torchao"),
    *("liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels"),
)
_INCLUDE, _LIBRARIES = ("/usr/include", "/usr/local/include"), ("/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class Host:
    """A machine and the shell on it. None is unknown, and nothing is said of it."""

    is_meant: bool = False
    "whether the strategies are to run here; else its disks, RAM and interfaces say nothing"
    gpu_names: tuple[str, ...] = ()
    "as the driver has them"
    num_cores: int | None = None
    ram_bytes: int | None = None
    "that a job may use: of the machine, or of its cgroup"
    free_ram_bytes: int | None = None
    shm_bytes: int | None = None
    "of /dev/shm"
    interfaces: tuple[str, ...] | None = None
    has_libaio: bool | None = None
    "with which DeepSpeed compiles async_io, or it has been compiled"
    has_compiler: bool | None = None
    "for DeepSpeed's CPU Adam, or it has been compiled"
    versions: Mapping[str, str | None] = field(default_factory=dict)
    "of PACKAGES; None: not installed; a package that is no key is unknown"
    variables: Mapping[str, str] = field(default_factory=dict)
    "the environment of the shell"


def look_here(
    *, is_meant: bool, ram_bytes: int | None, free_ram_bytes: int | None, versions: Mapping[str, str]
) -> Host:
    """This machine; `versions`: what to take for installed in place of what is."""
    import psutil

    from slm_toolkit.hardware.gpus import gpus_here, num_cores
    from slm_toolkit.launch.torch_extensions import extensions_folder

    built = {library.stem for library in extensions_folder().rglob("*.so")}
    "that torch compiled here before: DeepSpeed takes them as they are"
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
        versions={**installed(), **versions},
        variables=dict(os.environ),
    )


def installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def parsed_version(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu": enough to compare releases."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", text)[0]))


def is_older(host: Host, package: str, than: str) -> bool:
    """False where the package is not installed or not known."""
    found = host.versions.get(package)
    return found is not None and parsed_version(found) < parsed_version(than)


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
    """A YAML and the DeepSpeed JSON that it names, each as text and as what it says."""

    yaml_path: Path
    yaml_text: str
    "empty where a DeepSpeed JSON was given without a YAML"
    config: dict[str, Any]
    json_path: Path | None = None
    "None without a JSON, and where the one that is named is not found"
    json_text: str = ""
    deepspeed: Any = None
    "the JSON's content; None without one, and where it can't be read"
    json_problem: str | None = None
    "why there is no content"
    duplicates: tuple[tuple[str, tuple[str, ...]], ...] = ()
    "keys that stand twice in the same mapping: the file, yaml or json, and the keys down to it"


@dataclass(frozen=True)
class Case:
    """All that a fault can lie in."""

    name: str
    files: Files
    spec: ModelSpec
    flags: RunConfig
    host: Host
    num_gpus: int
    gpus_per_node: int
    gpu_names: tuple[str, ...] = ()
    "canonical, of the GPUs it is meant for; none: a machine whose GPUs we have no figures of"
    gpus_given: bool = False
    "whether num_gpus was said by the user or counted on this machine, not assumed"

    @property
    def config(self) -> dict[str, Any]:
        return self.files.config

    @property
    def engine(self) -> str:
        """accelerate's word, in capitals; empty where the YAML has none."""
        said = self.config.get("distributed_type")
        return "NO" if said is False else str(said or "").upper()

    def section(self, name: str) -> dict[str, Any]:
        """A mapping of the YAML; empty where there is none, or something else stands there."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def fsdp(self) -> dict[str, Any]:
        """fsdp_config with accelerate's prefix, which it puts before keys that lack it."""
        section = self.section("fsdp_config") if self.engine == "FSDP" else {}
        return {key if str(key).startswith("fsdp") else f"fsdp_{key}": v for key, v in section.items()}

    @property
    def is_fsdp2(self) -> bool:
        return self.engine == "FSDP" and str(self.fsdp.get("fsdp_version", 1)) == "2"

    @property
    def has_json(self) -> bool:
        """Whether a DeepSpeed JSON decides; without one the YAML does."""
        return self.engine == "DEEPSPEED" and isinstance(self.files.deepspeed, dict)

    @property
    def zero(self) -> dict[str, Any]:
        """zero_optimization of the JSON, or as accelerate makes it of the YAML."""
        if self.engine != "DEEPSPEED":
            return {}
        if self.has_json:
            found = self.files.deepspeed.get("zero_optimization")
            return found if isinstance(found, dict) else {}
        section = self.section("deepspeed_config")
        made: dict[str, Any] = {
            "stage": section.get("zero_stage", 2),  # accelerate's default
            "stage3_gather_16bit_weights_on_model_save": section.get("zero3_save_16bit_model"),
        }
        for part in ("offload_optimizer", "offload_param"):
            if str(section.get(f"{part}_device", "none")) != "none":
                made[part] = {"device": section[f"{part}_device"]}
        return made

    @property
    def zero_stage(self) -> int | None:
        """None under another engine, and where it is no stage."""
        stage = self.zero.get("stage", 0)
        if stage == "auto":
            return 2  # accelerate 1.15, DeepSpeedPlugin.zero_stage
        return stage if self.engine == "DEEPSPEED" and stage in (0, 1, 2, 3) else None

    def offload(self, part: str) -> str:
        """none, cpu or nvme: where `offload_optimizer` or `offload_param` puts it, stage aside."""
        section = self.zero.get(part)
        device = section.get("device", "none") if isinstance(section, dict) else "none"
        return "none" if device in (None, "auto") else str(device)

    def deepspeed_edit(self, key: str, value: Any) -> Edit:
        """An edit of the JSON's `key`, which has dots; without a JSON, of the YAML's name for it."""
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
        """That the strategy will be launched on: `num_gpus`, but for a single process."""
        return 1 if self.engine == "NO" else self.num_gpus


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_true(value: object) -> bool:
    return str(value).lower() == "true"


def shown(value: object) -> str:
    """A value as the files write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def located(finding: Finding, case: Case, topic: str) -> Finding:
    """The finding of a check with the path of its file, the name of the strategy, and the check's topic."""
    paths = {"yaml": case.files.yaml_path, "json": case.files.json_path or case.files.yaml_path}
    return replace(
        finding,
        topic=finding.topic or topic,
        file=str(paths[finding.file]) if finding.file else None,
        strategy=case.name if finding.file or finding.edits else None,
    )


def read_files(path: Path) -> Files:
    """Raises ValueError for a file that can't be read or holds no settings; all else is a finding."""
    text = _read(path)
    if path.suffix == ".json" and "distributed_type" not in (content := _parsed_json(path, text)):
        return Files(path, "", yaml_around(path), path.resolve(), text, content, None, _json_duplicates(text))
    config = settings_of(text, path)
    duplicates = tuple(("yaml", keys) for keys in _yaml_duplicates(yaml_node(text, path, hint=_HINT), ()))
    return with_json(Files(path, text, config, duplicates=duplicates))


def with_json(files: Files) -> Files:
    """The files with the JSON that the YAML names, as far as it can be read."""
    section = files.config.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    is_deepspeed = str(files.config.get("distributed_type")).upper() == "DEEPSPEED"
    if named in (None, "none") or not is_deepspeed:
        return files
    found = deepspeed_config_path(str(named), files.yaml_path)
    if found is None:
        problem = f"there is no {named}, neither here nor beside the YAML"
        return Files(**{**vars(files), "json_problem": problem})
    try:
        text = _read(found)
        content = _parsed_json(found, text)
    except ValueError as error:
        problem = str(error).splitlines()[0]
        return Files(**{**vars(files), "json_path": found, "json_problem": problem})
    duplicates = (*files.duplicates, *_json_duplicates(text))
    return Files(files.yaml_path, files.yaml_text, files.config, found, text, content, None, duplicates)


_HINT = "compare with ds_configs/zero2.json"


def _read(path: Path) -> str:
    return read_text(path, hint="give an accelerate YAML file")


def _parsed_json(path: Path, text: str) -> dict[str, Any]:
    content = json_of(text, path, hint=_HINT)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no DeepSpeed settings\nhint: {_HINT}")
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
    """A JSON object as it stands."""

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
