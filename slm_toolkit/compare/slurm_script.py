"""The Slurm job of a planned run as a script on disk, from a template that a person can read."""

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.base.user_files import check_name, read_text
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.outcome import LOG_FILE
from slm_toolkit.config.flags import flags_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.strategy.strategy import Strategy, on_nodes, write_resolved

SLURM_TEMPLATE = Path(__file__).parent / "slurm.sh"
SCRIPT_FILE = "slurm.sh"
"what a run's script is called, in the run's folder; Slurm's queue shows its path, by which jobs are found"


@dataclass(frozen=True)
class SlurmNodes:
    """What every job of a comparison asks Slurm for."""

    num_nodes: int
    gpus_per_node: int
    "0: CPU processes"
    options: tuple[str, ...]
    "sbatch's, in the user's words"
    template: str
    "the script, with {{names}} to be filled in"

    @property
    def machine(self) -> Machine:
        """The nodes together. Nobody has asked their GPU's name: the options that choose it stand for it."""
        chosen = [word for word, name in _named(self.options) if name in _CHOOSES_HARDWARE]
        return Machine(self.num_nodes * self.gpus_per_node, shlex.join(chosen) or None)


def slurm_nodes(*, num_nodes: int, gpus_per_node: int, options: str, template: Path) -> SlurmNodes:
    """Raises ValueError with all that is wrong with the options or the template."""
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:  # a quote that is not closed
        raise ValueError(f"--slurm_options {options!r}: {error}\nhint: as sbatch takes them") from None
    text = read_text(template, hint=f"{SLURM_TEMPLATE} is ours")
    problems = [
        f"--slurm_options says {word}, which is for `slm compare` to say: {_OURS[ours]}"
        for word, name in _named(words)
        if word.startswith("-") and (ours := _ours(word, name)) is not None
    ]
    if not gpus_per_node and (asked := {name for _, name in _named(words)} & _ASKS_FOR_GPUS):
        problems.append(f"--slurm_options says {min(asked)}: add --gpus_per_node, for as many ranks")
    if not options.isprintable():
        problems.append(
            "--slurm_options has a character that can't be shown: a line of the script ends there"
        )
    if words and not words[0].startswith("-"):
        problems.append(f"--slurm_options begins with {words[0]!r}, which is no option of sbatch")
    found = re.findall(r"\{\{(.*?)\}\}", text)
    problems += [f"{template}: unknown {{{{{name}}}}}" for name in dict.fromkeys(found) if name not in _NAMES]
    problems += [f"{template} has no {{{{{name}}}}}" for name in _NEEDED if name not in found]
    if problems:
        raise ValueError("\n".join(problems) + f"\nhint: {SLURM_TEMPLATE} has and explains them all")
    return SlurmNodes(num_nodes, gpus_per_node, words, text)


def strategy_on_nodes(strategy: Strategy, nodes: SlurmNodes) -> Strategy:
    """The strategy for so many nodes; one process is on one."""
    num_nodes = 1 if strategy.is_single else nodes.num_nodes
    return strategy if strategy.num_machines == num_nodes else on_nodes(strategy, num_nodes)


def script_path(run: PlannedRun) -> Path:
    return run.folder / SCRIPT_FILE


def write_script(run: PlannedRun, nodes: SlurmNodes, *, timeout_seconds: float) -> Path:
    """Write the run's YAML and its job's script; returns the script."""
    check_name(str(run.folder), "a run's folder")  # in a line of #SBATCH, which a newline would end
    num_nodes = run.strategy.num_machines
    processes_per_node = run.num_processes // num_nodes
    filled = {
        "run_name": shlex.quote(run.run_name),
        "log": shlex.quote(str(run.folder / LOG_FILE).replace("%", "%%")),  # Slurm's pattern
        "num_nodes": str(num_nodes),
        "processes_per_node": str(processes_per_node),
        "num_processes": str(run.num_processes),
        "options": _options(nodes, processes_per_node, timeout_seconds),
        "python": shlex.quote(sys.executable),
        "config_file": shlex.quote(
            str(write_resolved(run.strategy, run.folder / "launch", run.num_processes))
        ),
        "train_flags": shlex.join(flags_of(run.config)),
    }
    assert tuple(filled) == _NAMES
    script = script_path(run)
    write_new(script, re.sub(r"\{\{(.*?)\}\}", lambda match: filled[match[1]], nodes.template))
    return script


_NAMES = (
    *("run_name", "log", "num_nodes", "processes_per_node", "num_processes", "options", "python"),
    *("config_file", "train_flags"),
)
_NEEDED = ("log", "num_nodes", "num_processes", "options", "config_file", "train_flags")
"without these a job would not do what was asked, or nobody would see what it did"
_OURS = {
    **dict.fromkeys(("nodes", "N"), "--num_nodes"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "one task per node, --num_processes for ranks"),
    **dict.fromkeys(("output", "o", "error", "e", "job-name", "J"), "each run has its own"),
    "cpus-per-gpu": "--cpus-per-task, all ranks of a node being one task",
    **dict.fromkeys(("array", "a", "wrap", "wait", "W", "test-only"), "a job per run"),
    **dict.fromkeys(("clusters", "M"), "a login node of that cluster, where its jobs are seen"),
}
"sbatch's options that would contradict ours, and who says them"
_ASKS_FOR_GPUS = {"gres", "gpus", "G", "gpus-per-node", "gpus-per-task"}
_CHOOSES_HARDWARE = (
    *("partition", "p", "constraint", "C", "nodelist", "w", "reservation"),
    *_ASKS_FOR_GPUS,
)
"runs with other such options are other runs; a longer --time changes nothing that was measured"
_CORES_PER_GPU = 4
"for a rank, its data loader and NCCL's threads, where --slurm_options has no --cpus-per-task"


def _options(nodes: SlurmNodes, processes_per_node: int, timeout_seconds: float) -> str:
    """What `slm compare` asks for where the user's options don't, then these."""
    given = {name for _, name in _named(nodes.options)}
    ours = []
    if not given & {"time", "t"}:
        ours.append(f"--time={math.ceil(timeout_seconds / 60)}")  # Slurm counts minutes
    if not given & {"cpus-per-task", "c"}:
        cores = _CORES_PER_GPU if nodes.gpus_per_node else 1
        ours.append(f"--cpus-per-task={processes_per_node * cores}")
    if nodes.gpus_per_node and not given & _ASKS_FOR_GPUS:
        ours.append(f"--gpus-per-node={processes_per_node}")
    return shlex.join([*ours, *nodes.options])


def _ours(word: str, name: str) -> str | None:
    """The option of ours that a user's is; sbatch takes the first letters of a long one."""
    if name in _OURS:
        return name
    return next((ours for ours in _OURS if word.startswith("--") and ours.startswith(name)), None)


def _named(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each word with the name of the option that it is, or whose value it is."""
    found, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
        elif word.startswith("-"):
            name = word[1:2]
        found.append((word, name))
    return found
