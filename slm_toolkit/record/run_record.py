"""RunRecord: the raw facts of one run, with the types of their JSON."""

import dataclasses
import hashlib
import json
import math
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
    # for each data path, a hash of its files' sizes and times; null for a hub id
    files: NotRequired[dict[str, str | None]]
    # a user's own script that did the run, and its arguments (`recorder.py`). `config` then has only these
    # arguments by name, and numerics stock: what accelerate does by itself. Other flags are unknown
    script: NotRequired[list[str]]


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
    # tensors that several ranks have
    num_compared: Count
    num_different: Count
    # names of the first different tensors
    different: list[str]


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
    # sentence about the differences of this run's launch
    conversion: str | None


class EvalLoss(TypedDict):
    step: Count
    # mean over all held-out tokens
    loss: Loss | None


class DatasetFacts(TypedDict, total=False):
    """One dataset; the counts are missing for a stream."""

    name: Required[str]
    packing: Required[str]
    format: str
    # share of the sequences
    weight: NonNegative | None
    num_rows: Count
    num_sequences: Count
    num_tokens: Count
    num_padding: Count
    num_labels: Count


class TokensCounted(TypedDict, total=False):
    # tokens drawn from the data
    drawn: Count
    # tokens at which the loss was computed
    in_loss: Count


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
    # bytes by part
    parts: dict[Literal[tuple(PARTS)], Count]


class DeepSpeedEstimate(TypedDict):
    """The result of DeepSpeed's own memory estimator: bytes per GPU, and CPU bytes per node."""

    gpu_bytes: Count
    cpu_bytes: NotRequired[Count]


@dataclass(frozen=True)
class RunRecord:
    """The flags, launch and observations of one run. Reports derive rates, MFU and dollars from it."""

    run_name: str
    # hash of all settings, versions and the GPU
    identity: str
    # ok, oom, failed, timeout, or skipped: not launched, because the estimate did not fit
    status: Status
    strategy: str
    # the RunConfig's identity, the strategy's files and the number of processes
    asked: Asked
    # ModelSpec, with num_params
    model: ModelFacts
    versions: dict[str, str]
    # ISO 8601, UTC
    started_at: str
    # source of the initial weights: random with the seed, a folder or a hub id; None in older records
    weights: str | None = None
    # bytes, a folder, a hub id, or none for synthetic tokens; None in older records
    tokenizer: str | None = None
    # why the status is not ok
    reason: str | None = None
    command: str | None = None
    # from the start of the process to the writing of the record
    seconds_total: Seconds | None = None
    # the driver's name; None on CPU
    gpu: str | None = None
    cpu: str = field(default_factory=lambda: _cpu_name())
    # CPU cores that the run's processes may use on their machine
    num_cores: PositiveInt | None = None
    world_size: PositiveInt | None = None
    # machines, each with equally many ranks; None in older records
    num_machines: PositiveInt | None = None
    # probed after prepare, like the next two fields
    engine: Literal["single", "ddp", "fsdp1", "fsdp2", "deepspeed"] | None = None
    zero_stage: Count | None = None
    reshard_after_forward: bool | None = None
    # the setting; `numerics` has the kernel that ran
    attn_implementation: str | None = None
    # number of first steps that the probe slowed down; more than one if the first step compiled
    num_probed_steps: Count = 1
    # observations of `run/observe/probe.py` in the last probed step: the fields of `numerics.Numerics`
    numerics: NumericsFacts | None = None
    # gradient norms of the last probed step by parameter, after reduction and before clipping; None: no
    # gradient; empty in older records
    parameter_grad_norms: dict[str, NonNegative | None] = field(default_factory=dict)
    # with `slm compare --parity`: status, reason, losses, grad_norms, parameter_grad_norms, weights_of_ranks
    # and numerics of the first steps in fp32
    fp32_pass: Fp32Pass | None = None
    # why plain kernels replaced those asked for; None if they did not
    plain_kernels: str | None = None
    # comparison of all ranks' weights at each checkpoint and at the end: step, num_compared tensors,
    # num_different, and the names of some different tensors
    weights_of_ranks: list[WeightsCheck] = field(default_factory=list)
    # hash of the weights before step 1: the first elements of each tensor, rounded to bf16; None if the run
    # resumed, in a rehearsal and in older records
    weights_fingerprint: str | None = None
    # sum over all ranks and micro-steps
    tokens_per_step: PositiveInt | None = None
    # of a user's own script: the shape of the first token ids that its model got on rank 0
    first_batch: FirstBatch | None = None
    # above 0 if the run resumed
    first_step: Count = 0
    # the checkpoint before first_step: path, step, strategy, num_processes, per_device_train_batch_size,
    # gradient_accumulation_steps; conversion is a sentence about the values that this run changed
    resumed_from: ResumedFrom | None = None
    # steps without an update, because the loss or gradient was not finite or too large; counted from 1
    skipped_steps: list[Count] = field(default_factory=list)
    # fp32 loss of each step, the mean over all ranks and micro-steps; None if it was not finite
    losses: list[Loss | None] = field(default_factory=list)
    # gradient norm of each step, before clipping
    grad_norms: list[NonNegative | None] = field(default_factory=list)
    # step and loss of each evaluation, over all held-out tokens
    eval_losses: list[EvalLoss] = field(default_factory=list)
    # losses of each held-out set, at the steps of eval_losses
    eval_losses_by_set: dict[str, list[Loss | None]] = field(default_factory=dict)
    # each dataset's name, weight, format, packing, and numbers of rows, sequences, tokens, padding and labels
    datasets: list[DatasetFacts] = field(default_factory=list)
    # trainable parameters with adapters; None: all parameters
    num_trainable_params: Count | None = None
    # time of each step on each rank: from the end of the previous step to the step's end. It starts at the
    # step's own beginning after an evaluation, a checkpoint or a probed step, and in older records always
    step_seconds: list[list[Positive]] = field(default_factory=list)
    # each rank's seconds of each step by phase: data, forward, backward and optimizer; under DeepSpeed, whose
    # backward and optimizer step are one call, data only
    phase_seconds: list[dict[str, list[Seconds]]] = field(default_factory=list)
    # graphs that torch.compile compiled in each step, on the rank with the most
    num_graphs_compiled: list[Count] = field(default_factory=list)
    # over all ranks and steps: tokens drawn from the data, and in_loss, the tokens with a loss
    tokens_counted: TokensCounted | None = None
    # padding among the drawn tokens
    num_padding_tokens: Count | None = None
    # time of rank 0's profiled steps by activity: the fields of `step_breakdown.Anatomy`
    anatomy: AnatomyFacts | None = None
    # each rank's readings of NVML and the allocator: see `run/observe/machine_load.py`
    gpu_watch: list[GpuFacts] = field(default_factory=list)
    # mean number of this machine's CPU cores that other programs kept busy while the steps ran
    other_busy_cores: NonNegative | None = None
    # RAM of rank 0's machine while the steps ran: total_bytes, least_available_bytes, swapped_out_bytes
    host_ram: HostRam | None = None
    # each rank's bytes of parameters, gradients, master_weights and optimizer, counted from live tensors.
    # Gradients are counted when the optimizer's step begins; even ZeRO-1 has reduced them to a shard then
    state_bytes: list[dict[str, Count]] = field(default_factory=list)
    # each rank's peak, after the probed steps if there are others; None on CPU; in a rehearsal, only rank 0's
    # peak, which is traced if there is no GPU
    peak_allocated_bytes: list[Count] | None = None
    # as above; None in a rehearsal without a GPU
    peak_reserved_bytes: list[Count] | None = None
    # peak resident memory of each rank's process
    peak_rss_bytes: list[Count] | None = None
    # rank 0's peak in a step whose allocations were all traced: phase, module, num_bytes, bytes by part
    memory_at_peak: MemoryAtPeak | None = None
    # DeepSpeed's own estimate: gpu_bytes per GPU and cpu_bytes per node; ZeRO-2 and ZeRO-3 only
    deepspeed_estimate: DeepSpeedEstimate | None = None
    model_dir: str | None = None
    # the tracker that received the run's metrics
    reported_to: str | None = None
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
    paths = [source.path for source in (*config.sources, *config.eval_sources)]
    paths += [config.model] if config.model else []
    return {
        "config": config.identity,
        **launch_asked(strategy, num_processes),
        "files": {path: state_of(typed_path(path)) for path in paths},
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


def state_of(path: Path) -> str | None:
    """Return a hash that changes when a local file, or a file of a local folder, changes; else None."""
    if not exists(path):
        return None
    return _state_of_files(sorted(path.rglob("*")) if path.is_dir() else [path])


def _state_of_files(files: Sequence[Path]) -> str:
    there = [(str(file), file.stat()) for file in files if exists(file)]  # not so for a dangling link
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in there]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:12]


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
