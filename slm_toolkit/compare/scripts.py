"""Plan the runs of a user's own training script: every strategy with every combination of its arguments."""

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.compare.grid import PlannedRun, process_problems, with_repeats
from slm_toolkit.config.flag_pairs import Pair
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy

PROGRAM = "slm_toolkit.run_script"
"module that runs a script in each rank, and records it"
PAIRS = (
    Pair("parity", "script", ": losses of equal runs are compared anyway"),
    Pair("largest_batch", "script", ", whose batch only its own arguments set"),
    Pair("memory", "script", ", whose allocations are not traced"),
)
"flags of `slm compare` that a user's script excludes"


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
            word.split(",") if before.startswith("--") and _is_list(word) else [word]
            for before, word in itertools.pairwise(("", *self.arguments))
        ]
        return list(itertools.product(*choices))


def _is_list(word: str) -> bool:
    return re.fullmatch(r"[^-,][^,]*(,[^,]+)+", word) is not None


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
            words=("-m", PROGRAM, script.path, *arguments),
            details=" ".join(varying),
        )
        stem = re.sub(r"[^\w.+=,@-]", "_", Path(script.path).stem)
        runs.append(run.named(f"{stem}-{strategy.name}-{run.identity}"))
    return with_repeats(runs, repeats)
