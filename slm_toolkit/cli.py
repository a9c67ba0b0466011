"""The `slm` command: compare runs, estimate them, report on records, write out the configurations."""

import argparse
import dataclasses
import json
import os
import signal
import sys
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from slm_toolkit import __version__
from slm_toolkit.config import SYNTHETIC, RunConfig
from slm_toolkit.doctor import add_doctor_verb
from slm_toolkit.errors import user_errors
from slm_toolkit.estimate import add_estimate_verb
from slm_toolkit.flags import Parser, add_flags, with_underscores
from slm_toolkit.network_output import add_probe_flags, print_probe
from slm_toolkit.output import print_errors, print_records, read_baseline
from slm_toolkit.output_flags import add_output_flags, count, positive_number, whole_number
from slm_toolkit.recommend import add_recommend_verb
from slm_toolkit.record import RECORD_FILE, RunRecord, find_records
from slm_toolkit.strategy import STUDIED_STRATEGIES, copy_configs, find_strategy, shipped_strategies

_EPILOG = """\
examples:
  slm compare                                             six strategies on this machine, then a table
  slm compare --strategy ddp ds_zero2 --per_device_train_batch_size 4 8 16
  slm estimate --model slm-2b --gpu a100-40gb             its peak memory, and does it fit; nothing runs
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb  the cheapest way to train it on what you can get
  slm doctor --model slm-500m                             what is unwise in it, on which GPU, by how much
  slm report runs --json                                  the records of earlier runs
  slm configs --copy .                                    the YAMLs, to change and to launch
one training run:
  accelerate launch --config_file accel_configs/fsdp_full_shard.yaml -m slm_toolkit.train --help
"""


def main(argv: list[str] | None = None) -> None:
    """Entry point of `slm`. Exit codes: 0 all rows ok or oom, 1 a row failed or broke parity, 2 bad input."""
    args, unknown = _parser().parse_known_args(with_underscores(sys.argv[1:] if argv is None else argv))
    if unknown:
        known = [f"--{name}" for name in vars(args) if name not in ("parser", "verb")]
        close = get_close_matches(unknown[0], known, n=1)
        args.parser.error(f"unknown: {' '.join(unknown)}" + (f" (did you mean {close[0]}?)" if close else ""))
    try:
        code = args.verb(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slm",
        description="Train a small language model under every sharding strategy and compare what it costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slm_toolkit {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    compare = verbs.add_parser(
        "compare",
        help="run a grid of models, batches and strategies, then print the table",
        description="Run each strategy through its own `accelerate launch`, then compare. Without a GPU: two "
        "CPU processes and a 10M model. Runs that an earlier comparison finished are kept, not repeated.",
    )
    compare.add_argument(
        "--strategy",
        nargs="+",
        default=list(STUDIED_STRATEGIES),
        metavar="NAME|YAML",
        help=f"of {', '.join(shipped_strategies())}, or your own YAML (default: all but single)",
    )
    compare.add_argument(
        "--num_processes", type=int, help="ranks (default: all GPUs; without a GPU two processes)"
    )
    compare.add_argument(
        "--timeout", type=positive_number, default=3600, metavar="SECONDS", help="per run (default: 3600)"
    )
    compare.add_argument(
        "--retry", type=whole_number, default=0, metavar="N", help="try a failed run again up to N times"
    )
    compare.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="launch each run N times; with 3 or more, intervals are those of the launches (default: 1)",
    )
    compare.add_argument(
        "--parity",
        type=count,
        metavar="K",
        help="do K steps, of the same weights and batches in one process too (in fp32, and in the numerics "
        "asked), and compare losses and gradient norms: exit code 1 where they differ",
    )
    compare.add_argument(
        "--largest_batch",
        action="store_true",
        help="find the largest --per_device_train_batch_size that runs, by short runs from the estimate on",
    )
    compare.add_argument(
        "--max_batch", type=count, metavar="N", help="try none above N; needed without a GPU, which says when"
    )
    compare.add_argument("--force", action="store_true", help="run all again, earlier records are replaced")
    add_probe_flags(compare)
    add_output_flags(compare)
    add_flags(compare, grid=True, leave_out=("run_name", "resume_from_checkpoint"))
    compare.set_defaults(verb=_compare, parser=compare)

    add_estimate_verb(verbs)
    add_recommend_verb(verbs)
    add_doctor_verb(verbs)

    report = verbs.add_parser(
        "report", help="print the table of recorded runs", description="The table of records."
    )
    report.add_argument(
        "records", nargs="*", type=Path, default=[Path("runs")], help="folders or files (default: runs)"
    )
    report.add_argument(
        "--errors",
        action="store_true",
        help="instead of the table, how far `slm estimate`'s memory is from that of each record, by part",
    )
    add_output_flags(report)
    report.set_defaults(verb=_report, parser=report)

    configs = verbs.add_parser(
        "configs",
        help="list the shipped accelerate YAMLs, or write them out",
        description="The accelerate YAMLs that this package ships, and the DeepSpeed JSONs they name.",
    )
    configs.add_argument(
        "--copy", type=Path, metavar="DIR", help="write accel_configs/ and ds_configs/ under DIR"
    )
    configs.add_argument("--json", action="store_true", help="print as JSON")
    configs.set_defaults(verb=_configs, parser=configs)
    return parser


def _compare(args: argparse.Namespace) -> int:
    from slm_toolkit.compare.display import Display
    from slm_toolkit.compare.grid import PlannedRun, plan_runs
    from slm_toolkit.compare.largest_batch import Search, find_largest_batch, flags_of_trials
    from slm_toolkit.compare.local import execute, forget, kept_record
    from slm_toolkit.hardware import this_machine

    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: the ranks must end with us
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
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
        with console.status("looking at this machine"):
            machine = this_machine()
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

    records: list[tuple[Path, RunRecord]] = []
    searches: dict[str, Search] = {}

    def execute_or_keep(run: PlannedRun) -> RunRecord:
        if args.force:
            forget(run)
        record = kept_record(run)
        kept = record is not None
        if record is None:
            display.begin(run)
            record = execute(
                run, timeout_seconds=args.timeout, retries=args.retry, on_progress=display.progress
            )
        display.end(run, record, kept=kept)
        return record

    try:
        with Display(runs, console, searching=args.largest_batch) as display:
            for run in runs:
                if args.largest_batch:
                    found, run, record = find_largest_batch(run, execute_or_keep, most=args.max_batch)
                    searches[str(run.folder / RECORD_FILE)] = found
                else:
                    record = execute_or_keep(run)
                records.append((run.folder / RECORD_FILE, record))
    except KeyboardInterrupt:
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


def _report(args: argparse.Namespace) -> int:
    with user_errors():
        others = [name for name in ("baseline", "memory", "phases", "strict") if getattr(args, name)]
        if args.errors and others:
            raise ValueError(f"--{others[0]} with --errors, which prints errors alone\nhint: give one")
        records, problems = find_records(args.records)
        if not records:
            nothing = f"no {RECORD_FILE} under {args.records[0]}\nhint: `slm compare` writes records"
            raise ValueError(problems[0] if problems else nothing)
        baseline = read_baseline(args.baseline)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    records.sort(key=_order)
    code = print_errors(records, args) if args.errors else print_records(records, args, baseline=baseline)
    return max(code, 1 if problems else 0)


def _order(found: tuple[Path, RunRecord]) -> tuple:
    """Models by size, then what was asked, rehearsals by ranks, then strategies as the study lists them."""
    record = found[1]
    known = [*STUDIED_STRATEGIES, record.strategy]
    asked = {**record.asked["config"]}
    num_rehearsed = asked.pop("rehearse", None)
    return (
        record.model["num_params"],
        not record.is_parity_reference,
        str(asked),
        num_rehearsed or 0,
        known.index(record.strategy),
        str(found[0]),
    )


def _configs(args: argparse.Namespace) -> int:
    with user_errors():
        if args.copy is not None:
            paths = [str(path) for path in copy_configs(args.copy)]
            print(json.dumps(paths) if args.json else "\n".join(paths))
            return 0
        strategies = [find_strategy(name) for name in shipped_strategies()]
    if args.json:
        names = ("name", "engine", "zero_stage", "reshard_after_forward", "path")
        print(
            json.dumps(
                [{name: getattr(strategy, name) for name in names} for strategy in strategies], indent=2
            )
        )
    else:
        print("\n".join(f"{strategy.name:20} {strategy.path}" for strategy in strategies))
    return 0


if __name__ == "__main__":
    main()
