"""Plan a grid of runs: all combinations of flags, or of a script's arguments, and strategy."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from slm_toolkit.config.flag_pairs import Pair
from slm_toolkit.config.flags import every_config
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import Machine, find_gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_hub_names, find_model
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, largest_batch
from slm_toolkit.predict.flag_checks import SEARCH_HAS_NO_BATCH, fixed_batch_problems
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates
from slm_toolkit.record.numerics import PLAIN
from slm_toolkit.record.run_record import (
    PARITY_REFERENCE,
    RunRecord,
    everything_asked,
    identity_of,
    installed_versions,
    run_name_of,
    script_asked,
)
from slm_toolkit.strategy.checked_run import all_of, checked_run
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy, find_strategy

PAIRS = (
    SEARCH_HAS_NO_BATCH,
    Pair("parity", "largest_batch", ", whose runs are short and have different batches"),
    Pair("repeats", "largest_batch", ", which runs each batch once"),
    Pair("rehearse", "largest_batch", " and no GPU, because a CPU never runs out of memory", on_cpu=True),
    Pair("dry_run", "largest_batch", ", where each run depends on the one before"),
    *(
        Pair(name, "parity", ", which sets the number of steps")
        for name in ("max_steps", "num_train_epochs", "max_tokens")
    ),
    Pair("num_processes", "rehearse", ", which starts one process and sets the number of ranks"),
    Pair("parity", "rehearse", ", whose losses mean nothing"),
    Pair("repeats", "rehearse", ", whose results are always the same without a GPU", on_cpu=True),
    Pair("profile", "rehearse", ", which without a GPU has no times, and traces memory anyway", on_cpu=True),
    Pair("parity", "script", ": losses of equal runs are compared anyway"),
    Pair("largest_batch", "script", ", whose batch only its own arguments set"),
    Pair("export", "dry_run", ", which measures nothing"),
)
"flags of `slm compare` that need or exclude each other"


@dataclass(frozen=True)
class PlannedRun:
    """One `accelerate launch` to run, and the folder for its record."""

    config: RunConfig
    spec: ModelSpec | None
    "None: a user's own script, whose model is not known"
    strategy: Strategy
    num_ranks: int
    "with those that a rehearsal stands for"
    gpu: str | None
    taken_out: str | None = None
    "a line for the user if the flags replace the optimizer and scheduler of a DeepSpeed JSON"
    words: tuple[str, ...] | None = None
    "of a user's own script: what the launcher starts in each rank"
    details: str = ""
    "the arguments that distinguish runs of a user's own script"

    @property
    def num_processes(self) -> int:
        """Number of launched processes; 1 for a rehearsal."""
        return 1 if self.config.rehearse is not None else self.num_ranks

    @cached_property
    def asked(self) -> dict[str, Any]:
        """All settings; runs with equal settings are repeats of each other."""
        if self.words is not None:
            return script_asked(self.strategy, self.num_ranks, self.words[2:])
        return everything_asked(self.config, self.strategy, self.num_ranks)

    @property
    def identity(self) -> str:
        return identity_of(self.asked, versions(), self.gpu)

    @property
    def run_name(self) -> str:
        return self.config.run_name

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir, self.run_name)

    @property
    def name(self) -> str:
        """Return the run's name in tables."""
        return self.strategy.name

    def named(self, run_name: str) -> "PlannedRun":
        """Return the run with a folder of this name."""
        # realpath accepts circular links, unlike Path.resolve
        folder = os.path.realpath(self.config.output_dir)
        config = dataclasses.replace(self.config, run_name=run_name, output_dir=folder)
        return dataclasses.replace(self, config=config)


versions = cache(installed_versions)


def plan_runs(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    num_processes: int | None,
    machine: Machine,
    repeats: int = 1,
) -> list[PlannedRun]:
    """Plan all combinations of `given` (field name to a value or a list of values) with all strategies.

    `num_processes` None means all GPUs, or without a GPU two processes (four with a hybrid strategy). A
    single-process strategy always gets one process, also in a rehearsal. Each run is planned `repeats` times.
    With `parity`, each run does that many steps, and parity references come first: single processes
    that see the same batches, in fp32 and in the requested numerics. Raises one ValueError
    with all problems of all combinations.
    """
    has_gpu = machine.num_gpus > 0
    if "parity" in given:
        given = {**given, "max_steps": given["parity"]}
    configs = [
        config.with_defaults(has_gpu=has_gpu or config.rehearse is not None) for config in every_config(given)
    ]
    # hybrid sharding needs four processes: two copies of two shards
    on_cpu = 4 if any(strategy.sharding.is_hybrid for strategy in strategies) else 2
    processes = (machine.num_gpus or on_cpu) if num_processes is None else num_processes
    problems = process_problems(strategies, processes, machine)
    most_rehearsed = max(config.rehearse or 0 for config in configs)
    if most_rehearsed > 1 and all(strategy.is_single for strategy in strategies):
        problems.append(f"--rehearse {most_rehearsed} with {strategies[0].name}, which has only one rank")
    references, runs = [], []
    for config, strategy in itertools.product(configs, strategies):
        count = 1 if strategy.is_single else config.rehearse or processes
        try:
            runs.append(_planned(config, strategy, count, machine))
            for numerics in dict.fromkeys(("fp32", config.numerics)) if config.parity else ():
                reference = _parity_reference(config, numerics=numerics, num_processes=count)
                references.append(_planned(reference, find_strategy("single"), 1, machine))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise all_of(problems, verb="compare")
    for run in runs:
        check_hub_names(run.config)
    references = [run.named(f"{PARITY_REFERENCE}-{run.run_name}") for run in references]
    return with_repeats([*references, *runs], repeats)


def with_repeats(runs: list[PlannedRun], repeats: int) -> list[PlannedRun]:
    """Return each different run, and so many launches of all but parity references.

    A repeat runs all strategies before the next begins, so that a drift over time affects them equally.
    """
    again = [
        run.named(f"{run.run_name}-r{number}")
        for number in range(2, repeats + 1)
        for run in runs
        if not run.run_name.startswith(PARITY_REFERENCE)
    ]
    return list({run.folder: run for run in (*runs, *again)}.values())


def process_problems(strategies: Iterable[Strategy], processes: int, machine: Machine) -> list[str]:
    """Return a sentence for each reason why this machine can't run so many processes of the strategies."""
    problems = []
    if 0 < machine.num_gpus < processes:
        problems.append(f"--num_processes is {processes}: this machine has {machine.num_gpus} GPUs")
    if machine.num_gpus == 0:
        problems += [
            f"{strategy.path} uses FSDP1, which needs a GPU: write `fsdp_version: 2`"
            for strategy in strategies
            if strategy.is_fsdp1
        ]
    return problems


def with_batch(run: PlannedRun, size: int) -> PlannedRun:
    """Return the same run with another --per_device_train_batch_size."""
    config = dataclasses.replace(run.config, per_device_train_batch_size=size)
    changed = dataclasses.replace(run, config=config)
    return changed.named(run_name_of(run.spec, run.strategy, changed.identity))


def _parity_reference(config: RunConfig, *, numerics: str, num_processes: int) -> RunConfig:
    """Return a single-process run that sees in each step the sequences that all ranks of `config` see.

    In fp32 its kernels are plain, in other numerics those of `config`: then only the engine differs.
    Rank r's batch number i is the data's batch i * num_processes + r, so a single process with num_processes
    times as many micro-steps sees the same batches.
    """
    has_fp32 = config.attn_implementation in ("eager", "sdpa")  # flash-attn has not
    return dataclasses.replace(
        config,
        numerics=numerics,
        gradient_accumulation_steps=config.gradient_accumulation_steps * num_processes,
        attn_implementation=config.attn_implementation if has_fp32 else "sdpa",
        **PLAIN | ({} if numerics == "fp32" else {"kernels": config.kernels}),
        profile="none",
        max_grad_norm=config.max_grad_norm or 0.0,  # with stock numerics the script does not clip
        save_steps=None,
        resume_from_checkpoint=None,
        save_final_model="false",
        report_to="none",
    )


def _planned(config: RunConfig, strategy: Strategy, num_ranks: int, machine: Machine) -> PlannedRun:
    """Plan one run of `num_ranks` ranks. Raises ValueError with all problems of its settings."""
    on_node = num_ranks // strategy.num_machines
    if config.rehearse is not None:
        on_node = min(num_ranks, REHEARSED_RANKS_PER_NODE)
    strategy = fit_groups(strategy, num_ranks=num_ranks, ranks_per_node=max(1, on_node))
    spec, has_gpu = find_model(config.model), machine.num_gpus > 0
    checked = checked_run(config, spec, strategy, num_ranks=num_ranks, has_gpu=has_gpu)
    run = PlannedRun(**vars(checked), gpu=machine.gpu)
    if config.rehearse is not None:
        run = dataclasses.replace(run, config=dataclasses.replace(config, rehearse=num_ranks))
    return run.named(run_name_of(spec, strategy, run.identity))


# Runs of a user's own training script.

_PROGRAM = "slm_toolkit.run_script"
"module that runs a script in each rank, and records it"


@dataclass(frozen=True)
class Script:
    """A user's training script, and its arguments. A list of values, `--batch 4,8`, makes a grid."""

    path: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, path: str, arguments: Sequence[str]) -> "Script":
        """Raise ValueError if there is no such file."""
        if not Path(path).is_file():
            raise ValueError(f"no such script: {path}\nhint: slm compare --script train.py -- ARGUMENTS")
        return cls(os.path.abspath(path), tuple(arguments))

    @property
    def grid(self) -> list[tuple[str, ...]]:
        """Return the arguments of each combination. The form `--flag=a,b` is one value."""
        choices = [
            word.split(",") if before.startswith("--") and _LIST.fullmatch(word) else [word]
            for before, word in itertools.pairwise(("", *self.arguments))
        ]
        return list(itertools.product(*choices))


_LIST = re.compile(r"[^-,][^,]*(,[^,]+)+")


def plan_scripts(
    script: Script,
    strategies: Sequence[Strategy],
    *,
    num_processes: int | None,
    machine: Machine,
    output_dir: str,
    repeats: int = 1,
) -> list[PlannedRun]:
    """Plan a run of each combination under each strategy. Raise ValueError with all problems."""
    processes = num_processes or machine.num_gpus or 2
    if problems := process_problems(strategies, processes, machine):
        raise ValueError("\n".join(dict.fromkeys(problems)) + "\nhint: see --num_processes and --strategy")
    runs = []
    for arguments, strategy in itertools.product(script.grid, strategies):
        count = 1 if strategy.is_single else processes
        per_node = max(1, count // strategy.num_machines)
        varying = (mine for mine, first in zip(arguments, script.arguments, strict=True) if mine != first)
        run = PlannedRun(
            config=RunConfig(output_dir=output_dir),
            spec=None,
            strategy=fit_groups(strategy, num_ranks=count, ranks_per_node=per_node),
            num_ranks=count,
            gpu=machine.gpu,
            words=("-m", _PROGRAM, script.path, *arguments),
            details=" ".join(varying),
        )
        stem = re.sub(r"[^\w.+=,@-]", "_", Path(script.path).stem)
        runs.append(run.named(f"{stem}-{strategy.name}-{run.identity}"))
    return with_repeats(runs, repeats)


# The largest per-device batch that fits, by short trial runs in separate processes.

LARGEST_ON_CPU = 16
"a CPU rarely runs out of memory, so the search ends there"
TRIAL_STEPS = 3
"the first step creates the optimizer's state; the second is like all later steps"
_FIRST_STRIDE = 1 / 16  # fraction of the start batch: the estimate's error is rarely larger


@dataclass(frozen=True)
class BatchSearch:
    """The result of trials."""

    largest_batch: int | None
    "0: batch 1 does not fit either; None: unknown, because a trial failed for another reason"
    smallest_oom_batch: int | None
    "None: no allowed batch ran out of memory"


def search(runs: Callable[[int], str], *, start: int, most: int) -> BatchSearch:
    """Find the largest batch up to `most` for which `runs` returns "ok"; larger batches return "oom".

    Goes from `start` in strides that double until there is an "ok" and an "oom", then bisects. No batch is
    tried twice. Any other result ends the search.
    """
    ok, oom = 0, most + 1
    batch = min(max(1, start), most)
    stride = max(1, int(batch * _FIRST_STRIDE))
    while ok + 1 < oom:
        status = runs(batch)
        if status == "ok":
            ok = batch
        elif status == "oom":
            oom = batch
        else:
            return BatchSearch(None, oom if oom <= most else None)
        if oom > most:  # no batch was too large yet
            batch = min(ok + stride, most)
        elif ok == 0:
            batch = max(oom - stride, 1)
        else:
            batch = (ok + oom) // 2
        stride *= 2
    return BatchSearch(ok, oom if oom <= most else None)


def find_largest_batch(
    run: PlannedRun, execute: Callable[[PlannedRun], RunRecord]
) -> tuple[BatchSearch, PlannedRun, RunRecord]:
    """Search for one planned run's largest batch; `execute` runs a trial.

    Starts at the estimate for the GPU, or at 1. Also returns the trial to show: the largest batch that ran;
    if none ran, batch 1; if a trial failed for another reason, that trial.
    """
    trials: dict[int, tuple[PlannedRun, RunRecord]] = {}
    most = LARGEST_BATCH_TRIED if run.gpu else LARGEST_ON_CPU

    def runs(batch: int) -> str:
        trial = with_batch(run, batch)
        trials[batch] = trial, execute(trial)
        return trials[batch][1].status

    result = search(runs, start=estimated_batch(run) or 1, most=most)
    batch = list(trials)[-1] if result.largest_batch is None else max(1, result.largest_batch)
    return result, *trials[batch]


def estimated_batch(run: PlannedRun) -> int | None:
    """Return the estimate for this machine's GPU; None if no closed form covers the run."""
    gpu = find_gpu(run.gpu)
    if gpu is None or unknown_to_estimates(run.config, gpu=gpu, spec=run.spec):
        return None
    per_node = max(1, run.num_ranks // run.strategy.num_machines)
    if run.config.rehearse:
        per_node = REHEARSED_RANKS_PER_NODE
    sizes = {"num_gpus": run.num_ranks, "gpus_per_node": per_node, "gpu": gpu}
    with suppress(ValueError):  # ZeRO-0, tensor parallelism, ...
        return largest_batch(
            Setup(run.spec, run.strategy, run.config, **sizes).launched
        ).per_device_train_batch_size
    return None


def flags_of_trials(given: dict[str, Any], strategies: list[Strategy]) -> dict[str, Any]:
    """Return the flags of a search's trial runs. Raises one ValueError with all problems."""
    if problems := fixed_batch_problems(strategies):
        raise ValueError("\n".join(problems) + '\nhint: write "auto" there')
    trial = {"per_device_train_batch_size": 1}
    if not {"num_train_epochs", "max_tokens"} & given.keys():
        trial["max_steps"] = given.get("max_steps", TRIAL_STEPS)
    return {**given, **trial}
