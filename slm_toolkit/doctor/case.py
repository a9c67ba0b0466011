"""Case: the files of a strategy, read without refusing any setting, with flags, model and machine."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import json_of, read_text, yaml_node
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.strategy.deepspeed_json import deepspeed_config_path, settings_of_yaml
from slm_toolkit.strategy.settings import ZeroSettings, deepspeed_settings, is_true, value_at
from slm_toolkit.strategy.strategy import settings_of, yaml_around

# Host: the GPUs, RAM, network interfaces and packages of this machine, read without importing torch.


@dataclass(frozen=True)
class Host:
    """A machine and its shell. A field that is None is unknown and is not checked."""

    is_meant: bool = False
    "whether the strategies will run on this machine; if not, its disks and RAM are not checked"
    gpu_names: tuple[str, ...] = ()
    "the names that the driver reports"
    num_cores: int | None = None
    ram_bytes: int | None = None
    "RAM that a job may use: the machine's, or the limit of the job's cgroup"
    free_ram_bytes: int | None = None
    shm_bytes: int | None = None
    "size of /dev/shm"
    torch: str | None = None
    "the installed version"
    variables: Mapping[str, str] = field(default_factory=dict)
    "environment variables of the shell"


def look_here(*, is_meant: bool, ram_bytes: int | None, free_ram_bytes: int | None) -> Host:
    """Return the Host of this machine."""
    from slm_toolkit.hardware.gpus import gpus_here, num_cores

    return Host(
        is_meant=is_meant,
        gpu_names=gpus_here(),
        num_cores=num_cores(),
        ram_bytes=ram_bytes,
        free_ram_bytes=free_ram_bytes,
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        torch=version("torch"),
        variables=dict(os.environ),
    )


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
    duplicates: tuple[tuple[str, ...], ...] = ()
    "keys that appear twice in the same mapping of the YAML"


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

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        """The JSON's content, or what accelerate builds from the YAML; empty under other engines."""
        if self.has_json or self.engine != "DEEPSPEED":
            return self.files.deepspeed if self.has_json else {}
        return settings_of_yaml(self.section("deepspeed_config"))

    @cached_property
    def zero_settings(self) -> ZeroSettings:
        """zero_optimization with DeepSpeed's defaults, and accelerate's sizes in place of "auto"."""
        settings = deepspeed_settings(self.deepspeed, stage=self.zero_stage or 0)
        return settings.zero_optimization.of_width(self.spec.hidden_size)

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage, 0 to 3; None under another engine, or if the value is not a stage."""
        stage = value_at(self.deepspeed, ("zero_optimization", "stage")) or 0
        if stage == "auto":
            return 2  # accelerate 1.15, DeepSpeedPlugin.zero_stage
        return stage if self.engine == "DEEPSPEED" and stage in (0, 1, 2, 3) else None

    def offload(self, part: str) -> str:
        """Return the device of `offload_optimizer` or `offload_param`: none, cpu or nvme, at any stage."""
        return getattr(self.zero_settings, part).device

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


def is_of_cpus(config: Mapping[str, Any]) -> bool:
    """Return True for a YAML of CPUs; accelerate obeys `use_cpu` under distributed_type NO only."""
    engine = str(config.get("distributed_type") or "NO").upper()
    return engine == "MULTI_CPU" or (engine == "NO" and is_true(config.get("use_cpu")))


def as_written(value: object) -> str:
    """Return a value as it is written in the files; "absent" for None."""
    if value is None:
        return "absent"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def read_files(path: Path) -> Files:
    """Read a YAML and the JSON that it names, or a DeepSpeed JSON alone.

    Raises ValueError if the file can't be read or has no settings; all other faults become findings.
    """
    text = read_text(path, hint="give an accelerate YAML file")
    config = settings_of(text, path)
    if path.suffix == ".json" and "distributed_type" not in config:
        return Files(path, "", yaml_around(path), path.resolve(), text, config)
    duplicates = tuple(_duplicates(yaml_node(text, path, hint=_HINT)))
    return with_json(Files(path, text, config, duplicates=duplicates))


def with_json(files: Files) -> Files:
    """Add the DeepSpeed JSON that the YAML names, if it can be read; otherwise a launch refuses the YAML."""
    named = value_at(files.config, ("deepspeed_config", "deepspeed_config_file"))
    is_deepspeed = str(files.config.get("distributed_type")).upper() == "DEEPSPEED"
    if named in (None, "none") or not is_deepspeed:
        return files
    path = deepspeed_config_path(str(named), files.yaml_path)
    try:
        text = read_text(path, hint=_HINT) if path else ""
        content = json_of(text, path, hint=_HINT)
    except ValueError:
        return files
    return replace(files, json_path=path, json_text=text, deepspeed=content)


_HINT = "compare with ds_configs/zero2.json"


def _duplicates(node: yaml.Node, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of keys that appear twice in the same mapping."""
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    counts = Counter(str(key.value) for key, _ in entries)
    yield from ((*above, name) for name, count in counts.items() if count > 1)
    for key, below in entries:
        yield from _duplicates(below, (*above, str(key.value)))
