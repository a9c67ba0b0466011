"""Plan, check and launch the runs of one comparison, and return their records."""

import sys
import threading
from argparse import Namespace
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slm_toolkit.compare import local
from slm_toolkit.compare.display import Display
from slm_toolkit.compare.grid import (
    PAIRS,
    PlannedRun,
    Script,
    find_largest_batch,
    flags_of_trials,
    plan_runs,
    plan_scripts,
)
from slm_toolkit.compare.local import Slot, locked, run_in_slots, slots_of
from slm_toolkit.config.flag_pairs import check_pairs, flags_given
from slm_toolkit.config.flags import every_config, given_flags
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.hardware.gpus import Machine, find_gpu, this_machine
from slm_toolkit.hardware.machine import use_huge_pages
from slm_toolkit.launch.command_line import check_surroundings, check_training, check_versions
from slm_toolkit.model.names import check_tokenizer
from slm_toolkit.predict.choices import choices, given_with
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord
from slm_toolkit.strategy.groups import strategies_asked
from slm_toolkit.strategy.strategy import Strategy, check_one_machine, find_strategy, precision_note

if TYPE_CHECKING:
    from slm_toolkit.compare.slurm import SlurmJobs, SlurmNodes


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, planned and checked."""

    runs: list[PlannedRun]
    slots: list[Slot]
    "one slot for each run that can run at the same time"
    jobs: "SlurmJobs | None"
    "None: all runs are on this machine"


def prepare(args: Namespace, *, nodes: "SlurmNodes | None", console: Console) -> Plan:
    """Plan all runs and check them before anything starts. Notes go to stderr.

    `args`: the flags of `slm compare`. `nodes`: the nodes of Slurm; None: all runs are on this machine.
    Raises ValueError with all wrong settings.
    """
    if nodes is None or not nodes.gpus_per_node:
        use_huge_pages()  # as the ranks do: a record has their allocator
    given = given_flags(args)
    script = _script_of(args, given)
    if nodes is None:
        with console.status("looking at this machine"):
            machine = this_machine()
        slots = slots_of(machine, gpus_per_run=args.gpus_per_run, num_processes=args.num_processes)
    else:  # Slurm decides how many run at the same time; this process waits for them one by one
        machine, slots = nodes.machine, [Slot()]
    has_gpu = machine.num_gpus > 0
    check_pairs(flags_given(args), PAIRS, has_gpu=has_gpu)
    strategies, notes = strategies_asked(args.strategy, given, has_gpu=has_gpu)
    if nodes is not None:
        strategies = [nodes.with_strategy(strategy) for strategy in strategies]
    _print_notes(notes)
    num_processes = args.num_processes
    if num_processes is None and "rehearse" not in given:  # a rehearsal is one process
        num_processes = args.gpus_per_run
    common = {"num_processes": num_processes, "machine": machine, "repeats": args.repeats}
    if script is not None:
        folder = given.get("output_dir", RunConfig.output_dir)
        runs = plan_scripts(script, strategies, output_dir=folder, **common)
    else:
        given = _with_choices(args, given, strategies, machine, num_processes, nodes)
        runs = plan_runs(given, strategies, **common)
    if nodes is None:
        check_one_machine(strategies)
    if script is None:
        _check_runs(runs, console, is_dry=args.dry_run)
    if nodes is None:
        return Plan(runs, slots, None)
    from slm_toolkit.compare.slurm import SlurmJobs

    return Plan(runs, slots, SlurmJobs(nodes, console, timeout_seconds=args.timeout))


def _script_of(args: Namespace, given: dict[str, Any]) -> Script | None:
    """Return the user's own script, None for ours. Raises ValueError for flags and settings of the other."""
    if args.script is None:
        if args.arguments:
            unknown = " ".join(args.arguments)
            raise ValueError(f"unknown: -- {unknown}\nhint: your own script's arguments need --script FILE")
        check_training(every_config(given), [find_strategy(name) for name in args.strategy or ()])
        return None
    if flags := [name for name in given if name != "output_dir"]:
        raise ValueError(
            f"--script with --{', --'.join(flags)}: flags of our own trainer\n"
            "hint: give the script's own arguments at the end: slm compare --script train.py -- ARGUMENTS"
        )
    check_surroundings()
    check_versions()
    return Script.of(args.script, args.arguments)


def _check_runs(runs: list[PlannedRun], console: Console, *, is_dry: bool) -> None:
    """Raise ValueError if the data, a tracker, a kernel or a package can't be used; print notes."""
    for run in () if is_dry else runs:
        check_tokenizer(run.config, run.spec)
    config = runs[-1].config  # parity references, which come first, use no tracker
    if config.report_to != "none":
        from slm_toolkit.run.engine.engine import check_tracker

        check_tracker(config.report_to)
    flags = ("fp8", "kernels", "peft", "attn_implementation")
    for run in {
        (run.spec.name, *(getattr(run.config, name) for name in flags)): run for run in runs
    }.values():
        if run.config.fp8 != "none" or run.config.compiles or run.config.peft != "none":
            from slm_toolkit.run.kernels.layer_kernels import check_optional

            check_optional(run.config)
        if run.config.attn_implementation not in ("eager", "sdpa"):
            from slm_toolkit.run.model.model import check_attention

            check_attention(run.spec, run.config)
    if config.dataset != SYNTHETIC:
        from slm_toolkit.run.data.data import load_data

        with console.status("reading the dataset"):
            for run in {(run.spec.name, run.config.seq_len): run for run in runs}.values():
                load_data(run.config, run.spec, num_sequences=0)
    ignored = {(run.strategy.path, precision_note(run.strategy.mixed_precision, run.config)) for run in runs}
    _print_notes(sorted(f"note: {path}: {note}" for path, note in ignored if note))
    _print_notes(dict.fromkeys(run.taken_out for run in runs if run.taken_out is not None))


def _with_choices(
    args: Namespace,
    given: dict[str, Any],
    strategies: list[Strategy],
    machine: Machine,
    num_processes: int | None,
    nodes: "SlurmNodes | None",
) -> dict[str, Any]:
    """Return the flags with what a comparison, a search of batches and this machine decide."""
    if given.get("save_final_model") is None:
        given["save_final_model"] = "false"  # six copies of a model would fill the disk
    if given.get("save_steps") and not (given.get("overwrite_output_dir") or "rehearse" in given):
        given["resume_from_checkpoint"] = "auto"  # or an unfinished run could not continue
    if args.largest_batch:
        given = flags_of_trials(given, strategies)
    num_gpus = num_processes or machine.num_gpus or 1
    chosen, notes = choices(
        every_config(given),
        strategies,
        gpu=find_gpu(machine.gpu),
        has_gpu=machine.num_gpus > 0 or "rehearse" in given,
        num_gpus=num_gpus,
        gpus_per_node=num_gpus // (nodes.num_nodes if nodes else 1),
        is_comparison=True,
        runs_here=nodes is None,
    )
    _print_notes(notes)
    return given_with(chosen, given)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def launch_all(
    plan: Plan, args: Namespace, console: Console
) -> tuple[list[tuple[Path, RunRecord]], dict[str, dict[str, int | None]]]:
    """Launch the runs that have no record yet. Show progress on the console, and lock the folder of the runs.

    Returns the records in the order of the plan, and what --largest_batch found by path of the record.
    Raises ValueError for a folder that can't be used, and for what a run can't replace; KeyboardInterrupt
    after Ctrl-C, when all runs have ended.
    """
    runs, launcher, stop = plan.runs, plan.jobs or local, threading.Event()
    folder = Path(runs[0].config.output_dir)
    num_slots = len(plan.slots) if plan.jobs is None else None  # the time in a queue is unknown
    display = Display(runs, console, searching=args.largest_batch, num_slots=num_slots)
    searches: dict[str, dict[str, int | None]] = {}
    done: dict[int, tuple[Path, RunRecord]] = {}

    def execute_or_keep(run: PlannedRun, slot: Slot) -> RunRecord:
        if args.force:
            launcher.forget(run)
        record = launcher.kept_record(run)
        if kept := record is not None:
            with suppress(OSError):
                local.clear(run.folder)  # a kill after the record was written leaves files
        else:
            display.begin(run)
            shows = partial(display.progress, run)
            record = launcher.execute(run, slot, timeout_seconds=args.timeout, stop=stop, on_progress=shows)
        display.end(run, record, kept=kept)
        return record

    def work(run: PlannedRun, slot: Slot) -> tuple[Path, RunRecord]:
        if not args.largest_batch:
            return run.folder / RECORD_FILE, execute_or_keep(run, slot)
        found, shown, record = find_largest_batch(run, partial(execute_or_keep, slot=slot))
        searches[str(shown.folder / RECORD_FILE)] = vars(found)
        return shown.folder / RECORD_FILE, record

    with locked(folder) as num_left_over:
        if num_left_over:
            console.print(f"stopped {num_left_over} processes that a killed comparison left in {folder}")
        try:
            launcher.begin([] if args.largest_batch else runs, force=args.force)
            with display.bars, closing(run_in_slots(runs, work, plan.slots, stop)) as results:
                done.update(results)
        except KeyboardInterrupt:
            launcher.cancel()
            again = "the same command, without --force," if args.force else "the same command"
            console.print(f"stopped after {len(done)} of {len(runs)} runs; {again} continues from here")
            raise
    console.print(f"records and logs: {folder}", highlight=False, soft_wrap=True)
    return [done[index] for index in sorted(done)], searches
