"""`slm compare`: launch a grid of runs, one by one, side by side or as Slurm jobs, and print their table."""

import argparse
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.network import add_probe_flags, print_probe
from slm_toolkit.cli.output import (
    EXPORTS,
    add_output_flags,
    asked_rows,
    check_exports,
    print_records,
    read_baseline,
)
from slm_toolkit.compare.grid import PAIRS, PlannedRun
from slm_toolkit.compare.slurm import SLURM_TEMPLATE, SlurmNodes, slurm_nodes, write_script
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given, pair_problems
from slm_toolkit.config.flags import add_flags, every_config, given_flags
from slm_toolkit.config.parser import count, positive_number, whole_number
from slm_toolkit.hardware.gpus import Machine, this_machine
from slm_toolkit.hardware.machine import advise
from slm_toolkit.hardware.prices import find_price
from slm_toolkit.launch.command_line import check_training
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord
from slm_toolkit.strategy.groups import help_of_strategies, strategies_asked
from slm_toolkit.strategy.strategy import (
    check_one_machine,
    find_strategy,
    precision_note,
)

if TYPE_CHECKING:
    from slm_toolkit.compare.grid import PlannedRun
    from slm_toolkit.compare.local import Slot
    from slm_toolkit.compare.slurm import SlurmJobs, SlurmNodes


_DESCRIPTION = """\
Train under each strategy with its own `accelerate launch`, then print one table. Finished runs of an earlier
comparison are kept, not repeated. Without a GPU it runs two CPU processes and a 10M model."""
_EXAMPLES = """\
  slm compare --max_steps 10                              six strategies on this machine
  slm compare --strategy ddp ds_zero2 --model slm-1m --per_device_train_batch_size 4 8
  slm compare --model slm-1m --seq_len 64 --parity 20     do all strategies compute the same?
"""


def add_grid_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help=help_of_strategies(),
    ).basic = True
    parser.add_argument(
        "--num_processes", type=int, help="ranks (default: one per GPU; two without a GPU)"
    ).basic = True
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=3600,
        metavar="SECONDS",
        help="time limit of one run (default: 3600)",
    )
    parser.add_argument(
        "--retry", type=whole_number, default=0, metavar="N", help="retry a failed run up to N times"
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
        "the estimate",
    ).basic = True
    parser.add_argument(
        "--max_batch",
        type=count,
        metavar="N",
        help="largest batch to try (required on CPU, where nothing runs out of memory)",
    )
    parser.add_argument(
        "--gpus_per_run",
        type=count,
        metavar="K",
        help="run several at the same time, each on K GPUs (default: one at a time, on all GPUs)",
    )
    parser.add_argument(
        "--runs_at_once",
        type=count,
        metavar="N",
        help="without a GPU: run N at the same time. They share the cores and slow each other down",
    )
    parser.add_argument(
        "--skip_oom",
        action="store_true",
        help="don't launch runs that will not fit this GPU by the estimate. Their rows show by how much",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="launch nothing: print the commands of the runs to do, one per line (a list with --json)",
    ).basic = True
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
    group.add_argument(
        "--slurm_template",
        type=Path,
        metavar="FILE",
        help=f"template of the job's script, instead of {SLURM_TEMPLATE}",
    )
    group.add_argument(
        "--slurm_only_write",
        action="store_true",
        help="write the scripts and print how to submit them; submit nothing",
    )


_OF_ONE_RUN = (
    *("run_name", "resume_from_checkpoint", "max_time"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
)
"flags that make no sense for several runs"
_SLURM = "launcher slurm"
_OF_SLURM = ("num_nodes", "gpus_per_node", "slurm_options", "slurm_template", "slurm_only_write")
_SLURM_PAIRS = (
    *(Pair(name, _SLURM, is_needed=True) for name in _OF_SLURM),
    Pair("probe_network", _SLURM, ": submit slm_toolkit.run.network_probe with sbatch instead"),
    Pair("largest_batch", "slurm_only_write", ": each trial depends on the one before"),
    Pair("gpus_per_run", _SLURM, ": --gpus_per_node sets the GPUs of a run"),
    Pair("runs_at_once", _SLURM, ": the cluster decides how many jobs run at the same time"),
    Pair("dry_run", _SLURM, ": --slurm_only_write shows what would be submitted"),
    Pair("skip_oom", _SLURM, ": the GPU of the nodes is not known before a run ends"),
)
_MEASURES_NOTHING = tuple(Pair(name, "dry_run", ", which measures nothing") for name in EXPORTS)


def nodes_asked(args: argparse.Namespace) -> SlurmNodes | None:
    """Return the Slurm nodes; None for runs on this machine. Raises ValueError for flags that contradict."""
    if args.launcher == "local":
        check_pairs(flags_given(args), _SLURM_PAIRS)
        return None
    num_nodes, gpus_per_node = args.num_nodes or 1, args.gpus_per_node or 0
    num_processes = args.num_processes
    if num_processes is None:
        num_processes = num_nodes * gpus_per_node or 2
    problems = []
    if num_processes % num_nodes:
        problems.append(
            f"{num_processes} processes on {num_nodes} nodes: make --num_processes a multiple of the nodes"
        )
    if args.rehearse and num_nodes > 1:
        problems.append("--rehearse with --num_nodes: a rehearsal is one process")
    problems += pair_problems(flags_given(args), _SLURM_PAIRS)
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: `slm compare --help all` explains each flag")
    return slurm_nodes(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        options=args.slurm_options or "",
        template=SLURM_TEMPLATE if args.slurm_template is None else args.slurm_template,
    )


def print_scripts(
    runs: list[PlannedRun], nodes: SlurmNodes, console: Console, *, timeout_seconds: float
) -> int:
    """Write the script of each run and print how to submit it. `slm compare` finds the jobs again."""
    for run in runs:
        script = write_script(run, nodes, timeout_seconds=timeout_seconds)
        print(f"sbatch {shlex.quote(str(script))}")
    console.print(
        "the same command without --slurm_only_write waits for these jobs and collects their records"
    )
    return 0


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm compare`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    add_grid_flags(parser)
    add_probe_flags(parser)
    add_slurm_flags(parser)
    add_output_flags(parser)
    add_flags(parser, grid=True, leave_out=_OF_ONE_RUN)
    parser.set_defaults(verb=_compare)


def _compare(args: argparse.Namespace) -> int:
    from slm_toolkit.cli.before_launch import check_launches
    from slm_toolkit.compare.slurm import SlurmJobs
    from slm_toolkit.compare.supervisor import locked
    from slm_toolkit.compare.torch_checks import check_with_torch

    for name in ("SIGTERM", "SIGHUP"):  # handled like Ctrl-C: the ranks must end with this process
        number = getattr(signal, name, None)
        if number is None or (name, args.launcher) == ("SIGHUP", "slurm"):  # jobs must outlive the login
            continue
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)
    with user_errors():
        nodes = nodes_asked(args)
    if args.probe_network:
        return print_probe(args)
    console = Console(stderr=True)
    with ExitStack() as until_the_end:
        with user_errors():
            if args.memory and not (args.trace_memory or args.rehearse):
                raise ValueError("--memory needs traced allocations\nhint: add --trace_memory")
            check_exports(args)
            check_pairs(flags_given(args), _MEASURES_NOTHING)
            baseline = read_baseline(args.baseline)
            check_training(
                every_config(given_flags(args)), [find_strategy(name) for name in args.strategy or ()]
            )
            if nodes is None:
                with console.status("looking at this machine"):
                    machine = this_machine()
            else:
                machine = nodes.machine
            runs, slots = _plan(args, machine, nodes)
            check_with_torch(runs, console)  # reports a missing GPU before a missing package
            launches = [(run.strategy, run.config, run.spec, run.asked["num_processes"]) for run in runs]
            taken_out = [run.taken_out for run in runs if run.taken_out is not None]
            found = check_launches(launches, machine, is_here=nodes is None)
            if nodes is None:
                check_one_machine(run.strategy for run in runs)
            for note in dict.fromkeys([*taken_out, *found]):
                print(note, file=sys.stderr)
            jobs = nodes and SlurmJobs(nodes, console, timeout_seconds=args.timeout)
            if args.slurm_only_write:
                todo = [run for run in runs if args.force or jobs.kept_record(run) is None]
                return print_scripts(todo, nodes, console, timeout_seconds=args.timeout)
            if not args.dry_run:
                folder = Path(runs[0].config.output_dir)
                num_left_over = until_the_end.enter_context(locked(folder))
        if args.dry_run:
            return _print_commands(runs, args)
        if num_left_over:
            console.print(f"stopped {num_left_over} processes that a killed comparison left in {folder}")
        if machine.num_gpus == 0 and nodes is None and not args.rehearse:  # Slurm's jobs have their own
            advise(console)
        return _run(runs, slots, machine, args, jobs=jobs, console=console, baseline=baseline)


def _plan(
    args: argparse.Namespace, machine: Machine, nodes: "SlurmNodes | None"
) -> tuple[list["PlannedRun"], list["Slot"]]:
    """Return all runs, and the slots in which they run side by side. Raises ValueError for invalid flags."""
    from slm_toolkit.compare.grid import plan_runs
    from slm_toolkit.compare.largest_batch import flags_of_trials
    from slm_toolkit.compare.local import Slot, slots_of
    from slm_toolkit.compare.predicted import check_skippable
    from slm_toolkit.compare.slurm import strategy_on_nodes

    given = given_flags(args)
    if given.get("save_final_model") is None:
        given["save_final_model"] = False  # six copies of a model would fill the disk
    if given.get("save_steps") and not (given.get("overwrite_output_dir") or "rehearse" in given):
        given["resume_from_checkpoint"] = "auto"  # or an unfinished run could not continue
    strategies, left_out = strategies_asked(args.strategy, given, has_gpu=machine.num_gpus > 0)
    for note in left_out:
        print(note, file=sys.stderr)
    check_pairs(flags_given(args), PAIRS, has_gpu=machine.num_gpus > 0)
    if nodes is None:
        slots = slots_of(
            machine,
            gpus_per_run=args.gpus_per_run,
            runs_at_once=args.runs_at_once,
            num_processes=args.num_processes,
        )
    else:  # Slurm decides how many run at the same time; this process waits for them one by one
        slots = [Slot()]
        strategies = [strategy_on_nodes(strategy, nodes) for strategy in strategies]
    if args.largest_batch:
        given = flags_of_trials(
            given,
            strategies,
            max_batch=args.max_batch,
            has_gpu=machine.num_gpus > 0,
        )
    of_rehearsal = "rehearse" in given  # one process, whose flag has the number of ranks
    num_processes = args.num_processes
    if num_processes is None and not of_rehearsal:
        num_processes = args.gpus_per_run
    runs = plan_runs(
        given,
        strategies,
        num_processes=num_processes,
        machine=machine,
        repeats=args.repeats,
        parity_steps=args.parity,
    )
    if args.skip_oom:
        check_skippable(runs)
    notes = {
        (run.strategy.path, precision_note(run.strategy.mixed_precision, run.config)): None for run in runs
    }
    print("".join(f"note: {path}: {note}\n" for path, note in notes if note), end="", file=sys.stderr)
    return runs, slots


def _run(
    runs: list["PlannedRun"],
    slots: list["Slot"],
    machine: Machine,
    args: argparse.Namespace,
    *,
    jobs: "SlurmJobs | None",
    console: Console,
    baseline: list[tuple[Path, RunRecord]],
) -> int:
    """Do the runs that are not done yet, then print the table of all runs."""
    from slm_toolkit.compare import local
    from slm_toolkit.compare.display import Display
    from slm_toolkit.compare.largest_batch import BatchSearch, find_largest_batch
    from slm_toolkit.compare.local import run_in_slots
    from slm_toolkit.compare.predicted import skipped_record
    from slm_toolkit.report.rows import with_values

    if jobs is None and not args.force and not args.largest_batch:
        with user_errors():
            for run in runs:
                local.check_place(run)
    stop = threading.Event()
    launcher: Any = local if jobs is None else jobs

    def execute_or_keep(run: "PlannedRun", slot: "Slot") -> RunRecord:
        if args.force:
            with user_errors():
                launcher.forget(run)
        record = launcher.kept_record(run)
        kept = record is not None
        if kept:
            with suppress(OSError):
                local.clear(run.folder)  # a kill after the record was written leaves files
        if record is None and args.skip_oom and (record := skipped_record(run)) is not None:
            with suppress(OSError):  # on a full disk the row is still shown
                write_record(record, run.folder)
        if record is None:
            display.begin(run)
            with user_errors():
                record = launcher.execute(
                    run,
                    slot,
                    timeout_seconds=args.timeout,
                    retries=args.retry,
                    stop=stop,
                    on_progress=partial(display.progress, run),
                )
        display.end(run, record, kept=kept)
        return record

    def work(run: "PlannedRun", slot: "Slot") -> tuple["PlannedRun", RunRecord, BatchSearch | None]:
        if not args.largest_batch:
            return run, execute_or_keep(run, slot), None
        found, shown, record = find_largest_batch(
            run, partial(execute_or_keep, slot=slot), most=args.max_batch
        )
        return shown, record, found

    done: dict[int, tuple[PlannedRun, RunRecord, BatchSearch | None]] = {}
    display = Display(
        runs,
        console,
        searching=args.largest_batch,
        num_slots=len(slots) if jobs is None else None,  # the time in a queue is unknown
        usd_so_far=_usd_so_far(runs, machine, jobs, len(slots), usd_per_gpu_hour=args.usd_per_gpu_hour),
    )
    interrupted = False
    try:
        if jobs is not None:
            with user_errors():
                jobs.begin([] if args.largest_batch else runs, force=args.force)
        with display, closing(run_in_slots(runs, work, slots, stop)) as results:
            for index, result in results:
                done[index] = result
    except KeyboardInterrupt:
        interrupted = True
        if jobs is not None:
            with user_errors():
                jobs.cancel()
        again = "the same command, without --force," if args.force else "the same command"
        console.print(f"stopped after {len(done)} of {len(runs)} runs; {again} continues from here")
    shown = [done[index] for index in sorted(done)]
    records = [(run.folder / RECORD_FILE, record) for run, record, _ in shown]
    searches = {str(run.folder / RECORD_FILE): found for run, _, found in shown if found is not None}
    if not interrupted:
        console.print(f"records and logs: {Path(runs[0].config.output_dir)}", highlight=False, soft_wrap=True)
    elif not records:
        return 130
    rows = [
        with_values(row, largest_batch=search.largest_ok, smallest_oom_batch=search.smallest_oom)
        if (search := searches.get(row.record))
        else row
        for row in asked_rows(records, args)
    ]
    code = print_records(rows, records, args, baseline=baseline)
    return 130 if interrupted else code


def _usd_so_far(
    runs: list["PlannedRun"],
    machine: Machine,
    jobs: "SlurmJobs | None",
    num_slots: int,
    *,
    usd_per_gpu_hour: float | None,
) -> Callable[[], float] | None:
    """Return a function for the dollars spent so far; None without a price.

    It counts every GPU of this machine, idle ones included; on a CPU every process; under Slurm the GPU
    seconds of the jobs.
    """
    price = find_price(machine.gpu, usd_per_gpu_hour=usd_per_gpu_hour)
    if price is None:
        return None
    if jobs is not None:
        return lambda: sum(jobs.gpu_seconds.values()) / 3600 * price.usd_per_gpu_hour
    num_paid = machine.num_gpus or num_slots * max(run.num_processes for run in runs)
    started = time.monotonic()
    return lambda: (time.monotonic() - started) / 3600 * num_paid * price.usd_per_gpu_hour


def _print_commands(runs: list["PlannedRun"], args: argparse.Namespace) -> int:
    """Print the commands of the runs to do. They name the strategies' own files, since none is written."""
    from slm_toolkit.compare.local import kept_record, launch_command
    from slm_toolkit.compare.outcome import as_typed
    from slm_toolkit.compare.predicted import skipped_record

    to_do = [run for run in runs if args.force or kept_record(run) is None]
    if len(to_do) < len(runs):
        print(f"{len(runs) - len(to_do)} of {len(runs)} runs are done and kept (--force)", file=sys.stderr)
    if args.skip_oom:
        would_fit = [run for run in to_do if skipped_record(run) is None]
        print(f"{len(to_do) - len(would_fit)} of {len(runs)} runs would be skipped", file=sys.stderr)
        to_do = would_fit
    commands = [as_typed(launch_command(run, Path(run.strategy.path), port=0)) for run in to_do]
    print(json.dumps(commands, indent=2) if args.json else "".join(f"{line}\n" for line in commands), end="")
    return 0
