"""RunRecord: the raw facts of one run, with the types of their JSON."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.base.typed_files import Count, Finite, NonNegative, Positive, PositiveInt, typed_dict_of
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.hardware.machine import allocator
from slm_toolkit.model.from_config import MOST_LAYERS
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.memory_parts import PARTS
from slm_toolkit.record.numerics import Numerics
from slm_toolkit.record.steady_rate import num_warmup_steps
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.strategy.strategy import Strategy

SCHEMA_VERSION = 1
"""Records of version 0 have no schema_version. Fields that were dropped since are not read. A version that
renames a field needs a step in `files.read_record`."""
RECORD_FILE = "record.json"
PROGRESS_FILE = "progress.json"
"file with the state of a run, written while it trains"
RUN_DIR_VARIABLE = "SLM_TOOLKIT_RUN_DIR"
"environment variable of all processes that `slm compare` starts for a run: the run's folder"
FP32_REFERENCE = "single-process fp32"
"name in reports of the fp32 run that `slm compare --parity` adds"
PARITY_REFERENCE = "parity-reference"
"prefix of the run names of all runs that `slm compare --parity` adds"
_PACKAGES = ("slm_toolkit", "torch", "accelerate", "deepspeed", "transformers")


Status = Literal["ok", "oom", "failed", "timeout"]
Seconds = NonNegative
Loss = Finite
Flag = bool | int | float | str | None


class Asked(TypedDict):
    """The RunConfig's identity, the strategy's files and the number of processes."""

    config: dict[str, Flag]
    strategy: NotRequired[str]
    accelerate_config: NotRequired[dict[str, Any] | None]
    deepspeed_config: NotRequired[dict[str, Any] | None]
    num_processes: NotRequired[PositiveInt]
    files: NotRequired[dict[str, str | None]]
    "for each data path, a hash of its files' sizes and times; null for a hub id"
    script: NotRequired[list[str]]
    """a user's own script that did the run, and its arguments (`recorder.py`). `config` then has only these
    arguments by name, and numerics stock: what accelerate does by itself. Other flags are unknown"""


_SHAPES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
ModelFacts = typed_dict_of(
    ModelSpec,
    num_layers=NotRequired[Annotated[int, Meta(ge=1, le=MOST_LAYERS)]],  # some closed forms loop over layers
    **dict.fromkeys((*_SHAPES, "num_params"), NotRequired[PositiveInt]),
)
SHAPES = ("num_layers", *_SHAPES, "num_params")
"facts of a model that only a script's own model may lack"
NumericsFacts = typed_dict_of(Numerics)
AnatomyFacts = typed_dict_of(Anatomy)


class WeightsCheck(TypedDict):
    """A comparison of all ranks' weights after a step."""

    step: Count
    num_compared: Count
    "tensors that several ranks have"
    num_different: Count
    different: list[str]
    "names of the first different tensors"


class Fp32Pass(TypedDict):
    """Results of the first steps in fp32; only status and reason if they failed."""

    status: Literal["ok", "failed"]
    reason: str | None
    losses: NotRequired[list[Loss | None]]
    grad_norms: NotRequired[list[NonNegative | None]]
    parameter_grad_norms: NotRequired[dict[str, NonNegative | None]]
    weights_of_ranks: NotRequired[list[WeightsCheck]]
    numerics: NotRequired[NumericsFacts | None]


class ResumedFrom(TypedDict, total=False):
    """The checkpoint that a run resumed from, and the launch that wrote it."""

    path: str
    step: Count
    strategy: str
    num_processes: PositiveInt
    per_device_train_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    conversion: str | None
    "sentence about the differences of this run's launch"


class EvalLoss(TypedDict):
    step: Count
    loss: Loss | None
    "mean over all held-out tokens"


class DatasetFacts(TypedDict, total=False):
    """One dataset; the counts are missing for a stream."""

    name: Required[str]
    packing: Required[str]
    format: str
    weight: NonNegative | None
    "share of the sequences"
    num_rows: Count
    num_sequences: Count
    num_tokens: Count
    num_padding: Count
    num_labels: Count


class TokensCounted(TypedDict, total=False):
    drawn: Count
    "tokens drawn from the data"
    in_loss: Count
    "tokens at which the loss was computed"


class GpuFacts(TypedDict, total=False):
    """Readings of NVML and the allocator for one rank's GPU: see `run/observe/machine_load.py`."""

    energy_joules: list[NonNegative] | None
    utilization: list[Count] | None
    clock_mhz: list[Count] | None
    throttle_reasons: dict[str, Count] | None
    used_bytes_before: Count | None
    num_processes_before: Count | None
    allocator: dict[str, Count] | None


class HostRam(TypedDict):
    total_bytes: Count
    least_available_bytes: Count
    swapped_out_bytes: Count


class FirstBatch(TypedDict):
    num_sequences: PositiveInt
    seq_len: PositiveInt


class MemoryAtPeak(TypedDict):
    """The moment of a traced step at which the most memory was in use."""

    phase: str
    module: str
    num_bytes: Count
    parts: dict[Literal[tuple(PARTS)], Count]
    "bytes by part"


class DeepSpeedEstimate(TypedDict):
    """The result of DeepSpeed's own memory estimator: bytes per GPU, and CPU bytes per node."""

    gpu_bytes: Count
    cpu_bytes: NotRequired[Count]


@dataclass(frozen=True)
class RunRecord:
    """The flags, launch and observations of one run. Reports derive rates, MFU and dollars from it."""

    run_name: str
    identity: str
    "hash of all settings, versions and the GPU"
    status: Status
    "ok, oom, failed, timeout, or skipped: not launched, because the estimate did not fit"
    strategy: str
    asked: Asked
    "the RunConfig's identity, the strategy's files and the number of processes"
    model: ModelFacts
    "ModelSpec, with num_params"
    versions: dict[str, str]
    started_at: str
    "ISO 8601, UTC"
    weights: str | None = None
    "source of the initial weights: random with the seed, a folder or a hub id; None in older records"
    tokenizer: str | None = None
    "bytes, a folder, a hub id, or none for synthetic tokens; None in older records"
    reason: str | None = None
    "why the status is not ok"
    command: str | None = None
    seconds_total: Seconds | None = None
    "from the start of the process to the writing of the record"
    gpu: str | None = None
    "the driver's name; None on CPU"
    cpu: str = field(default_factory=lambda: _cpu_name())
    num_cores: PositiveInt | None = None
    "CPU cores that the run's processes may use on their machine"
    world_size: PositiveInt | None = None
    num_machines: PositiveInt | None = None
    "machines, each with equally many ranks; None in older records"
    engine: Literal["single", "ddp", "fsdp1", "fsdp2", "deepspeed"] | None = None
    "probed after prepare, like the next two fields"
    zero_stage: Count | None = None
    reshard_after_forward: bool | None = None
    attn_implementation: str | None = None
    "the setting; `numerics` has the kernel that ran"
    num_probed_steps: Count = 1
    "number of first steps that the probe slowed down; more than one if the first step compiled"
    numerics: NumericsFacts | None = None
    "observations of `run/observe/probe.py` in the last probed step: the fields of `numerics.Numerics`"
    parameter_grad_norms: dict[str, NonNegative | None] = field(default_factory=dict)
    """gradient norms of the last probed step by parameter, after reduction and before clipping; None: no
    gradient; empty in older records"""
    fp32_pass: Fp32Pass | None = None
    """with `slm compare --parity`: status, reason, losses, grad_norms, parameter_grad_norms, weights_of_ranks
    and numerics of the first steps in fp32"""
    plain_kernels: str | None = None
    "why plain kernels replaced those asked for; None if they did not"
    weights_of_ranks: list[WeightsCheck] = field(default_factory=list)
    """comparison of all ranks' weights at each checkpoint and at the end: step, num_compared tensors,
    num_different, and the names of some different tensors"""
    weights_fingerprint: str | None = None
    """hash of the weights before step 1: the first elements of each tensor, rounded to bf16; None if the run
    resumed, in a rehearsal and in older records"""
    tokens_per_step: PositiveInt | None = None
    "sum over all ranks and micro-steps"
    first_batch: FirstBatch | None = None
    "of a user's own script: the shape of the first token ids that its model got on rank 0"
    first_step: Count = 0
    "above 0 if the run resumed"
    resumed_from: ResumedFrom | None = None
    """the checkpoint before first_step: path, step, strategy, num_processes, per_device_train_batch_size,
    gradient_accumulation_steps; conversion is a sentence about the values that this run
    changed"""
    skipped_steps: list[Count] = field(default_factory=list)
    "steps without an update, because the loss or gradient was not finite or too large; counted from 1"
    losses: list[Loss | None] = field(default_factory=list)
    "fp32 loss of each step, the mean over all ranks and micro-steps; None if it was not finite"
    grad_norms: list[NonNegative | None] = field(default_factory=list)
    "gradient norm of each step, before clipping"
    losses_by_dataset: dict[str, list[Loss | None]] = field(default_factory=dict)
    "with several datasets: each step's mean loss over the dataset's tokens; None if the step drew none"
    eval_losses: list[EvalLoss] = field(default_factory=list)
    "step and loss of each evaluation, over all held-out tokens"
    eval_losses_by_set: dict[str, list[Loss | None]] = field(default_factory=dict)
    "losses of each held-out set, at the steps of eval_losses"
    datasets: list[DatasetFacts] = field(default_factory=list)
    "each dataset's name, weight, format, packing, and numbers of rows, sequences, tokens, padding and labels"
    num_trainable_params: Count | None = None
    "trainable parameters with adapters; None: all parameters"
    step_seconds: list[list[Positive]] = field(default_factory=list)
    """time of each step on each rank: from the end of the previous step to the step's end. It starts at the
    step's own beginning after an evaluation, a checkpoint or a probed step, and in older records always"""
    phase_seconds: list[dict[str, list[Seconds]]] = field(default_factory=list)
    """each rank's seconds of each step by phase: data, forward, backward and optimizer; under DeepSpeed,
    whose backward and optimizer step are one call, data only"""
    num_graphs_compiled: list[Count] = field(default_factory=list)
    "graphs that torch.compile compiled in each step, on the rank with the most"
    tokens_counted: TokensCounted | None = None
    "over all ranks and steps: tokens drawn from the data, and in_loss, the tokens with a loss"
    num_padding_tokens: Count | None = None
    "padding among the drawn tokens"
    anatomy: AnatomyFacts | None = None
    "time of rank 0's profiled steps by activity: the fields of `step_breakdown.Anatomy`"
    gpu_watch: list[GpuFacts] = field(default_factory=list)
    "each rank's readings of NVML and the allocator: see `run/observe/machine_load.py`"
    other_busy_cores: NonNegative | None = None
    "mean number of this machine's CPU cores that other programs kept busy while the steps ran"
    host_ram: HostRam | None = None
    "RAM of rank 0's machine while the steps ran: total_bytes, least_available_bytes, swapped_out_bytes"
    state_bytes: list[dict[str, Count]] = field(default_factory=list)
    """each rank's bytes of parameters, gradients, master_weights and optimizer, counted from live tensors.
    Gradients are counted when the optimizer's step begins; even ZeRO-1 has reduced them to a shard then"""
    peak_allocated_bytes: list[Count] | None = None
    """each rank's peak, after the probed steps if there are others; None on CPU; in a rehearsal, only rank
    0's peak, which is traced if there is no GPU"""
    peak_reserved_bytes: list[Count] | None = None
    "as above; None in a rehearsal without a GPU"
    peak_rss_bytes: list[Count] | None = None
    "peak resident memory of each rank's process"
    memory_at_peak: MemoryAtPeak | None = None
    """rank 0's peak in a step whose allocations were all traced: phase, module, num_bytes, and bytes by
    part"""
    deepspeed_estimate: DeepSpeedEstimate | None = None
    "DeepSpeed's own estimate: gpu_bytes per GPU and cpu_bytes per node; ZeRO-2 and ZeRO-3 only"
    model_dir: str | None = None
    reported_to: str | None = None
    "the tracker that received the run's metrics"
    schema_version: Annotated[int, Meta(ge=0, le=SCHEMA_VERSION)] = SCHEMA_VERSION

    @cached_property
    def slowest_rank_seconds(self) -> list[float]:
        """Return the time of each step on its slowest rank."""
        return list(map(max, zip(*self.step_seconds, strict=True)))

    @cached_property
    def num_warmup_steps(self) -> int:
        """Return the number of first steps that don't count as timed: see `steady_rate.num_warmup_steps`."""
        return num_warmup_steps(
            self.slowest_rank_seconds,
            num_probed_steps=self.num_probed_steps,
            num_graphs_compiled=self.num_graphs_compiled,
        )

    @property
    def flags(self) -> dict[str, Any]:
        """Return the run's flags with today's names of values; flags that its version lacks have defaults."""
        asked = self.asked["config"]
        if self.is_of_script:
            seen = self.first_batch or {"num_sequences": None, "seq_len": None}
            shape = {"per_device_train_batch_size": seen["num_sequences"], "seq_len": seen["seq_len"]}
            return {**dict.fromkeys(_DEFAULTS), **asked, **shape}
        flags = {**_DEFAULTS, **asked}
        switches = {name: flag.synonyms for name, flag in FLAGS.items() if flag.identity and flag.synonyms}
        return flags | {name: by.get(str(flags[name]).lower(), flags[name]) for name, by in switches.items()}

    @cached_property
    def config(self) -> RunConfig:
        """Return the run's RunConfig; unknown flags have their defaults."""
        flags = {name: value for name, value in self.flags.items() if name in FLAGS}
        if self.is_of_script:
            flags = {name: value for name, value in flags.items() if value is not None}
        return RunConfig(**flags).with_defaults(has_gpu=self.gpu is not None)

    @property
    def spec(self) -> ModelSpec:
        """Return the model. Older records lack newer fields, and their models had the defaults.

        Raises ValueError for a script's model whose shapes are unknown.
        """
        if not self.has_known_shapes:
            raise ValueError(f"the shapes of {self.model['name']} are unknown")
        return _spec(tuple(item for item in self.model.items() if item[0] in _OF_MODEL))

    @property
    def has_known_shapes(self) -> bool:
        """Return whether the model is one that estimates and counts of FLOPs know."""
        return "hidden_size" in self.model

    @property
    def is_of_script(self) -> bool:
        """Return whether a user's own script did the run."""
        return "script" in self.asked

    @property
    def is_rehearsal(self) -> bool:
        """Return whether one process played rank 0; its losses mean nothing, and no data was sent."""
        return self.asked["config"].get("rehearse") is not None

    @property
    def evidence(self) -> str:
        """Return the source of the record's figures: rehearsed or measured."""
        return "rehearsed" if self.is_rehearsal else "measured"

    @property
    def is_parity_reference(self) -> bool:
        return self.run_name.startswith(PARITY_REFERENCE)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's speed, and the memory allocator."""
    versions = {"python": platform.python_version(), "allocator": allocator()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # DeepSpeed exists for Linux only
            continue
    return versions


def everything_asked(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """Return all settings of a run; two runs with equal settings are repeats of each other."""
    return {
        "config": config.identity,
        **launch_asked(strategy, num_processes),
        "files": {path: state_of(typed_path(path)) for path in _files_of(config)},
    }


def script_asked(strategy: Strategy, num_processes: int, words: Sequence[str]) -> dict[str, Any]:
    """Return all settings of a run of a user's script; `words`: the script's path and arguments.

    A change of the script, of a Python file beside it, or of a file among its arguments makes another run.
    """
    script, *arguments = words
    beside = sorted(Path(script).parent.glob("*.py"))
    files = {word: state_of(Path(word)) for word in arguments if Path(word).is_file()}
    arguments = without_secrets(arguments)
    return {
        "config": {"numerics": "stock", **settings_of(arguments)},
        **launch_asked(strategy, num_processes),
        "script": [script, *arguments],
        "files": {script: _state_of_files([Path(script), *beside]), **files},
    }


def settings_of(arguments: Sequence[str]) -> dict[str, Flag]:
    """Return a script's arguments by name: `--lr 1e-4` is lr 0.0001. Reports show them where rows differ."""
    settings: dict[str, Flag] = {}
    for option, following in pairwise([*arguments, "--"]):
        if not re.match(r"--\w", option):
            continue
        name, has_value, value = option[2:].partition("=")
        name = name.replace("-", "_")
        if not has_value and not following.startswith("--"):
            value = following
        is_taken = name in FLAGS or name in _NAMES_OF_REPORTS
        settings[f"script_{name}" if is_taken else name] = _number(value) if value else True
    return settings


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(number := kind(text)):
                return number
    return text


def launch_asked(strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """Return the settings of a launch: the strategy's files and the number of processes."""
    accelerate_config = dict(strategy.accelerate_config or {})
    accelerate_config.pop("num_processes", None)
    # the file's path does not matter: `deepspeed_config` has its content
    if "deepspeed_config_file" in (accelerate_config.get("deepspeed_config") or {}):
        section = {**accelerate_config["deepspeed_config"], "deepspeed_config_file": None}
        accelerate_config["deepspeed_config"] = section
    return {
        "strategy": strategy.name,
        "accelerate_config": accelerate_config,
        "deepspeed_config": strategy.deepspeed_config,
        "num_processes": num_processes,
    }


def _files_of(config: RunConfig) -> list[str]:
    data_paths = [source.path for source in (*config.sources, *config.eval_sources)]
    return [*data_paths, *([config.model] if config.model else [])]


def state_of(path: Path) -> str | None:
    """Return a hash that changes when a local file, or a file of a local folder, changes; else None."""
    if not exists(path):
        return None
    return _state_of_files(sorted(path.rglob("*")) if path.is_dir() else [path])


def _state_of_files(files: Sequence[Path]) -> str:
    states = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := _stat_of(file))]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:12]


def _stat_of(file: Path) -> os.stat_result:
    return file.stat() if exists(file) else file.lstat()  # lstat for a dangling link


def round_of(run_name: str) -> int:
    """Return the number of a launch of `slm compare --repeats`, which runs all strategies in each round."""
    number = re.search(r"-r(\d+)$", run_name)
    return int(number[1]) if number else 1


def identity_of(asked: dict[str, Any], versions: dict[str, str], gpu: str | None) -> str:
    """Return a hash of 12 hexadecimal digits over all settings, versions and the GPU."""
    text = json.dumps([asked, versions, gpu], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_name_of(spec: ModelSpec, strategy: Strategy, identity: str) -> str:
    """Return a valid folder name; the identity hash keeps it unique."""
    names = (re.sub(r"[^\w.+=,@-]", "_", name)[:_LONGEST_PART] for name in (spec.name, strategy.name))
    return "-".join([*names, identity])


_LONGEST_PART = 50  # characters, of up to four bytes


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {**dataclasses.asdict(spec), "num_params": spec.num_params}


@cache
def _spec(items: tuple[tuple[str, Any], ...]) -> ModelSpec:
    """Share one ModelSpec among all records of a model, so that its counts are computed once."""
    return ModelSpec(**dict(items))


def _cpu_name() -> str:
    """Return Linux's name of the processor; on other systems, Python's."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, because JSON has neither."""
    return None if value is None or not math.isfinite(value) else value


_NAMES_OF_REPORTS = {f.name for f in dataclasses.fields(RunRecord)}
_NAMES_OF_REPORTS |= {"record", "rank", "mfu", "price", "evidence", "asked", "parity", "padding"}
"names that mean something else in records and reports"
_OF_MODEL = frozenset(f.name for f in dataclasses.fields(ModelSpec))
_DEFAULTS = RunConfig().identity
