"""A grid of runs: every model, batch, ... with every strategy, each a RunConfig and a Strategy."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import Machine
from slm_toolkit.models import ModelSpec, find_model
from slm_toolkit.record import (
    PARITY_REFERENCE,
    everything_asked,
    identity_of,
    installed_versions,
    run_name_of,
)
from slm_toolkit.strategy import Strategy, contradictions, find_strategy


@dataclass(frozen=True)
class PlannedRun:
    """One `accelerate launch` to do, and the folder where its record will lie."""

    config: RunConfig
    spec: ModelSpec
    strategy: Strategy
    num_processes: int
    gpu: str | None
    asked: dict[str, Any]
    versions: dict[str, str]
    identity: str
    run_name: str

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir).resolve() / self.run_name


def plan_runs(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    num_processes: int | None,
    machine: Machine,
    repeats: int = 1,
    parity_steps: int | None = None,
) -> list[PlannedRun]:
    """All combinations of `given` (field name to a value or a list of values) with all strategies.

    `num_processes` None means all GPUs, or two CPU processes; a strategy that shards nothing gets one. Each
    run is planned `repeats` times; with `parity_steps` it does so many steps, and the single processes that
    see the same batches come first, in fp32 and in the numerics asked. Raises one ValueError with every
    problem of every combination.
    """
    if parity_steps is not None:
        for name in ("max_steps", "num_train_epochs"):
            if name in given:
                raise ValueError(f"--{name} with --parity, which says how many steps to do\nhint: give one")
        given = {**given, "max_steps": parity_steps}
    several = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    configs = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=machine.num_gpus > 0)
        for values in itertools.product(*several.values())
    ]
    default_processes = machine.num_gpus or 2
    processes = default_processes if num_processes is None else num_processes
    problems = [problem for config in configs for problem in config.problems()]
    if processes < 1:
        problems.append(f"--num_processes is {processes}: at least 1")
    if 0 < machine.num_gpus < processes:
        problems.append(f"--num_processes is {processes}: this machine has {machine.num_gpus} GPUs")
    for strategy in strategies:
        if strategy.engine == "fsdp1" and machine.num_gpus == 0:
            problems.append(f"{strategy.path} asks for FSDP1, which needs a GPU: write `fsdp_version: 2`")
        for config in configs:
            problems += contradictions(strategy, config)
    if problems:
        raise ValueError(
            "\n".join(dict.fromkeys(problems)) + "\nhint: `slm compare --help` explains each flag"
        )

    versions = installed_versions()
    references, runs = [], []
    for config, strategy in itertools.product(configs, strategies):
        count = 1 if strategy.engine == "single" else processes
        if parity_steps is not None:
            single = find_strategy("single")
            for numerics in dict.fromkeys(("fp32", config.numerics)):
                reference = _parity_reference(config, numerics=numerics, num_processes=count)
                references.append(
                    _planned(reference, single, 1, machine, versions, prefix=f"{PARITY_REFERENCE}-")
                )
        runs.append(_planned(config, strategy, count, machine, versions))
    # in turn, so that what drifts with time does so for all strategies alike
    again = [_repeated(run, number) for number in range(2, repeats + 1) for run in runs]
    return list({run.folder: run for run in (*references, *runs, *again)}.values())


def _repeated(run: PlannedRun, number: int) -> PlannedRun:
    run_name = f"{run.run_name}-r{number}"
    return dataclasses.replace(
        run, run_name=run_name, config=dataclasses.replace(run.config, run_name=run_name)
    )


def _parity_reference(config: RunConfig, *, numerics: str, num_processes: int) -> RunConfig:
    """One process that sees, step by step, the sequences that all ranks of `config` see together.

    Rank r's batch number i is the data's batch i * num_processes + r, so more micro-steps do it.
    """
    plain = config.attn_implementation in ("eager", "sdpa")  # flash-attn has no fp32
    return dataclasses.replace(
        config,
        numerics=numerics,
        reduce_dtype=None,
        gradient_accumulation_steps=config.gradient_accumulation_steps * num_processes,
        epoch_multiple=config.epoch_multiple * num_processes,
        attn_implementation=config.attn_implementation if plain else "sdpa",
        loss_kernel="hf",
        norm_kernel="hf",
        torch_compile=False,
        profile=False,
        max_grad_norm=config.max_grad_norm or 0.0,  # in stock the script asks for none
        save_steps=None,
        save_final_model=False,
        report_to="none",
    )


def _planned(
    config: RunConfig,
    strategy: Strategy,
    num_processes: int,
    machine: Machine,
    versions: dict[str, str],
    *,
    prefix: str = "",
) -> PlannedRun:
    spec = find_model(config.model)
    asked = everything_asked(config, strategy, num_processes)
    identity = identity_of(asked, versions, machine.gpu)
    run_name = prefix + run_name_of(spec, strategy, identity)
    folder = str(Path(config.output_dir).resolve())
    config = dataclasses.replace(config, run_name=run_name, output_dir=folder)
    return PlannedRun(config, spec, strategy, num_processes, machine.gpu, asked, versions, identity, run_name)
