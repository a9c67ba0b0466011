"""Strategy: engine and sharding of a training, read from an accelerate YAML and its DeepSpeed JSON."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.safe_files import make_folder, write_beside, write_new
from slm_toolkit.base.secrets import check_no_secrets
from slm_toolkit.base.user_files import check_name, is_file, json_of, read_text, typed_path, yaml_of
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.strategy.deepspeed_json import is_deepspeed_config, read_deepspeed_config
from slm_toolkit.strategy.settings import (
    DeepSpeedSettings,
    FsdpSettings,
    Sharding,
    deepspeed_settings,
    fsdp_settings,
    is_true,
    parallel_sizes,
    value_at,
)

# the default strategies of `slm compare`
STUDIED_STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")


@dataclass(frozen=True)
class Strategy:
    """Engine, sharding and number of processes of one accelerate configuration.

    Every setting is parsed from the content of the YAML and the JSON, once per Strategy.
    `dataclasses.replace` with other content parses again, so content and parsed values always agree.
    """

    name: str
    engine: str
    "single, ddp, fsdp1, fsdp2 or deepspeed"
    num_processes: int
    zero_stage: int | None = None
    "DeepSpeed only: 0 to 3"
    reshard_after_forward: bool | None = None
    "FSDP2 only: True is full shard, False is shard grad-op"
    path: str | None = None
    "the YAML file, or a DeepSpeed JSON that was given without a YAML"
    accelerate_config: dict[str, Any] | None = field(default=None, hash=False)
    "content of the YAML; None if only environment variables define the strategy"
    deepspeed_config: dict[str, Any] | None = field(default=None, hash=False)
    "content of the JSON"

    @property
    def is_single(self) -> bool:
        """Whether one process trains without any engine."""
        return self.engine == "single"

    @property
    def is_replicated(self) -> bool:
        """Whether each rank keeps the whole training state: DDP, or a single process."""
        return self.engine in ("single", "ddp")

    @property
    def is_fsdp(self) -> bool:
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def is_fsdp1(self) -> bool:
        return self.engine == "fsdp1"

    @property
    def is_fsdp2(self) -> bool:
        return self.engine == "fsdp2"

    @property
    def is_deepspeed(self) -> bool:
        return self.engine == "deepspeed"

    @property
    def is_zero_0(self) -> bool:
        return self.zero_stage == 0

    @property
    def is_zero_1(self) -> bool:
        return self.zero_stage == 1

    @property
    def is_zero_3(self) -> bool:
        return self.zero_stage == 3

    @property
    def offloads_part_of_optimizer(self) -> bool:
        """Whether a DeepSpeed JSON offloads only part of the optimizer state (`ratio` is not 1)."""
        return self.is_deepspeed and self.deepspeed.zero_optimization.offload_optimizer.ratio != 1.0

    @property
    def quantizes_communication(self) -> bool:
        """Whether ZeRO++ sends weights or gradients as integers."""
        if self.deepspeed is None:
            return False
        zero = self.deepspeed.zero_optimization
        return bool(zero.zero_quantized_weights or zero.zero_quantized_gradients)

    @property
    def swap_folders(self) -> set[str]:
        """The folders to which DeepSpeed swaps tensors; every training uses the same file names in them."""
        if self.deepspeed is None:
            return set()
        zero = self.deepspeed.zero_optimization
        parts = (zero.offload_optimizer, zero.offload_param)
        return {part.nvme_path for part in parts if part.device == "nvme" and part.nvme_path is not None}

    @property
    def builds_in_shards(self) -> bool:
        """Whether ZeRO-3 shards each tensor of the model as soon as it is built: zero3_init_flag."""
        return self.sharding.zero_init

    @property
    def checkpoints_activations(self) -> bool:
        """Whether the YAML turns on accelerate's activation checkpointing of every layer."""
        return self.fsdp is not None and self.fsdp.activation_checkpointing

    @cached_property
    def deepspeed(self) -> DeepSpeedSettings | None:
        """DeepSpeed's settings; None under other engines."""
        if not self.is_deepspeed:
            return None
        return deepspeed_settings(self.deepspeed_config or {}, stage=self.zero_stage or 0)

    @cached_property
    def fsdp(self) -> FsdpSettings | None:
        """FSDP's settings; None under other engines."""
        return fsdp_settings(self._section("fsdp_config")) if self.is_fsdp else None

    @cached_property
    def parallel_sizes(self) -> Mapping[str, int]:
        """The five sizes of the YAML's parallelism_config; a size that is absent is 1."""
        return parallel_sizes(self._section("parallelism_config"))

    @cached_property
    def sharding(self) -> Sharding:
        """The placement of the training state."""
        if self.deepspeed:
            zero = self.deepspeed.zero_optimization
            hpz = zero.zero_hpz_partition_size
            in_stage_3 = {
                "parameter_device": zero.offload_param.device,
                "secondary_ranks": 1 if hpz == "auto" else hpz,
                # accelerate's default is true at stage 3
                "zero_init": is_true(self._section("deepspeed_config").get("zero3_init_flag", True)),
            }
            return Sharding(
                optimizer_device=zero.offload_optimizer.device, **(in_stage_3 if self.is_zero_3 else {})
            )
        if self.fsdp is None:
            return Sharding()
        device = "cpu" if self.fsdp.offloads_params else "none"
        copies, ranks = self.parallel_sizes["dp_replicate_size"], self.parallel_sizes["dp_shard_size"]
        is_grouped = self.is_fsdp2 and ranks > 1
        return Sharding(
            reshard_after_forward=(
                self.fsdp.reshards if self.is_fsdp1 else self.reshard_after_forward is not False
            ),
            optimizer_device=device,
            parameter_device=device,
            node_holds_copy=self.is_fsdp1 and "HYBRID" in str(self.fsdp.sharding_strategy),
            copy_ranks=ranks if is_grouped else None,
            num_copies=copies if is_grouped else None,
        )

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only its shard of the parameters between two steps."""
        return "parameters" in self.sharded_parts

    @property
    def sharded_parts(self) -> tuple[str, ...]:
        """The parts of the training state of which a rank keeps only its shard between two steps."""
        stage = 3 if self.is_fsdp else self.zero_stage
        return ("parameters", "gradients", "master_weights", "optimizer")[3 - stage :] if stage else ()

    @property
    def offloads(self) -> bool:
        """Whether part of the training state is offloaded to the host's RAM or disk."""
        return (self.sharding.optimizer_device, self.sharding.parameter_device) != ("none", "none")

    @property
    def simplicity(self) -> int:
        """The place of this strategy if strategies are sorted from the simplest to the most complex.

        The order: single, DDP, ZeRO-1, shard grad-op, ZeRO-2, full shard, hybrid shard, ZeRO-3, offload. A
        strategy that keeps more of the training state whole on each GPU has fewer settings that can go wrong,
        and its checkpoints and errors are easier to read.
        """
        if self.offloads:
            return 8
        if self.is_replicated:
            return 0 if self.is_single else 1
        if self.is_deepspeed:
            return (1, 2, 4, 7)[self.zero_stage]
        if not self.sharding.reshard_after_forward:
            return 3
        return 6 if self.sharding.is_hybrid else 5

    @property
    def num_machines(self) -> int:
        """Number of nodes in the YAML; 1 if it names none."""
        return (self.accelerate_config or {}).get("num_machines") or 1

    @property
    def mixed_precision(self) -> str | None:
        """The mixed_precision of the files: no, bf16, fp16 or fp8; None if no file sets it."""
        config = self.accelerate_config or {}
        if (precision := config.get("mixed_precision")) is not None:
            return "no" if precision is False else str(precision).lower()  # YAML: unquoted no is false
        in_json = value_at(self.deepspeed_config, ("fp16", "enabled")) is True
        return "fp16" if config.get("fp16") or in_json else None  # `fp16` is accelerate's older key

    @property
    def deepspeed_config_file(self) -> str | None:
        """The DeepSpeed JSON that the YAML names, or None."""
        named = self._section("deepspeed_config").get("deepspeed_config_file")
        return None if named is None else str(named)

    @property
    def is_bare_json(self) -> bool:
        """Whether the user gave a DeepSpeed JSON without an accelerate YAML that names it."""
        return self.path is not None and self.deepspeed_config_file == str(Path(self.path).resolve())

    def _section(self, name: str) -> Mapping[str, Any]:
        section = (self.accelerate_config or {}).get(name)
        return section if isinstance(section, Mapping) else {}


def config_dir(kind: str) -> Path:
    """Return the folder of shipped files, `accel_configs` or `ds_configs`, in a wheel or a checkout."""
    package = Path(__file__).parents[1]
    return package / kind if (package / kind).is_dir() else package.parent / kind


def shipped_strategies() -> list[str]:
    return sorted(path.stem for path in config_dir("accel_configs").glob("*.yaml"))


def is_shipped(path: Path) -> bool:
    """Return True if a YAML is in the folder of shipped YAMLs."""
    return path.resolve().parent == config_dir("accel_configs").resolve()


def copy_configs(target: Path) -> list[Path]:
    """Write the shipped files under `target`; return the paths written.

    Raises ValueError if a file exists already.
    """
    sources = [*config_dir("accel_configs").glob("*.yaml"), *config_dir("ds_configs").glob("*.json")]
    texts = {target / source.parent.name / source.name: source.read_text() for source in sorted(sources)}
    return write_beside(texts, flag="--copy")


def find_strategy(name_or_path: str) -> Strategy:
    """Return the Strategy for a shipped name (`ddp`), an accelerate YAML or a DeepSpeed JSON."""
    path = strategy_path(name_or_path)
    settings = _read_settings(path)
    if path.suffix == ".json" and is_deepspeed_config(settings):
        strategy = strategy_of(yaml_around(path), path, settings)
    else:
        strategy = strategy_of(settings, path)
    return dataclasses.replace(strategy, name=strategy_name(path))


def yaml_around(json_path: Path) -> dict[str, Any]:
    """Return the content of an accelerate YAML that names this DeepSpeed JSON, modelled on ours."""
    shipped = config_dir("accel_configs") / "ds_zero3.yaml"
    config = settings_of(shipped.read_text(), shipped)
    # our YAML sets zero3_init_flag to false; accelerate's default, true, would draw other random weights
    config["deepspeed_config"]["deepspeed_config_file"] = str(json_path.resolve())
    return config


def notes_on(strategies: Iterable[Strategy]) -> list[str]:
    """Return a line for each DeepSpeed JSON that is launched through a generated accelerate YAML."""
    return [
        f"note: {strategy.path} is a DeepSpeed JSON: it is launched through a generated accelerate YAML "
        "with zero3_init_flag: false"
        for strategy in strategies
        if strategy.is_bare_json
    ]


def strategy_path(name_or_path: str) -> Path:
    """Return the file for a shipped name or a path. Raises ValueError if it does not exist."""
    shipped = config_dir("accel_configs") / f"{name_or_path}.yaml"
    path = shipped if is_file(shipped) else typed_path(name_or_path)
    if is_file(path):
        check_name(path.stem, "a strategy's file called")
        return path
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ValueError(f"no such file: {name_or_path}\nhint: paths are relative to {Path.cwd()}")
    close = get_close_matches(name_or_path, shipped_strategies(), n=1, cutoff=0.4)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"unknown strategy {name_or_path!r}\n"
        f"hint: {meant}Choose from {', '.join(shipped_strategies())}, or give a YAML or DeepSpeed JSON file"
    )


def strategy_name(path: Path) -> str:
    """Return the file's stem, with `own-` before it if a shipped strategy has the same name."""
    return f"own-{path.stem}" if path.stem in shipped_strategies() and not is_shipped(path) else path.stem


def read_strategy(path: Path) -> Strategy:
    """Read an accelerate YAML and the DeepSpeed JSON it names. Raises ValueError if they are not valid."""
    return strategy_of(_read_settings(path), path)


def strategy_of(config: dict[str, Any], path: Path, deepspeed: dict[str, Any] | None = None) -> Strategy:
    """Return the Strategy for a YAML's content; `deepspeed` is its JSON's content, if already read.

    Raises ValueError if the content is not valid.
    """
    if "distributed_type" not in config:
        raise ValueError(_no_accelerate_config(config, path))
    distributed_type = str(config["distributed_type"]).upper()
    check_sections(config, path)
    check_no_secrets(config, path)
    engines = {"NO": "single", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "DEEPSPEED": "deepspeed"}
    engine, settings = engines.get(distributed_type), {}
    if distributed_type == "FSDP":
        fsdp = config.get("fsdp_config") or {}
        engine = "fsdp2" if str(fsdp.get("fsdp_version", 1)) == "2" else "fsdp1"  # accelerate's default
        reshard = fsdp.get("fsdp_reshard_after_forward", True)
        if engine == "fsdp2":
            if str(reshard).lower() not in ("true", "false"):
                raise ValueError(
                    f"{path}: fsdp_reshard_after_forward is {reshard!r}\nhint: FSDP2 accepts true or false"
                )
            settings = {"reshard_after_forward": is_true(reshard)}
    elif engine == "deepspeed":
        section, precision = config.get("deepspeed_config") or {}, config.get("mixed_precision")
        deepspeed = read_deepspeed_config(section, path, mixed_precision=precision, content=deepspeed)
        stage = deepspeed.get("zero_optimization", {}).get("stage", 0)
        settings = {"zero_stage": stage, "deepspeed_config": deepspeed}
    if engine is None:
        raise ValueError(
            f"{path}: distributed_type {distributed_type!r} is not supported\n"
            "hint: use NO, MULTI_GPU, FSDP or DEEPSPEED"
        )
    return Strategy(
        path.stem,
        engine,
        config.get("num_processes", 1),
        path=str(path),
        accelerate_config=config,
        **settings,
    )


def check_one_machine(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError for a YAML with several machines: without Slurm `slm compare` uses one machine."""
    for strategy in strategies:
        if (num := strategy.num_machines) > 1:
            raise ValueError(
                f"{strategy.path}: num_machines is {num}, but a comparison without Slurm uses one machine: "
                "accelerate would connect to the file's main_process_ip\n"
                "hint: set num_machines: 1, or use --launcher slurm"
            )


def write_resolved(strategy: Strategy, folder: Path, num_processes: int) -> Path:
    """Write the YAML (and JSON) to launch into `folder`, with absolute paths; return the YAML's path."""
    make_folder(folder)
    config = {**strategy.accelerate_config, "num_processes": num_processes}
    if config["distributed_type"] == "MULTI_CPU":  # for which accelerate starts one process without mpirun
        config["distributed_type"] = "MULTI_GPU"
    if strategy.is_deepspeed and strategy.deepspeed_config_file is not None:
        json_path = folder.resolve() / "deepspeed.json"
        write_new(json_path, json.dumps(strategy.deepspeed_config, indent=2) + "\n")
        config["deepspeed_config"] = {**config["deepspeed_config"], "deepspeed_config_file": str(json_path)}
    yaml_path = folder.resolve() / f"{strategy.name}.yaml"
    write_new(yaml_path, yaml.safe_dump(config, sort_keys=False))
    return yaml_path


def config_options(path: str) -> list[str]:
    """Return the options of `accelerate launch` for an accelerate YAML, or for a DeepSpeed JSON alone."""
    if path.endswith(".json") and is_deepspeed_config(_read_settings(Path(path))):
        return ["--use_deepspeed", "--deepspeed_config_file", path, "--zero3_init_flag", "false"]
    return ["--config_file", path]


def on_nodes(strategy: Strategy, num_nodes: int) -> Strategy:
    """Return the strategy for `num_nodes` nodes, on each of which the user runs `accelerate launch`.

    That command gives the rank of its node and the address of the first node.
    """
    of_command = ("machine_rank", "main_process_ip", "main_process_port")
    config = {key: value for key, value in strategy.accelerate_config.items() if key not in of_command}
    config["num_machines"] = num_nodes
    if num_nodes > 1 and strategy.is_deepspeed:  # DeepSpeed's launcher would use pdsh
        config["deepspeed_config"] = {
            **(config.get("deepspeed_config") or {}),
            "deepspeed_multinode_launcher": "standard",
        }
    return dataclasses.replace(strategy, accelerate_config=config)


def precision_note(mixed_precision: str | None, config: RunConfig) -> str | None:
    """Return a note on a mixed_precision that is ignored; None if it is obeyed."""
    is_same = mixed_precision == {"fp32": "no", "fp16": "fp16"}.get(config.numerics)
    if mixed_precision is None or config.numerics == "stock" or is_same:
        return None
    return (
        f"mixed_precision {mixed_precision} has no effect: --numerics {config.numerics} computes in "
        f"{config.computes_in}"
    )


def micro_steps(strategy: Strategy, config: RunConfig) -> int:
    """Return the micro-steps per step: the flag's, or in `stock` the DeepSpeed JSON's if it has a number."""
    json_steps = strategy.deepspeed.num_micro_steps if strategy.deepspeed is not None else None
    json_wins = config.numerics == "stock" and json_steps is not None
    return json_steps if json_wins else config.gradient_accumulation_steps


def sequences_per_step(config: RunConfig, strategy: Strategy, num_processes: int) -> int:
    """Return the effective batch size, over all ranks and micro-steps."""
    return config.per_device_train_batch_size * micro_steps(strategy, config) * num_processes


def _no_accelerate_config(settings: dict[str, Any], path: Path) -> str:
    """Return the error for a file without distributed_type; its keys show what kind of file it is."""
    if is_deepspeed_config(settings):
        hint = (
            "name this DeepSpeed JSON as deepspeed_config_file in a YAML; --strategy takes the .json itself"
        )
    elif "model_type" in settings or "architectures" in settings:
        hint = f"it describes a model: --model {path}"
    else:
        hint = "`slm configs --copy DIR` writes examples"
    return f"{path} has no distributed_type: it is not an accelerate YAML\nhint: {hint}"


def _read_settings(path: Path) -> dict[str, Any]:
    return settings_of(read_text(path, hint="give an accelerate YAML or a DeepSpeed JSON"), path)


def settings_of(text: str, path: Path) -> dict[str, Any]:
    """Parse the text of a YAML or `.json` file. Raises ValueError if it contains no settings."""
    parse = json_of if path.suffix == ".json" else yaml_of
    config = parse(text, path, hint="`slm configs --copy DIR` writes working examples")
    if not isinstance(config, dict):
        raise ValueError(
            f"{path} contains no settings\nhint: `slm configs --copy DIR` writes files to start from"
        )
    return config


def check_sections(config: dict[str, Any], path: Path) -> None:
    """Raise ValueError if a section is not a mapping, or a number of machines or ranks is not valid."""
    for key in ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config"):
        if not isinstance(section := config.get(key) or {}, dict):
            raise ValueError(
                f"{path}: {key} is {section!r}\nhint: write one setting per indented line below it"
            )
    sizes = {
        f"parallelism_config.{key}": value
        for key, value in (config.get("parallelism_config") or {}).items()
        if key.endswith("size")  # with or without accelerate's prefix
    }
    for key in ("num_machines", "num_processes"):
        sizes[key] = config.get(key, 1)
    for key, value in sizes.items():
        if (value is not None or key == "num_processes") and (type(value) is not int or value < 1):
            raise ValueError(f"{path}: {key} is {value!r}\nhint: write a whole number of at least 1")
