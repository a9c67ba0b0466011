"""Groups of ranks: which of them run, and the shipped YAMLs fitted to a launch or to several machines."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slm_toolkit.config.flags import every_config
from slm_toolkit.strategy.sharding import (
    PARALLEL_SIZES,
    PREFIX,
    product_problem,
)
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    Strategy,
    contradictions,
    find_strategy,
    is_shipped,
    notes_on,
    on_nodes,
    read_strategy,
    shipped_strategies,
)

_COPIES, _SHARD = f"{PREFIX}dp_replicate_size", f"{PREFIX}dp_shard_size"
_NOT_YET = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
}


def parallel_problems(strategy: Strategy, *, num_ranks: int | None = None) -> list[str]:
    """Why slm_toolkit can't run a strategy's `parallelism_config`; `num_ranks` checks the product."""
    section = (strategy.accelerate_config or {}).get("parallelism_config") or {}
    where = f"{strategy.path or strategy.name}: parallelism_config"
    problems = [
        f"{where}.{name}: accelerate does not read it: write {PREFIX}{name}"
        for name in section
        if not name.startswith(PREFIX)
    ]
    sizes = strategy.parallel_sizes
    problems += [f"{where}: {sentence}" for sentence in not_run_yet(sizes)]
    own = strategy.path is not None and not is_shipped(Path(strategy.path))  # ours are fitted to the ranks
    if num_ranks is not None and own and strategy.is_fsdp2:
        problem = product_problem(sizes, num_ranks)
        problems += [f"{where}: {problem}: the product must be the number of ranks"] if problem else []
    return problems


def check_groups(strategy: Strategy, *, num_ranks: int | None = None) -> None:
    """Raises ValueError with all `parallel_problems`."""
    if problems := parallel_problems(strategy, num_ranks=num_ranks):
        raise ValueError("\n".join(problems) + "\nhint: dp_replicate_size and dp_shard_size only")


def not_run_yet(sizes: Mapping[str, int]) -> list[str]:
    """Sizes of ways to parallelize that slm_toolkit neither trains nor estimates."""
    return [
        f"{name} {sizes[name]}: slm_toolkit does not run {kind} yet"
        for name, kind in _NOT_YET.items()
        if sizes.get(name, 1) > 1
    ]


def fit_groups(strategy: Strategy, *, num_ranks: int, ranks_per_node: int) -> Strategy:
    """The strategy with groups of ranks that follow the nodes: a copy, or a second one, on each.

    Done for the shipped hybrid shard, which on one node keeps two copies, and for hpZ of size "auto"; a size
    in a user's own file is taken as it is. Raises ValueError for ranks that can't be divided so.
    """
    num_nodes = -(-num_ranks // ranks_per_node)
    if strategy.sharding.is_hybrid and is_shipped(Path(strategy.path or "")):
        copies = num_nodes if num_nodes > 1 else 2
        shard, left = divmod(num_ranks, copies)
        if left or shard < 2:
            raise ValueError(
                f"{strategy.name} on {num_ranks} ranks: two copies or more, of at least two ranks each\n"
                "hint: an even number of ranks, at least 4"
            )
        return _with_sizes(strategy, {_COPIES: copies, _SHARD: shard})
    if strategy.deepspeed is None or strategy.deepspeed.zero_optimization.zero_hpz_partition_size != "auto":
        return strategy
    zero = {**strategy.deepspeed_config["zero_optimization"], "zero_hpz_partition_size": ranks_per_node}
    deepspeed = {**strategy.deepspeed_config, "zero_optimization": zero}
    return dataclasses.replace(strategy, deepspeed_config=deepspeed)


def group_options(strategy: Strategy) -> list[str]:
    """Words of `accelerate launch` that go before the groups of a hybrid shard's YAML; none for others."""
    return [word for name, size in group_sizes(strategy).items() for word in (f"--{name}", str(size))]


def group_sizes(strategy: Strategy) -> dict[str, int]:
    """Copies and ranks of a copy of a hybrid shard, by their names in the YAML; none of others."""
    if not strategy.sharding.is_hybrid:
        return {}
    return {_COPIES: strategy.sharding.num_copies, _SHARD: strategy.sharding.copy_ranks}


def with_group_options(strategy: Strategy, option: Callable[[str], str | bool | None]) -> Strategy:
    """The strategy with the groups that `option(name)` of its launch says, where it says any."""
    sizes = {PREFIX + name: int(size) for name in PARALLEL_SIZES if (size := option(PREFIX + name))}
    return _with_sizes(strategy, sizes) if sizes else strategy


def _with_sizes(strategy: Strategy, sizes: Mapping[str, int]) -> Strategy:
    """The strategy with some of the sizes in its YAML's parallelism_config replaced."""
    section = {**((strategy.accelerate_config or {}).get("parallelism_config") or {}), **sizes}
    config = {**(strategy.accelerate_config or {}), "parallelism_config": section}
    return dataclasses.replace(strategy, accelerate_config=config)


# The shipped YAMLs: those of a command that names none, and all of them rewritten for several machines.

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
