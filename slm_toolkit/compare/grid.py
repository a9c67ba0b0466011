"""Plan a grid of runs: all combinations of model, batch size, ... and strategy."""

import dataclasses
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.config.flag_pairs import Pair
from slm_toolkit.config.flags import every_config
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_adapter_base, check_hub_names, find_model
from slm_toolkit.predict.flag_checks import SEARCH_HAS_NO_BATCH
from slm_toolkit.record.numerics import PLAIN
from slm_toolkit.record.run_record import (
    PARITY_REFERENCE,
    everything_asked,
    identity_of,
    installed_versions,
    run_name_of,
)
from slm_toolkit.strategy.deepspeed_optimizer import as_flags_say
from slm_toolkit.strategy.groups import fit_groups, parallel_problems
from slm_toolkit.strategy.strategy import (
    Strategy,
    contradictions,
    find_strategy,
)

PAIRS = (
    SEARCH_HAS_NO_BATCH,
    Pair("parity", "largest_batch", ", whose runs are short and have different batches"),
    Pair("repeats", "largest_batch", ", which runs each batch once"),
    Pair("rehearse", "largest_batch", " and no GPU, because a CPU never runs out of memory", on_cpu=True),
    Pair("dry_run", "largest_batch", ", where each run depends on the one before"),
    Pair("max_steps", "parity", ", which sets the number of steps"),
    Pair("num_train_epochs", "parity", ", which sets the number of steps"),
    Pair("max_tokens", "parity", ", which sets the number of steps"),
    Pair("num_processes", "rehearse", ", which starts one process and sets the number of ranks"),
    Pair("parity", "rehearse", ", whose losses mean nothing"),
    Pair("repeats", "rehearse", ", whose results are always the same without a GPU", on_cpu=True),
    Pair("profile", "rehearse", ", which without a GPU has no times, and traces memory anyway", on_cpu=True),
)
"flags of `slm compare` that need or exclude each other"


@dataclass(frozen=True)
class PlannedRun:
    """One `accelerate launch` to run, and the folder for its record."""

    config: RunConfig
    spec: ModelSpec | None
    "None: a user's own script, whose model is not known"
    strategy: Strategy
    num_processes: int
    "launched processes; 1 for a rehearsal, because the ranks that it stands for are in `asked`"
    gpu: str | None
    asked: dict[str, Any]
    versions: dict[str, str]
    identity: str
    run_name: str
    taken_out: str | None = None
    "a line for the user if the flags replace the optimizer and scheduler of a DeepSpeed JSON"
    words: tuple[str, ...] | None = None
    "of a user's own script: what the launcher starts in each rank"
    details: str = ""
    "the arguments that distinguish runs of a user's own script"

    @property
    def folder(self) -> Path:
        return Path(os.path.realpath(self.config.output_dir), self.run_name)

    @property
    def name(self) -> str:
        """Return the run's name in tables."""
        return self.strategy.name


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
    default_processes = machine.num_gpus or on_cpu
    processes = default_processes if num_processes is None else num_processes
    problems = [problem for config in configs for problem in config.problems()]
    most_rehearsed = max(config.rehearse or 0 for config in configs)
    if most_rehearsed > 1 and all(strategy.is_single for strategy in strategies):
        problems.append(f"--rehearse {most_rehearsed} with {strategies[0].name}, which has only one rank")
    problems += process_problems(strategies, processes, machine)
    for strategy in strategies:
        for config in configs:
            problems += contradictions(strategy, config, has_gpu=has_gpu)
            num_ranks = config.rehearse or processes
            problems += parallel_problems(strategy, num_ranks=num_ranks)
    if problems:
        raise ValueError(
            "\n".join(dict.fromkeys(problems)) + "\nhint: `slm compare --help all` explains each flag"
        )

    versions = installed_versions()
    references, runs = [], []
    for config, strategy in itertools.product(configs, strategies):
        count = 1 if strategy.is_single else config.rehearse or processes
        if config.rehearse is not None:
            config = dataclasses.replace(config, rehearse=count)
        nodes = strategy.num_machines
        per_node = min(count, REHEARSED_RANKS_PER_NODE) if config.rehearse else max(1, count // nodes)
        strategy = fit_groups(strategy, num_ranks=count, ranks_per_node=per_node)
        strategy, taken_out = as_flags_say(strategy, config)
        if config.parity is not None:
            single = find_strategy("single")
            for numerics in dict.fromkeys(("fp32", config.numerics)):
                reference = _parity_reference(config, numerics=numerics, num_processes=count)
                references.append(
                    _planned(reference, single, 1, machine.gpu, versions, prefix=f"{PARITY_REFERENCE}-")
                )
        run = _planned(config, strategy, count, machine.gpu, versions)
        runs.append(dataclasses.replace(run, taken_out=taken_out))
    # each repeat runs all strategies, so that a drift over time affects them equally
    again = [repeated(run, number) for number in range(2, repeats + 1) for run in runs]
    return list({run.folder: run for run in (*references, *runs, *again)}.values())


def process_problems(strategies: Iterable[Strategy], processes: int, machine: Machine) -> list[str]:
    """Return a sentence for each reason why this machine can't run so many processes of the strategies."""
    problems = []
    if processes < 1:
        problems.append(f"--num_processes is {processes}: at least 1")
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
    config = dataclasses.replace(run.config, per_device_train_batch_size=size, run_name=None)
    return _planned(config, run.strategy, run.asked["num_processes"], run.gpu, run.versions)


def repeated(run: PlannedRun, number: int) -> PlannedRun:
    run_name = f"{run.run_name}-r{number}"
    return dataclasses.replace(
        run, run_name=run_name, config=dataclasses.replace(run.config, run_name=run_name)
    )


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


def _planned(
    config: RunConfig,
    strategy: Strategy,
    num_processes: int,
    gpu: str | None,
    versions: dict[str, str],
    *,
    prefix: str = "",
) -> PlannedRun:
    """Plan one run of `num_processes` ranks; raises ValueError if its model can't be trained."""
    spec = find_model(config.model)
    check_trainable(spec, config)
    check_adapter_base(config, spec)
    check_hub_names(config)
    asked = everything_asked(config, strategy, num_processes)
    identity = identity_of(asked, versions, gpu)
    run_name = prefix + run_name_of(spec, strategy, identity)
    folder = os.path.realpath(config.output_dir)  # unlike Path.resolve, it accepts circular links
    config = dataclasses.replace(config, run_name=run_name, output_dir=folder)
    launched = 1 if config.rehearse is not None else num_processes
    return PlannedRun(config, spec, strategy, launched, gpu, asked, versions, identity, run_name)
