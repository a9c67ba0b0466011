"""Examine runs before they are launched; refuse wrong ones."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.case import Case, Files, Host, look_here, read_files
from slm_toolkit.doctor.examine import examine
from slm_toolkit.doctor.finding import TRAINS_ANYWAY, Finding, gravest_first
from slm_toolkit.hardware.gpus import Machine, find_gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.strategy.strategy import Strategy, is_shipped

_IRRELEVANT_FLAGS = ("seed", "run_name", "output_dir", "learning_rate", "max_steps", "max_tokens", "dataset")
"fields of RunConfig that no finding depends on; runs that differ only in these are examined once"


def check_launches(
    launches: Iterable[tuple[Strategy, RunConfig, ModelSpec, int]], machine: Machine, *, is_here: bool
) -> list[str]:
    """Return a line for each wrong setting that does not stop a run.

    The last item of each launch is its number of ranks. `is_here`: the runs are on this machine, so its
    disks, libraries and environment are examined, too. Raises one ValueError with all other findings of
    severity wrong.
    """
    host = look_here(is_meant=is_here, ram_bytes=None, free_ram_bytes=None)
    host = host if is_here else replace(host, gpu_names=())
    defaults = {name: getattr(RunConfig(), name) for name in _IRRELEVANT_FLAGS}
    cases: dict[tuple, Case] = {}
    for strategy, config, spec, num_ranks in launches:
        relevant = replace(config, **defaults)
        key = (strategy.name, relevant, spec.name, num_ranks)
        if key not in cases:
            cases[key] = _case(strategy, relevant, spec, num_ranks, machine, host)
    found = [finding for case in cases.values() for finding in examine(case).found]
    wrong = [finding for finding in gravest_first(found) if finding.severity == "wrong"]
    refused = [_line(finding) for finding in wrong if finding.name not in TRAINS_ANYWAY]
    if refused:
        paths = dict.fromkeys(str(case.files.yaml_path) for case in cases.values())
        named = " ".join(path for path in paths if not is_shipped(Path(path))) or "NAME"
        raise ValueError(
            "nothing is launched:\n"
            + "\n".join(dict.fromkeys(refused))
            + f"\nhint: `slm doctor --strategy {named}` explains this, and --fix DIR writes corrected copies"
        )
    return list(dict.fromkeys(f"note: {_line(finding)}" for finding in wrong))


def _line(finding: Finding) -> str:
    where = ": ".join(part for part in (finding.file or finding.strategy, finding.key) if part)
    place = f"{where}: " if where else ""
    return f"{place}{finding.sentence} [{finding.name}]: {finding.why}. Change: {finding.change}"


def _case(
    strategy: Strategy, config: RunConfig, spec: ModelSpec, num_ranks: int, machine: Machine, host: Host
) -> Case:
    gpu = find_gpu(machine.gpu)
    is_rehearsal = config.rehearse is not None  # stands for ranks of another machine
    return Case(
        name=strategy.name,
        files=_files(strategy, num_ranks),
        spec=spec,
        flags=config,
        host=replace(host, is_meant=False) if is_rehearsal else host,
        num_gpus=num_ranks,
        gpus_per_node=max(1, num_ranks // strategy.num_machines),
        gpu_names=(gpu.name,) if gpu is not None else (),
    )


def _files(strategy: Strategy, num_ranks: int) -> Files:
    """Return the files as they will be launched, with the duplicate keys of the user's files."""
    files = read_files(Path(strategy.path))
    config = {**strategy.accelerate_config, "num_processes": num_ranks}
    written = json.dumps if files.yaml_path.suffix == ".json" else yaml.safe_dump
    files = replace(files, yaml_text=files.yaml_text and written(config), config=config)
    if files.deepspeed is None:
        return files
    return replace(
        files, json_text=json.dumps(strategy.deepspeed_config), deepspeed=strategy.deepspeed_config
    )
