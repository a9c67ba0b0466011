"""RunRecord: the raw facts of one run, with the types that its JSON must have."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from slm_toolkit.base.typed_files import Count, Finite, NonNegative, Positive, PositiveInt, typed_dict_of
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import CHECKPOINTING_SYNONYMS, FLAGS, RunConfig
from slm_toolkit.hardware.machine import allocator
from slm_toolkit.model.from_config import MOST_LAYERS
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.memory_timeline import PARTS
from slm_toolkit.record.numerics import Numerics
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.strategy.strategy import Strategy

SCHEMA_VERSION = 1
"""Records of version 0 have no schema_version, and no field that was dropped since. A version that renames or
drops a field needs a step in `files.read_record`"""
RECORD_FILE = "record.json"
PROGRESS_FILE = "progress.json"
"what a run writes about itself while it trains"
RUN_DIR_VARIABLE = "SLM_TOOLKIT_RUN_DIR"
"in the environment of all processes that `slm compare` starts for a run"
SLOW = 1.1
"times the steady time: a step that takes longer may still be warming up"
FP32_REFERENCE = "single-process fp32"
"what the runs are called that `slm compare --parity` adds"
PARITY_REFERENCE = "parity-reference"
"how their names begin"
_PACKAGES = ("slm_toolkit", "torch", "accelerate", "deepspeed", "transformers")


Status = Literal["ok", "oom", "failed", "timeout", "skipped"]
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
    "hash of each data file's size and time; null for a hub id"


ModelFacts = typed_dict_of(
    ModelSpec,
    num_layers=Annotated[int, Meta(ge=1, le=MOST_LAYERS)],  # counted one by one
    **dict.fromkeys(("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size"), PositiveInt),
    **dict.fromkeys(("vocab_size", "num_params"), PositiveInt),
)
NumericsFacts = typed_dict_of(Numerics)
AnatomyFacts = typed_dict_of(Anatomy)


class WeightsCheck(TypedDict):
    """Whether all ranks held the same weights after a step."""

    step: Count
    num_compared: Count
    "tensors that several ranks hold"
    num_different: Count
    different: list[str]
    "names of the first that differ"


class Fp32Pass(TypedDict):
    """What the first steps in fp32 gave; only status and reason where they failed."""

    status: Literal["ok", "failed"]
    reason: str | None
    losses: NotRequired[list[Loss | None]]
    grad_norms: NotRequired[list[NonNegative | None]]
    parameter_grad_norms: NotRequired[dict[str, NonNegative | None]]
    weights_of_ranks: NotRequired[list[WeightsCheck]]
    numerics: NotRequired[NumericsFacts | None]


class ResumedFrom(TypedDict, total=False):
    """The checkpoint that a run went on from, and the launch that wrote it."""

    path: str
    step: Count
    strategy: str
    num_processes: PositiveInt
    per_device_train_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    base_batch_size: PositiveInt
    conversion: str | None
    "what this run has otherwise, as a sentence"


class BatchSizeSearch(TypedDict, total=False):
    """Sequences per process and micro-step, with --find_batch_size."""

    asked: PositiveInt
    out_of_memory: list[PositiveInt]
    ran: PositiveInt


class EvalLoss(TypedDict):
    step: Count
    loss: Loss | None
    "over all held-out tokens"


class DatasetFacts(TypedDict, total=False):
    """One dataset; the numbers are missing for a stream."""

    name: Required[str]
    packing: Required[str]
    format: str
    weight: NonNegative | None
    num_rows: Count
    num_sequences: Count
    num_tokens: Count
    num_padding: Count
    num_labels: Count


class TokensCounted(TypedDict, total=False):
    drawn: Count
    "from the data"
    in_loss: Count
    "where the loss was computed"


class GpuFacts(TypedDict, total=False):
    """What NVML and the allocator said of one rank's GPU: see `run/observe/machine_load.py`."""

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


class MemoryAtPeak(TypedDict):
    """The moment of a traced step at which most was alive."""

    phase: str
    module: str
    num_bytes: Count
    parts: dict[Literal[PARTS], Count]
    "bytes by part"
    modules: dict[str, Count]
    "bytes by the module that made them"


class DeepSpeedEstimate(TypedDict):
    """DeepSpeed's own estimator, per GPU and node."""

    gpu_bytes: Count
    cpu_bytes: NotRequired[Count]


@dataclass(frozen=True)
class RunRecord:
    """What was asked, what ran, what was observed. Rates, MFU and dollars are derived where shown."""

    run_name: str
    identity: str
    "hash of everything asked, versions and GPU"
    status: Status
    "ok, oom, failed, timeout, or skipped: never launched, since the estimate did not fit"
    strategy: str
    asked: Asked
    "the RunConfig's identity, the strategy's files and the number of processes"
    model: ModelFacts
    "ModelSpec, with num_params"
    versions: dict[str, str]
    started_at: str
    "ISO 8601, UTC"
    weights: str | None = None
    "where they came from: random and the seed, a folder, a hub id; None in records that don't say"
    tokenizer: str | None = None
    "bytes, a folder, a hub id, or none for synthetic tokens; None in records that don't say"
    reason: str | None = None
    "why the status is not ok"
    command: str | None = None
    seconds_total: Seconds | None = None
    "from the start of the process to the record"
    gpu: str | None = None
    "as the driver names it; None on CPU"
    cpu: str = field(default_factory=lambda: _cpu_name())
    num_cores: PositiveInt | None = None
    "that the run's processes may use on their machine"
    world_size: PositiveInt | None = None
    num_machines: PositiveInt | None = None
    "that its ranks were on, equally many on each; None in records that don't say"
    engine: str | None = None
    "probed after prepare, like the next two"
    zero_stage: Count | None = None
    reshard_after_forward: bool | None = None
    attn_implementation: str | None = None
    "as asked; `numerics` says which kernel ran"
    num_probed_steps: Count = 1
    "first steps that were probed, and slowed by it: more than one where the first compiled"
    numerics: NumericsFacts | None = None
    "what `run/observe/probe.py` saw in the last of them: the fields of `numerics.Numerics`"
    parameter_grad_norms: dict[str, NonNegative | None] = field(default_factory=dict)
    "of the last probed step, by name: reduced, before clipping; None: no gradient. Empty in older records"
    fp32_pass: Fp32Pass | None = None
    """with --fp32_steps: the status, reason, losses, grad_norms, parameter_grad_norms, weights_of_ranks and
    numerics of the first steps in fp32"""
    weights_of_ranks: list[WeightsCheck] = field(default_factory=list)
    """whether all ranks held the same weights, at each checkpoint and at the end: step, num_compared tensors,
    num_different, and the names of some that differ"""
    weights_fingerprint: str | None = None
    """of the weights before step 1: the first elements of each tensor, rounded to bf16; None where the run
    resumed, in a rehearsal and in older records"""
    tokens_per_step: PositiveInt | None = None
    "over all ranks and micro-steps"
    first_step: Count = 0
    "above 0 where the run resumed"
    resumed_from: ResumedFrom | None = None
    """the checkpoint before that step: path, step, strategy, num_processes, per_device_train_batch_size,
    gradient_accumulation_steps, base_batch_size, and the conversion, as a sentence, where this run has
    others"""
    skipped_steps: list[Count] = field(default_factory=list)
    "that changed nothing, as their loss or gradient was no number or too large; counted from 1"
    batch_size_search: BatchSizeSearch | None = None
    "with --find_batch_size: asked, out_of_memory (a list), ran: sequences per process and micro-step"
    timing_warmup_steps: Count | None = None
    "the first of the steps below that don't count as timed; None: to be found from their times"
    losses: list[Loss | None] = field(default_factory=list)
    "mean over all ranks and micro-steps of each step's fp32 loss; None where it was not finite"
    grad_norms: list[NonNegative | None] = field(default_factory=list)
    "before clipping; of each step"
    losses_by_dataset: dict[str, list[Loss | None]] = field(default_factory=dict)
    "where several are mixed: of each step, the mean over its tokens; None where none was drawn"
    eval_losses: list[EvalLoss] = field(default_factory=list)
    "step and loss, over all held-out tokens"
    eval_losses_by_set: dict[str, list[Loss | None]] = field(default_factory=dict)
    "of each held-out set, at the steps of eval_losses"
    datasets: list[DatasetFacts] = field(default_factory=list)
    "of each: name, weight, format, packing, and numbers of rows, sequences, tokens, padding and labels"
    num_trainable_params: Count | None = None
    "with adapters; None: all"
    lm_eval: dict[str, Any] | None = None
    "lm-eval's results by task, of the saved model"
    hub_url: str | None = None
    "repository of --push_to_hub that has the saved model"
    step_seconds: list[list[Positive]] = field(default_factory=list)
    """of each rank, of each step: from the end of the step before to its own end, or from its own beginning
    after an evaluation, a checkpoint or a probed step, and in older records always"""
    phase_seconds: list[dict[str, list[Seconds]]] = field(default_factory=list)
    """of each rank: seconds of each step by phase, data, forward, backward and optimizer; under DeepSpeed,
    where backward and the optimizer's step are one call, data alone"""
    num_graphs_compiled: list[Count] = field(default_factory=list)
    "by torch.compile, in each step, on the rank with most"
    tokens_counted: TokensCounted | None = None
    "over all ranks and steps: drawn from the data, and in_loss, where the loss was computed"
    num_padding_tokens: Count | None = None
    "of those drawn"
    anatomy: AnatomyFacts | None = None
    "where rank 0's profiled steps went: the fields of `anatomy.Anatomy`; the traces lie beside the record"
    gpu_watch: list[GpuFacts] = field(default_factory=list)
    "of each rank, what NVML and the allocator said: see `run/observe/machine_load.py`"
    other_busy_cores: NonNegative | None = None
    "mean number of this machine's CPU cores that other programs kept busy while the steps ran"
    host_ram: HostRam | None = None
    "of rank 0's machine while the steps ran: total_bytes, least_available_bytes, swapped_out_bytes"
    state_bytes: list[dict[str, Count]] = field(default_factory=list)
    """of each rank: parameters, gradients, master_weights, optimizer, counted from live tensors; gradients as
    the optimizer's step begins, when ZeRO-1 too has reduced its whole ones to a share"""
    peak_allocated_bytes: list[Count] | None = None
    """of each rank, after the probed steps if there are others; None on CPU; in a rehearsal of rank 0 alone,
    traced where there is no GPU"""
    peak_reserved_bytes: list[Count] | None = None
    peak_rss_bytes: list[Count] | None = None
    "peak resident memory of each rank's process"
    memory_at_peak: MemoryAtPeak | None = None
    """of rank 0, from following every allocation of a step: phase, module, num_bytes, bytes by part, and
    by the module that made them; `memory_timeline.csv` beside the record has the whole step"""
    deepspeed_estimate: DeepSpeedEstimate | None = None
    "DeepSpeed's own estimator: gpu_bytes and cpu_bytes per GPU and node; ZeRO-2 and ZeRO-3 only"
    model_dir: str | None = None
    reported_to: str | None = None
    "the tracker that has its metrics"
    predicted_peak_bytes: Count | None = None
    "on a GPU, by the estimate for which the run was skipped; None where it was launched"
    schema_version: Annotated[int, Meta(ge=0, le=SCHEMA_VERSION)] = SCHEMA_VERSION

    @cached_property
    def slowest_rank_seconds(self) -> list[float]:
        """Of each step, the time of the rank that took longest."""
        return list(map(max, zip(*self.step_seconds, strict=True)))

    @cached_property
    def num_warmup_steps(self) -> int:
        """First steps that don't count: as many as asked, else those that were slow or that compiled.

        The steady time is the median of the second half. Warm-up ends before the first two steps in a row
        that are within SLOW of it, after the last compilation of the first half, at the latest in the
        middle. Steps that were probed never count.
        """
        if self.timing_warmup_steps is not None:
            return self.timing_warmup_steps
        slowest = self.slowest_rank_seconds
        half = len(slowest) // 2
        if half == 0:
            return len(slowest)
        limit = SLOW * median(slowest[half:])
        compiled = [step for step, graphs in enumerate(self.num_graphs_compiled[:half]) if graphs]
        start = max(self.num_probed_steps, compiled[-1] + 1 if compiled else 1)
        while start < half and max(slowest[start : start + 2]) > limit:
            start += 1
        return start

    @property
    def flags(self) -> dict[str, Any]:
        """The flags asked, in today's words; those that came later have their defaults."""
        asked = self.asked["config"]
        checkpointing = str(asked["gradient_checkpointing"]).lower()
        return {
            **_DEFAULTS,
            **asked,
            "gradient_checkpointing": CHECKPOINTING_SYNONYMS.get(checkpointing, checkpointing),
        }

    @cached_property
    def config(self) -> RunConfig:
        """The RunConfig that was asked."""
        flags = {name: value for name, value in self.flags.items() if name in FLAGS}
        return RunConfig(**flags).with_defaults(has_gpu=self.gpu is not None)

    @property
    def spec(self) -> ModelSpec:
        """The model; older records lack fields that came later, and their models had the defaults."""
        return _spec(tuple(item for item in self.model.items() if item[0] in _OF_MODEL))

    @property
    def is_rehearsal(self) -> bool:
        """Whether one process played rank 0: then losses mean nothing, and nothing was sent."""
        return self.asked["config"].get("rehearse") is not None

    @property
    def evidence(self) -> str:
        """Where its figures come from."""
        if self.status == "skipped":
            return "estimated"
        return "rehearsed" if self.is_rehearsal else "measured"

    @property
    def is_parity_reference(self) -> bool:
        return self.run_name.startswith(PARITY_REFERENCE)


def installed_versions() -> dict[str, str]:
    """Versions of what decides a run's speed, by package, and which memory allocator it runs on."""
    found = {"python": platform.python_version(), "allocator": allocator()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # DeepSpeed exists for Linux only
            continue
    return found


def everything_asked(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """What a run is asked to do; two runs with equal answers are repeats of each other."""
    accelerate_config = dict(strategy.accelerate_config or {})
    accelerate_config.pop("num_processes", None)
    # a path: the content is what counts
    if "deepspeed_config_file" in (accelerate_config.get("deepspeed_config") or {}):
        section = {**accelerate_config["deepspeed_config"], "deepspeed_config_file": None}
        accelerate_config["deepspeed_config"] = section
    return {
        "config": config.identity,
        "strategy": strategy.name,
        "accelerate_config": accelerate_config,
        "deepspeed_config": strategy.deepspeed_config,
        "num_processes": num_processes,
        "files": {path: _state_of(typed_path(path)) for path in _files_of(config)},
    }


def _files_of(config: RunConfig) -> list[str]:
    of_data = [source.path for source in (*config.sources, *config.eval_sources)]
    return [*of_data, *([config.model] if config.model else [])]


def _state_of(path: Path) -> str | None:
    """Changes when a local file or a file of a folder does; None for what is no path."""
    if not exists(path):
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    # of a link that leads nowhere, the link itself
    states = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := _stat_of(file))]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:12]


def _stat_of(file: Path) -> os.stat_result:
    return file.stat() if exists(file) else file.lstat()


def identity_of(asked: dict[str, Any], versions: dict[str, str], gpu: str | None) -> str:
    """12 hexadecimal digits over everything asked, versions and GPU."""
    text = json.dumps([asked, versions, gpu], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_name_of(spec: ModelSpec, strategy: Strategy, identity: str) -> str:
    """Without what no folder's name can hold; the identity tells apart what the rest does not."""
    names = (re.sub(r"[^\w.+=,@-]", "_", name)[:_LONGEST_PART] for name in (spec.name, strategy.name))
    return "-".join([*names, identity])


_LONGEST_PART = 50  # characters, of up to four bytes


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {**dataclasses.asdict(spec), "num_params": spec.num_params}


@cache
def _spec(items: tuple[tuple[str, Any], ...]) -> ModelSpec:
    """One for all records of a model: what it is counted to have is then counted once."""
    return ModelSpec(**dict(items))


def _cpu_name() -> str:
    """What Linux calls the processor; elsewhere what Python knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


_OF_MODEL = frozenset(f.name for f in dataclasses.fields(ModelSpec))
_DEFAULTS = RunConfig().identity
