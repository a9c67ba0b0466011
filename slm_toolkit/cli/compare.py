"""`slm compare`: launch a grid of runs, one by one, side by side or as Slurm jobs, and print their table."""

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.output import add_output_flags, asked_rows, print_records, read_baseline
from slm_toolkit.compare.comparison import Plan, launch_all, prepare
from slm_toolkit.compare.grid import LARGEST_ON_CPU
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given
from slm_toolkit.config.flags import ONE_RUN_ONLY, add_flags
from slm_toolkit.config.parser import count, positive_number, whole_number
from slm_toolkit.results import Records, Report
from slm_toolkit.strategy.groups import help_of_strategies

if TYPE_CHECKING:
    from slm_toolkit.compare.slurm import SlurmNodes

_DESCRIPTION = """\
Train under each strategy with its own `accelerate launch`, then print one table. Finished runs of an earlier
comparison are kept, not repeated. Without a GPU it runs two CPU processes and a 10M model."""
_EXAMPLES = """\
  slm compare --max_steps 20                              six strategies on this machine
  slm compare --model slm-1m --seq_len 64 --parity 20     do all strategies compute the same?
  slm compare --script train.py --strategy ddp ds_zero2 -- --lr 1e-4 --batch 4,8
"""


def add_grid_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help=help_of_strategies(),
    ).basic = True
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="train with your own Accelerate or Trainer script instead of ours. Its arguments follow at the "
        "end, after `--`; `--batch 4,8` there makes a grid, `--layers=q,v` does not",
    ).basic = True
    parser.add_argument(
        "--num_processes", type=count, help="ranks (default: one per GPU; two without a GPU)"
    ).basic = True
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=3600,
        metavar="SECONDS",
        help="time limit of one run (default: 3600)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="launch each run N times. With 3 or more, the intervals are over launches (default: 1)",
    )
    parser.add_argument(
        "--parity",
        type=count,
        metavar="K",
        help="check that all strategies compute the same. K steps of a task that shows faults are "
        "compared with one process, and five steps in fp32. Exit code 1 if losses or gradient "
        "norms differ",
    ).basic = True
    parser.add_argument(
        "--largest_batch",
        action="store_true",
        help="find the largest --per_device_train_batch_size that runs, by short runs that start from "
        f"the estimate. Without a GPU it ends at {LARGEST_ON_CPU}",
    ).basic = True
    parser.add_argument(
        "--gpus_per_run",
        type=count,
        metavar="K",
        help="run several at the same time, each on K GPUs (default: one at a time, on all GPUs)",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="launch nothing: print the commands of the runs to do, one per line (a list with --json). For "
        "Slurm, write the scripts and print how to submit them",
    )
    parser.add_argument(
        "--force", action="store_true", help="run everything again, and replace earlier records"
    ).basic = True


def add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("slurm")
    group.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="local: runs on this machine, one after another. slurm: each run is a Slurm job (default: "
        "local)",
    )
    group.add_argument("--num_nodes", type=count, metavar="N", help="nodes of each job (default: 1)")
    group.add_argument(
        "--gpus_per_node",
        type=whole_number,
        metavar="N",
        help="GPUs of each node (default: 0, which runs on CPU)",
    )
    group.add_argument(
        "--slurm_options",
        metavar="OPTIONS",
        help='options for sbatch, such as --slurm_options="--partition=gpu --account=me '
        '--time=2:00:00". Without --time, --timeout is the limit',
    )


_SLURM = "launcher slurm"
_OF_SLURM = ("num_nodes", "gpus_per_node", "slurm_options")
_SLURM_PAIRS = (
    *(Pair(name, _SLURM, is_needed=True) for name in _OF_SLURM),
    Pair("gpus_per_run", _SLURM, ": --gpus_per_node sets the GPUs of a run"),
    Pair("num_nodes", "rehearse", ": a rehearsal is one process"),
)


def nodes_asked(args: argparse.Namespace) -> "SlurmNodes | None":
    """Return the Slurm nodes; None for runs on this machine. Raises ValueError for flags that contradict."""
    check_pairs(flags_given(args), _SLURM_PAIRS)
    if args.launcher == "local":
        return None
    from slm_toolkit.compare.slurm import slurm_nodes

    num_nodes, gpus_per_node = args.num_nodes or 1, args.gpus_per_node or 0
    num_processes = args.num_processes or num_nodes * gpus_per_node or 2
    if num_processes % num_nodes:
        raise ValueError(f"{num_processes} processes on {num_nodes} nodes\nhint: --num_processes, a multiple")
    return slurm_nodes(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        options=args.slurm_options or "",
    )


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm compare`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    parser.has_arguments = True  # those of --script
    add_grid_flags(parser)
    add_slurm_flags(parser)
    add_output_flags(parser)
    add_flags(parser, grid=True, leave_out=ONE_RUN_ONLY)
    parser.set_defaults(verb=_compare)


def _compare(args: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: the ranks must end with this process
        if number == signal.SIGHUP and args.launcher == "slurm":  # jobs must outlive the login
            continue
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)
    console = Console(stderr=True)
    with user_errors():
        baseline = read_baseline(args.baseline)
        plan = prepare(args, nodes=nodes_asked(args), console=console)
        if args.dry_run:
            return _print_commands(plan, args)
        report = _launched(plan, args, console)
    return print_records(report, args, baseline=baseline)


def compared(args: argparse.Namespace) -> Report:
    """Launch the runs that the flags ask for, and return their report. Progress goes to stderr.

    Raises ValueError for a user's mistake, KeyboardInterrupt after Ctrl-C has ended the runs.
    """
    is_live = False if Console().is_jupyter else None  # a notebook would keep each state of a live bar
    console = Console(stderr=True, force_jupyter=False, force_terminal=is_live)
    return _launched(prepare(args, nodes=nodes_asked(args), console=console), args, console)


def _launched(plan: Plan, args: argparse.Namespace, console: Console) -> Report:
    records, searches = launch_all(plan, args, console)
    problems: list[str] = []
    rows = asked_rows(records, args, problems=problems)
    rows = [row.with_values(**searches.get(row.record, {})) for row in rows]
    return Report(rows, Records(records), problems)


def _print_commands(plan: Plan, args: argparse.Namespace) -> int:
    """Print the commands of the runs to do; for Slurm, write their scripts.

    Local commands name the strategies' own files, since none is written.
    """
    from slm_toolkit.compare import local
    from slm_toolkit.compare.outcome import as_typed

    launcher, num_runs = plan.jobs or local, len(plan.runs)
    to_do = [run for run in plan.runs if args.force or launcher.kept_record(run) is None]
    if len(to_do) < num_runs:
        print(f"{num_runs - len(to_do)} of {num_runs} runs are done and kept (--force)", file=sys.stderr)
    if plan.jobs is None:
        commands = [as_typed(local.launch_command(run, Path(run.strategy.path))) for run in to_do]
    else:
        from slm_toolkit.compare.slurm import write_script

        scripts = [write_script(run, plan.jobs.nodes, timeout_seconds=args.timeout) for run in to_do]
        commands = [f"sbatch {shlex.quote(str(script))}" for script in scripts]
    print(json.dumps(commands, indent=2) if args.json else "".join(f"{line}\n" for line in commands), end="")
    return 0
