"""`slm compare`: its flags, the launches of its grid one after another, and the table of their records."""

import argparse
import dataclasses
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from slm_toolkit.config import SYNTHETIC, RunConfig
from slm_toolkit.errors import user_errors
from slm_toolkit.flags import add_flags
from slm_toolkit.network_output import add_probe_flags, print_probe
from slm_toolkit.output import print_records, read_baseline
from slm_toolkit.output_flags import add_output_flags, count, positive_number, whole_number
from slm_toolkit.record import RECORD_FILE, RunRecord
from slm_toolkit.slurm_flags import add_slurm_flags, nodes_asked, print_scripts
from slm_toolkit.strategy import STUDIED_STRATEGIES, find_strategy, shipped_strategies


def add_compare_verb(verbs: Any) -> None:
    """The `compare` command among the `verbs` of `slm`."""
    parser = verbs.add_parser(
        "compare",
        help="run a grid of models, batches and strategies, then print the table",
        description="Run each strategy through its own `accelerate launch`, then compare. Without a GPU: two "
        "CPU processes and a 10M model. Runs that an earlier comparison finished are kept, not repeated.",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=list(STUDIED_STRATEGIES),
        metavar="NAME|YAML",
        help=f"of {', '.join(shipped_strategies())}, or your own YAML (default: all but single)",
    )
    parser.add_argument(
        "--num_processes", type=int, help="ranks (default: all GPUs; without a GPU two processes)"
    )
    parser.add_argument(
        "--timeout", type=positive_number, default=3600, metavar="SECONDS", help="per run (default: 3600)"
    )
    parser.add_argument(
        "--retry", type=whole_number, default=0, metavar="N", help="try a failed run again up to N times"
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="launch each run N times; with 3 or more, intervals are those of the launches (default: 1)",
    )
    parser.add_argument(
        "--parity",
        type=count,
        metavar="K",
        help="do K steps, of the same weights and batches in one process too (in fp32, and in the numerics "
        "asked), and compare losses and gradient norms: exit code 1 where they differ",
    )
    parser.add_argument(
        "--largest_batch",
        action="store_true",
        help="find the largest --per_device_train_batch_size that runs, by short runs from the estimate on",
    )
    parser.add_argument(
        "--max_batch", type=count, metavar="N", help="try none above N; needed without a GPU, which says when"
    )
    parser.add_argument("--force", action="store_true", help="run all again, earlier records are replaced")
    add_probe_flags(parser)
    add_slurm_flags(parser)
    add_output_flags(parser)
    add_flags(parser, grid=True, leave_out=("run_name", "resume_from_checkpoint"))
    parser.set_defaults(verb=_compare, parser=parser)


def _compare(args: argparse.Namespace) -> int:
    from slm_toolkit.compare import local
    from slm_toolkit.compare.display import Display
    from slm_toolkit.compare.grid import PlannedRun, plan_runs
    from slm_toolkit.compare.largest_batch import Search, find_largest_batch, flags_of_trials
    from slm_toolkit.compare.slurm import SlurmJobs
    from slm_toolkit.compare.slurm_script import strategy_on_nodes
    from slm_toolkit.hardware import this_machine

    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: the ranks must end with us
        if hasattr(signal, name) and (name, args.launcher) != ("SIGHUP", "slurm"):  # jobs outlive a login
            signal.signal(getattr(signal, name), signal.default_int_handler)
    with user_errors():
        nodes = nodes_asked(args)
    if args.probe_network:
        return print_probe(args)
    console = Console(stderr=True)
    names = {f.name for f in dataclasses.fields(RunConfig)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if given.get("save_final_model") is None:
        given["save_final_model"] = False  # a comparison measures; six copies of a model would fill the disk
    with user_errors():
        strategies = [find_strategy(name) for name in args.strategy]
        if args.memory and not (args.trace_memory or args.rehearse):
            raise ValueError("--memory needs allocations that were followed\nhint: add --trace_memory")
        baseline = read_baseline(args.baseline)
        if nodes is None:
            with console.status("looking at this machine"):
                machine = this_machine()
        else:
            machine, strategies = nodes.machine, [strategy_on_nodes(found, nodes) for found in strategies]
        if args.probe_seconds is not None:
            raise ValueError("--probe_seconds without --probe_network\nhint: add --probe_network")
        if args.max_batch is not None and not args.largest_batch:
            raise ValueError("--max_batch without --largest_batch\nhint: add --largest_batch")
        if args.largest_batch:
            given = flags_of_trials(
                given,
                strategies,
                max_batch=args.max_batch,
                has_gpu=machine.num_gpus > 0,
                parity=args.parity is not None,
                repeats=args.repeats,
            )
        runs = plan_runs(
            given,
            strategies,
            num_processes=args.num_processes,
            machine=machine,
            repeats=args.repeats,
            parity_steps=args.parity,
        )
        _check_what_needs_torch(runs, console)
        launcher: Any = local
        if nodes is not None:
            launcher = SlurmJobs(nodes, console, timeout_seconds=args.timeout)
            if args.slurm_only_write:
                todo = [run for run in runs if args.force or launcher.kept_record(run) is None]
                return print_scripts(todo, nodes, console, timeout_seconds=args.timeout)

    records: list[tuple[Path, RunRecord]] = []
    searches: dict[str, Search] = {}

    def execute_or_keep(run: PlannedRun) -> RunRecord:
        if args.force:
            launcher.forget(run)
        record = launcher.kept_record(run)
        kept = record is not None
        if record is None:
            display.begin(run)
            with user_errors():
                record = launcher.execute(
                    run, timeout_seconds=args.timeout, retries=args.retry, on_progress=display.progress
                )
        display.end(run, record, kept=kept)
        return record

    try:
        if nodes is not None:
            with user_errors():
                launcher.begin([] if args.largest_batch else runs, force=args.force)
        with Display(runs, console, searching=args.largest_batch) as display:
            for run in runs:
                if args.largest_batch:
                    found, run, record = find_largest_batch(run, execute_or_keep, most=args.max_batch)
                    searches[str(run.folder / RECORD_FILE)] = found
                else:
                    record = execute_or_keep(run)
                records.append((run.folder / RECORD_FILE, record))
    except KeyboardInterrupt:
        if nodes is not None:
            with user_errors():
                launcher.cancel()
        console.print(f"stopped after {len(records)} of {len(runs)} runs; the same command goes on from here")
        if records:
            print_records(records, args, baseline=baseline, searches=searches)
        return 130
    console.print(f"records and logs: {Path(runs[0].config.output_dir)}", highlight=False, soft_wrap=True)
    return print_records(records, args, baseline=baseline, searches=searches)


def _check_what_needs_torch(runs: list, console: Console) -> None:
    """Let data, a tracker or an attention kernel that can't serve be an error before anything is launched."""
    config = runs[-1].config  # the first may be references, which report to nobody
    if config.report_to != "none":
        from slm_toolkit.run.trackers import check_tracker

        check_tracker(config.report_to)
    if kernels := {run.config.attn_implementation for run in runs} - {"eager", "sdpa"}:
        from slm_toolkit.run.model import check_attention

        for run in {(run.spec.name, run.config.attn_implementation): run for run in runs}.values():
            if run.config.attn_implementation in kernels:
                check_attention(run.spec, run.config)
    if config.dataset != SYNTHETIC:
        from slm_toolkit.run.data import load_datasets

        with console.status("reading the dataset"):
            for run in {(run.spec.name, run.config.seq_len): run for run in runs}.values():
                load_datasets(run.config, run.spec, num_sequences=0)
