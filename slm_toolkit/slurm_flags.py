"""The flags of `slm compare --launcher slurm`, and what they come to."""

import argparse
import shlex
from pathlib import Path

from rich.console import Console

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.slurm_script import SLURM_TEMPLATE, SlurmNodes, slurm_nodes, write_script
from slm_toolkit.parser import count, whole_number


def add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("slurm")
    group.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="where runs are launched: on this machine one after another, or each as a Slurm job "
        "(default: local)",
    )
    group.add_argument("--num_nodes", type=count, metavar="N", help="nodes of each job (default: 1)")
    group.add_argument(
        "--gpus_per_node",
        type=whole_number,
        metavar="N",
        help="GPUs of each node (default: 0, CPU processes)",
    )
    group.add_argument(
        "--slurm_options",
        metavar="OPTIONS",
        help='sbatch\'s own, as in --slurm_options="--partition=gpu --account=me --time=2:00:00"; '
        "--timeout is the time limit where this has none",
    )
    group.add_argument(
        "--slurm_template", type=Path, metavar="FILE", help=f"the job's script, after {SLURM_TEMPLATE}"
    )
    group.add_argument(
        "--slurm_only_write",
        action="store_true",
        help="write the scripts, print how to submit them, submit nothing",
    )


_OF_THIS_MACHINE = {
    "gpus_per_run": "--gpus_per_node says how many a run gets",
    "runs_at_once": "runs go on side by side as the cluster has room",
    "dry_run": "--slurm_only_write shows what would be submitted",
    "skip_oom": "the nodes' GPU is not known before a run ends",
}


def nodes_asked(args: argparse.Namespace) -> SlurmNodes | None:
    """What the flags ask of Slurm; None for runs on this machine. Raises ValueError where they contradict."""
    names = ("num_nodes", "gpus_per_node", "slurm_options", "slurm_template")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.launcher == "local":
        given |= {"slurm_only_write": True} if args.slurm_only_write else {}
        if given:
            raise ValueError(f"--{next(iter(given))} without --launcher slurm\nhint: add --launcher slurm")
        return None
    num_nodes, gpus_per_node = given.get("num_nodes", 1), given.get("gpus_per_node", 0)
    num_processes = args.num_processes
    if num_processes is None:
        num_processes = num_nodes * gpus_per_node or 2
    problems = []
    if num_processes % num_nodes:
        problems.append(f"{num_processes} processes on {num_nodes} nodes: give --num_processes a multiple")
    if args.probe_network:
        problems.append(
            "--probe_network with --launcher slurm: sbatch the command of slm_toolkit.run.network_probe"
        )
    if args.rehearse and num_nodes > 1:
        problems.append("--rehearse with --num_nodes, but a rehearsal is one process")
    if args.largest_batch and args.slurm_only_write:
        problems.append("--largest_batch with --slurm_only_write, but each trial depends on the one before")
    problems += [
        f"--{name} with --launcher slurm, where {instead}"
        for name, instead in _OF_THIS_MACHINE.items()
        if getattr(args, name)
    ]
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: `slm compare --help` explains each flag")
    return slurm_nodes(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        options=given.get("slurm_options", ""),
        template=given.get("slurm_template", SLURM_TEMPLATE),
    )


def print_scripts(
    runs: list[PlannedRun], nodes: SlurmNodes, console: Console, *, timeout_seconds: float
) -> int:
    """Write each run's script and print how to submit it; `slm compare` finds the jobs again."""
    for run in runs:
        script = write_script(run, nodes, timeout_seconds=timeout_seconds)
        print(f"sbatch {shlex.quote(str(script))}")
    console.print(
        "the same command without --slurm_only_write waits for these jobs and collects their records"
    )
    return 0
