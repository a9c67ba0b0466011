"""A grid of runs: every model, batch, ... with every strategy, each a RunConfig and a Strategy."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import Machine
from slm_toolkit.models import ModelSpec, find_model
from slm_toolkit.record import everything_asked, identity_of, installed_versions, run_name_of
from slm_toolkit.strategy import Strategy, contradictions


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
    given: dict[str, Any], strategies: list[Strategy], *, num_processes: int | None, machine: Machine
) -> list[PlannedRun]:
    """All combinations of `given` (field name to a value or a list of values) with all strategies.

    `num_processes` None means all GPUs, or two CPU processes; a strategy that shards nothing gets one.
    Raises one ValueError with every problem of every combination.
    """
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
    runs = []
    for config, strategy in itertools.product(configs, strategies):
        spec = find_model(config.model)
        count = 1 if strategy.engine == "single" else processes
        asked = everything_asked(config, strategy, count)
        identity = identity_of(asked, versions, machine.gpu)
        run_name = run_name_of(spec, strategy, identity)
        config = dataclasses.replace(
            config, run_name=run_name, output_dir=str(Path(config.output_dir).resolve())
        )
        runs.append(
            PlannedRun(config, spec, strategy, count, machine.gpu, asked, versions, identity, run_name),
        )
    return list({run.folder: run for run in runs}.values())
