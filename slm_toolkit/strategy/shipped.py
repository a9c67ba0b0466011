"""The shipped YAMLs: those of a command that names none, and all of them rewritten for several machines."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from slm_toolkit.config.flags import every_config
from slm_toolkit.strategy.groups import fit_groups, group_sizes
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    Strategy,
    contradictions,
    find_strategy,
    notes_on,
    on_nodes,
    read_strategy,
    shipped_strategies,
)

_SETTING = re.compile(r"( *)(\w+): [^#]*?( #.*)?")
_LAUNCH = re.compile(r"#   accelerate launch --config_file (\S+) -m slm_toolkit.train")
_SHORT_FORM = "#   slm train --strategy "
_LAUNCH_ON_MACHINES = """\
# The same on each of {num} machines, but with its own --machine_rank (0 to {last}); ADDRESS is machine 0's:
#   slm launch --config_file {file} --machine_rank 0 --main_process_ip ADDRESS -m slm_toolkit.train"""
_STANDARD = "  deepspeed_multinode_launcher: standard # each machine starts its own ranks; pdsh would, by ssh"


def text_for_machines(source: Path, *, num_machines: int, gpus_per_node: int) -> str:
    """A shipped file's text for so many machines; a JSON and `single.yaml` stay as they are.

    Raises ValueError for a hybrid shard on machines of one GPU each, which have nothing to shard over.
    """
    text = source.read_text()
    if source.suffix == ".json" or (shipped := read_strategy(source)).is_single:
        return text
    num_ranks = num_machines * gpus_per_node
    strategy = fit_groups(on_nodes(shipped, num_machines), num_ranks=num_ranks, ranks_per_node=gpus_per_node)
    values = {"num_machines": num_machines, "num_processes": num_ranks, **group_sizes(strategy)}
    lines = []
    for line in text.splitlines():
        setting = _SETTING.fullmatch(line)
        name = setting[2] if setting else None
        if launch := _LAUNCH.fullmatch(line):
            lines.append(_LAUNCH_ON_MACHINES.format(num=num_machines, last=num_machines - 1, file=launch[1]))
        elif name in values:
            lines.append(f"{setting[1]}{name}: {values[name]}{setting[3] or ''}")
        elif name == "deepspeed_config_file":
            lines += [line, _STANDARD]
        elif name != "machine_rank" and not line.startswith(_SHORT_FORM):  # each command has its own rank
            lines.append(line)
    return "\n".join(lines) + "\n"


def help_of_strategies() -> str:
    """The help of a `--strategy` whose names `strategies_asked` finds."""
    shipped, default = ", ".join(shipped_strategies()), ", ".join(STUDIED_STRATEGIES)
    return f"of {shipped}, or an accelerate YAML or a DeepSpeed JSON (default: {default})"


def strategies_asked(
    names: list[str] | None, given: dict[str, Any], *, has_gpu: bool
) -> tuple[list[Strategy], list[str]]:
    """What `--strategy` names; without it the six. Also lines on what is left out, and on DeepSpeed JSONs.

    given: field name of RunConfig to a value or a list of values. Where none of the six can take them all are
    returned, for the command to say what is wrong.
    """
    if names is not None:
        named = [find_strategy(name) for name in dict.fromkeys(names)]
        return named, notes_on(named)
    configs = [config.with_defaults(has_gpu=has_gpu) for config in every_config(given)]
    kept, left_out = [], []
    for strategy in map(find_strategy, STUDIED_STRATEGIES):
        named = dataclasses.replace(strategy, path=None)  # nobody has named its file
        if found := [problem for config in configs for problem in contradictions(named, config)]:
            left_out.append(f"left out: {found[0]}")
        else:
            kept.append(strategy)
    return (kept, left_out) if kept else ([find_strategy(name) for name in STUDIED_STRATEGIES], [])
