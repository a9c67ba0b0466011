"""Strategy: how the training state is sharded, as an accelerate YAML and its DeepSpeed JSON say."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.config import RunConfig

STUDIED_STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
"what `slm compare` runs when it is not told otherwise"

# The keys that accelerate ignores (with an error) in the YAML when a DeepSpeed JSON is named beside them:
# accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin.
_KEYS_OF_THE_JSON = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}


@dataclass(frozen=True)
class Strategy:
    """What one accelerate configuration asks for: engine, sharding, processes."""

    name: str
    engine: str
    "single, ddp, fsdp1, fsdp2 or deepspeed"
    num_processes: int
    zero_stage: int | None = None
    "DeepSpeed only: 0 to 3"
    reshard_after_forward: bool | None = None
    "FSDP2 only: True is full shard, False is shard grad-op"
    path: str | None = None
    "the YAML file"
    accelerate_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None

    @property
    def sharded_parts(self) -> tuple[str, ...]:
        """The parts of the training state that every rank holds only its share of, between two steps."""
        if self.engine in ("fsdp1", "fsdp2") or self.zero_stage == 3:
            return ("parameters", "gradients", "master_weights", "optimizer")
        if self.zero_stage == 2:
            return ("gradients", "master_weights", "optimizer")
        return ("master_weights", "optimizer") if self.zero_stage == 1 else ()


def config_dir(kind: str) -> Path:
    """The folder of shipped configurations, `accel_configs` or `ds_configs`, in wheel or checkout."""
    package = Path(__file__).parent
    return package / kind if (package / kind).is_dir() else package.parent / kind


def shipped_strategies() -> list[str]:
    return sorted(path.stem for path in config_dir("accel_configs").glob("*.yaml"))


def copy_configs(target: Path) -> list[Path]:
    """Write the shipped YAMLs and JSONs under `target`; refuses to overwrite files that are there."""
    sources = [*config_dir("accel_configs").glob("*.yaml"), *config_dir("ds_configs").glob("*.json")]
    copies = {source: target / source.parent.name / source.name for source in sorted(sources)}
    if present := [str(copy) for copy in copies.values() if copy.exists()]:
        raise ValueError(
            f"{present[0]} exists ({len(present)} such files)\nhint: give an empty folder to --copy"
        )
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return list(copies.values())


def find_strategy(name_or_path: str) -> Strategy:
    """The Strategy of a shipped name (`ddp`) or of a user's YAML file."""
    shipped = config_dir("accel_configs") / f"{name_or_path}.yaml"
    path = shipped if shipped.is_file() else Path(name_or_path).expanduser()
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise ValueError(f"no such file: {name_or_path}\nhint: paths are relative to {Path.cwd()}")
        close = get_close_matches(name_or_path, shipped_strategies(), n=1, cutoff=0.4)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"unknown strategy {name_or_path!r}\n"
            f"hint: {meant}There are {', '.join(shipped_strategies())}, or give a YAML file"
        )
    strategy = read_strategy(path)
    if path.stem in shipped_strategies() and path.resolve().parent != shipped.resolve().parent:
        return dataclasses.replace(strategy, name=f"own-{path.stem}")  # beside ours, rows would look alike
    return strategy


def read_strategy(path: Path) -> Strategy:
    """Read an accelerate YAML and the DeepSpeed JSON it names. Raises ValueError with every problem found."""
    config = _read_yaml(path)
    distributed_type = str(config.get("distributed_type", "NO")).upper()
    num_processes = config.get("num_processes", 1)
    if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
        raise ValueError(
            f"{path}: num_processes is {num_processes!r}\nhint: write a whole number of at least 1"
        )
    common = {
        "name": path.stem,
        "num_processes": num_processes,
        "path": str(path),
        "accelerate_config": config,
    }
    if distributed_type in ("NO", "MULTI_CPU", "MULTI_GPU"):
        return Strategy(engine="single" if distributed_type == "NO" else "ddp", **common)
    if distributed_type == "FSDP":
        fsdp = _mapping(config, "fsdp_config", path)
        if fsdp.get("fsdp_version", 1) != 2:  # accelerate's default, and so no such key, is FSDP1
            return Strategy(engine="fsdp1", **common)
        reshard = fsdp.get("fsdp_reshard_after_forward", True)
        if str(reshard).lower() not in ("true", "false"):
            raise ValueError(
                f"{path}: fsdp_reshard_after_forward is {reshard!r}\nhint: FSDP2 takes true or false"
            )
        return Strategy(engine="fsdp2", reshard_after_forward=str(reshard).lower() == "true", **common)
    if distributed_type == "DEEPSPEED":
        deepspeed = _read_deepspeed_config(
            _mapping(config, "deepspeed_config", path), path, mixed_precision=config.get("mixed_precision")
        )
        stage = deepspeed.get("zero_optimization", {}).get("stage", 0)
        if stage not in (0, 1, 2, 3) or not isinstance(stage, int) or isinstance(stage, bool):
            raise ValueError(f"{path}: ZeRO stage {stage!r}\nhint: zero_optimization.stage is 0, 1, 2 or 3")
        return Strategy(engine="deepspeed", zero_stage=stage, deepspeed_config=deepspeed, **common)
    raise ValueError(
        f"{path}: distributed_type {distributed_type!r} is not supported\n"
        "hint: NO, MULTI_GPU, FSDP or DEEPSPEED"
    )


def deepspeed_config_path(named: str, yaml_path: Path) -> Path | None:
    """Where a `deepspeed_config_file` lies, seen from the working folder as accelerate does, or the YAML."""
    candidates = (Path(named).expanduser(), yaml_path.parent / named, yaml_path.parent.parent / named)
    return next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)


def write_resolved(strategy: Strategy, folder: Path, num_processes: int) -> Path:
    """Write the YAML (and JSON) that will be launched into `folder`, paths absolute; returns the YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**strategy.accelerate_config, "num_processes": num_processes}
    if strategy.engine == "deepspeed" and "deepspeed_config_file" in config["deepspeed_config"]:
        json_path = (folder / "deepspeed.json").resolve()
        json_path.write_text(json.dumps(strategy.deepspeed_config, indent=2) + "\n")
        config["deepspeed_config"] = {**config["deepspeed_config"], "deepspeed_config_file": str(json_path)}
    yaml_path = (folder / f"{strategy.name}.yaml").resolve()
    yaml_path.write_text(yaml.safe_dump(config, sort_keys=False))
    return yaml_path


def contradictions(strategy: Strategy, config: RunConfig) -> list[str]:
    """Where a strategy can't do what the flags ask; a DeepSpeed JSON that says "auto" always can.

    In `stock` the JSON's own clipping and accumulation hold, as they do under a user's own script.
    """
    deepspeed = strategy.deepspeed_config or {}
    flags = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"}
    if config.numerics != "stock":
        flags["gradient_accumulation_steps"] = "gradient_accumulation_steps"
        flags["gradient_clipping"] = "max_grad_norm"
    problems = [
        f"{strategy.path}: the DeepSpeed JSON says {key} {deepspeed[key]}, "
        f"--{flag} says {getattr(config, flag)}"
        for key, flag in flags.items()
        if deepspeed.get(key, "auto") not in ("auto", getattr(config, flag))
    ]
    for dtype, wanted in (("bf16", config.numerics != "fp32"), ("fp16", False)):
        enabled = (deepspeed.get(dtype) or {}).get("enabled", "auto")
        if enabled not in ("auto", wanted):
            problems.append(
                f"{strategy.path}: the DeepSpeed JSON says {dtype}.enabled {str(enabled).lower()}, "
                f"--numerics {config.numerics} needs {str(wanted).lower()}"
            )
    if strategy.engine == "deepspeed":
        where, stage = strategy.path or strategy.name, strategy.zero_stage
        # deepspeed 0.19: bf16 parameters with fp32 gradients make ZeRO-1 the class BF16_Optimizer, with
        # 5 bytes more per parameter after backward (2 ranks); ZeRO-0 has no such option at all
        if config.reduce_dtype == "fp32" and config.numerics in ("aligned", "pure_bf16") and stage < 2:
            problems.append(
                f"{where}: --reduce_dtype fp32 would make ZeRO-{stage} another optimizer: leave "
                f"{strategy.name} out of --strategy"
            )
        if config.numerics == "pure_bf16" and stage < 1:
            problems.append(f"{where}: --numerics pure_bf16 needs ZeRO-1, 2 or 3 under DeepSpeed")
    return problems


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {path}: {error}\nhint: give an accelerate YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"{path} is not YAML{where}: {getattr(error, 'problem', error)}\n"
            "hint: `slm configs --copy DIR` writes good ones"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{path} holds no settings\nhint: `slm configs --copy DIR` writes files to start from"
        )
    return config


def _mapping(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} is {value!r}\nhint: it holds settings, one per indented line")
    return value


def _read_deepspeed_config(section: dict[str, Any], path: Path, *, mixed_precision: object) -> dict[str, Any]:
    """The DeepSpeed configuration that a YAML's `deepspeed_config` section stands for."""
    named = section.get("deepspeed_config_file")
    if named is None:  # the settings stand in the YAML itself
        stage = section.get("zero_stage", 2)  # accelerate's default
        config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        for key in ("gradient_accumulation_steps", "gradient_clipping"):
            if key in section:
                config[key] = section[key]
        for key in ("offload_optimizer", "offload_param"):
            if section.get(f"{key}_device", "none") != "none":
                config["zero_optimization"][key] = {"device": section[f"{key}_device"]}
        _check_shape(config, path)
        return config
    json_path = deepspeed_config_path(str(named), path)
    if json_path is None:
        raise ValueError(
            f"{path}: no deepspeed_config_file {named!r} here or beside the YAML\n"
            "hint: `slm configs --copy DIR` writes both folders"
        )
    try:
        config = json.loads(json_path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{json_path} is not JSON: {error}\nhint: compare with ds_configs/zero2.json"
        ) from None
    zero = config.get("zero_optimization", {}) if isinstance(config, dict) else config
    if not isinstance(zero, dict):
        raise ValueError(
            f"{json_path} holds no DeepSpeed settings but {zero!r}\nhint: compare with ds_configs/zero2.json"
        )
    _check_shape(config, json_path)
    problems = []
    if mixed_precision is not None:
        problems.append(f"{path}: mixed_precision {mixed_precision!r} beside {json_path.name}")
    for key, json_keys in _KEYS_OF_THE_JSON.items():
        if key not in section:
            continue
        value: Any = config
        for json_key in json_keys:
            value = value.get(json_key) if isinstance(value, dict) else None
        problems.append(
            f"{path}: {key} {section[key]!r} contradicts {json_path.name}, "
            f"which says {'.'.join(json_keys)} {value!r}"
        )
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: settings beside a JSON are an error: keep them in the JSON only"
        )
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


# What DeepSpeed 0.19 takes for the keys read here (with a dot: of zero_optimization); null is its default.
_TAKES = (
    ("settings", lambda value: isinstance(value, dict), "bf16 fp16 .offload_optimizer .offload_param"),
    ("true or false", lambda value: isinstance(value, bool), ".overlap_comm .contiguous_gradients"),
    (
        "none, cpu or nvme",
        lambda value: value in ("none", "cpu", "nvme"),
        ".offload_optimizer.device .offload_param.device",
    ),
    (
        'a number or "auto"',
        lambda value: value == "auto" or _is_number(value),
        "gradient_accumulation_steps train_micro_batch_size_per_gpu gradient_clipping .reduce_bucket_size "
        ".stage3_prefetch_bucket_size .stage3_param_persistence_threshold",
    ),
    (
        "a number",
        _is_number,
        ".stage3_max_live_parameters .stage3_max_reuse_distance .sub_group_size "
        ".offload_optimizer.buffer_count .offload_param.buffer_count .offload_param.buffer_size",
    ),
    (
        "a whole number of at least 1",
        lambda value: isinstance(value, int) and _is_number(value) and value >= 1,
        ".zero_hpz_partition_size",
    ),
)


def _check_shape(config: dict[str, Any], path: Path) -> None:
    """Raises one ValueError with every value that is not of the kind that DeepSpeed takes."""
    problems = []
    for wanted, is_right, names in _TAKES:
        for name in names.split():
            full_name = f"zero_optimization{name}" if name.startswith(".") else name
            value: Any = config
            for key in full_name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None and not is_right(value):
                problems.append(f"{path}: {full_name} is {value!r}, not {wanted}")
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: compare with ds_configs/zero3.json")
