"""What `slm compare` and `slm report` print of records: flags, rows, notes, and the exit code."""

import argparse
import dataclasses
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.parser import positive_number, price_per_hour
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord
from slm_toolkit.report.tables.fitted import MANY_ROWS, console_of_stdout

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row


STDOUT = Path("-")
EXPORTS = ("csv", "markdown", "latex", "svg", "parquet")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("exports", "to a file beside the table, or with - instead of it")
    group.add_argument("--csv", type=Path, metavar="FILE|-", help="the names and rows of --json")
    group.add_argument("--parquet", type=Path, metavar="FILE", help="the same")
    group.add_argument("--markdown", type=Path, metavar="FILE|-", help="the table, all columns of it")
    group.add_argument(
        "--latex", type=Path, metavar="FILE|-", help="without empty columns, with booktabs' rules"
    )
    group.add_argument("--svg", type=Path, metavar="FILE|-", help="the table as a picture")


def exports_asked(args: argparse.Namespace) -> list[str]:
    return [name for name in EXPORTS if getattr(args, name) is not None]


def on_stdout(args: argparse.Namespace) -> list[str]:
    """The flags that want stdout for themselves."""
    named = [name for name in exports_asked(args) if getattr(args, name) == STDOUT]
    return [*named, *(["json"] if args.json else [])]


def check_exports(args: argparse.Namespace) -> None:
    """Raises ValueError for a file that can't be written, before anything runs, and for two on stdout."""
    problems = []
    if args.parquet == STDOUT:
        problems.append("--parquet -: Parquet is no text\nhint: --parquet rows.parquet")
    elif len(taken := on_stdout(args)) > 1:
        problems.append(f"--{' and --'.join(taken)} both go to stdout\nhint: give one of them a file")
    for name in exports_asked(args):
        path = getattr(args, name)
        if path != STDOUT and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            problems.append(f"--{name} {path}: {what}\nhint: a file in a folder that is there")
    if problems:
        raise ValueError("\n".join(problems))


def write_exports(rows: list["Row"], content: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """All that was asked for; returns whether it took stdout. `content`: the objects of `--json`."""
    from slm_toolkit.report.tables.export import (
        csv_text,
        json_text,
        latex_text,
        markdown_text,
        svg_text,
        write_parquet,
    )

    texts = {
        "csv": lambda: csv_text(content),
        "markdown": lambda: markdown_text(rows),
        "latex": lambda: latex_text(rows),
        "svg": lambda: svg_text(rows),
    }
    for name in exports_asked(args):
        path = getattr(args, name)
        if path == STDOUT:
            sys.stdout.write(texts[name]())
            continue
        with user_errors():
            try:
                if name == "parquet":
                    write_parquet(content, path)
                else:
                    path.write_text(texts[name](), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"--{name} {path}: {error}\nhint: another folder, or more space") from None
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json_text(content))
    return bool(on_stdout(args))


FOLDER = "comparisons"
"beside the folder of the first record"


def add_report_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report_to",
        choices=("trackio", "tensorboard", "wandb"),
        help="send each row to a tracker as a run, offline: all figures, losses and step_seconds by step",
    )


def check_report_to(args: argparse.Namespace) -> None:
    """Raises ValueError for a tracker that is not installed."""
    from slm_toolkit.report.tables.export import TRACKERS, check_installed

    if args.report_to in TRACKERS:
        check_installed(args.report_to)


def track_rows(
    rows: dict[str, "Row"], records: list[tuple[Path, RunRecord]], args: argparse.Namespace
) -> None:
    """Each labelled row as a run; says on stderr how to look at them."""
    from slm_toolkit.report.tables.export import TRACKERS, track, tracked_run

    if args.report_to not in TRACKERS:  # `slm compare` knows all of accelerate's
        known = ", ".join(TRACKERS)
        print(f"the runs are in {args.report_to}, their comparison is not: only {known}", file=sys.stderr)
        return
    by_path = {str(path): record for path, record in records}
    runs = [tracked_run(label, row, by_path[row.record]) for label, row in rows.items()]
    group = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    hint = track(runs, args.report_to, folder=records[0][0].parent.parent / FOLDER, group=group)
    print(f"{len(runs)} runs in {args.report_to}: {hint}", file=sys.stderr)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of rows, unknown is null")
    parser.add_argument(
        "--usd_per_gpu_hour", type=price_per_hour, metavar="USD", help="your price, instead of the table's"
    )
    parser.add_argument(
        "--strict", action="store_true", help="give no rank to rows that were computed with other numerics"
    )
    parser.add_argument(
        "--parity_tolerance",
        type=positive_number,
        metavar="X",
        help="largest difference of a loss that passes (default by numerics: fp32 1e-5, aligned 0.01, stock "
        "and pure_bf16 0.05; more where one process of the same numerics differs by more from fp32)",
    )
    parser.add_argument(
        "--phases", action="store_true", help="print data, forward, backward and optimizer of a step too"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print where the memory peak is, which modules own it, and the step as a chart, of runs with "
        "--trace_memory or --rehearse",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="earlier records: what got slower, bigger or less accurate since? exit code 1 if something did",
    )
    add_export_flags(parser)


def read_baseline(folder: Path | None) -> list[tuple[Path, RunRecord]]:
    """The records to hold others against, read before those are written. Raises ValueError for none."""
    if folder is None:
        return []
    records, problems = find_records([folder])
    if not records:
        raise ValueError(
            (problems or [f"no {RECORD_FILE} under {folder}"])[0] + "\nhint: --baseline takes earlier records"
        )
    for problem in problems:
        print(f"left out of the baseline: {problem}", file=sys.stderr)
    return records


def print_records(
    rows: list["Row"],
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    baseline: list[tuple[Path, RunRecord]],
) -> int:
    """Rows to stdout; returns 1 where one failed, broke parity or is worse than its baseline, else 0.

    1 too where there is nothing of what was asked for: no parity check, no run that the baseline has, no
    memory that was followed.
    """
    from slm_toolkit.report.charts.panels import pictures_of
    from slm_toolkit.report.rows import labelled
    from slm_toolkit.report.tables.baseline import baseline_table, changes
    from slm_toolkit.report.tables.export import json_rows
    from slm_toolkit.report.tables.sections import failed_references, sections

    named = labelled(rows)
    found, missing = changes(rows, asked_rows(baseline, args)) if baseline else ([], [])
    unchecked = failed_references(records)
    if args.memory and all(row.memory_at_peak is None for row in rows):
        unchecked.append(
            "no memory timeline: only runs with --trace_memory, or --rehearse without a GPU, have one"
        )
    parity_due = getattr(args, "parity", None) and not failed_references(records)
    if parity_due and all(row.parity_holds is None for row in rows):
        unchecked.append("no parity check: no row ended ok, or none had a reference")
    content = json_rows(rows) if args.json or exports_asked(args) else []
    if baseline:
        by_record = {change.record_now: dataclasses.asdict(change) for change in found}
        content = [{**row, "baseline": by_record.get(row["record"])} for row in content]
    if write_exports(rows, content, args):
        print("".join(f"{line}\n" for line in unchecked), end="", file=sys.stderr)
    else:
        console = console_of_stdout()
        width = console.width
        problems: list[str] = []
        pictures = pictures_of(named, problems=problems) if args.memory else {}
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        for part in sections(
            rows,
            width=width,
            most_rows=MANY_ROWS if console.is_terminal else None,
            unchecked=unchecked,
            phases=args.phases,
            pictures=pictures,
        ):
            console.print(part, crop=False)
        if baseline:
            labels = {row.record: label for label, row in named.items()}
            console.print(
                baseline_table(found, missing, named=labels, baseline=args.baseline, width=width), crop=False
            )
    if args.report_to not in (None, "none"):
        track_rows(named, records, args)
    well = all(row.status in ("ok", "oom", "skipped") and row.parity_holds is not False for row in rows)
    worse = any(change.is_regression for change in found) or (bool(baseline) and not found)
    return 0 if well and not worse and not unchecked else 1


def print_errors(records: list[tuple[Path, RunRecord]], args: argparse.Namespace) -> int:
    """The prediction ledger to stdout; returns 1 where no record can be held against an estimate, else 0."""
    from slm_toolkit.report.rows import labelled
    from slm_toolkit.report.tables.ledger import ledger_of, ledger_table, summaries

    entries, left_out = ledger_of(records)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2, allow_nan=False))
    elif entries:
        named = {row.record: label for label, row in labelled(asked_rows(records, args)).items()}
        console = console_of_stdout()
        table = ledger_table(entries, summaries(entries), named=named, width=console.width)
        console.print(table, crop=False)
    return 0 if entries else 1


def asked_rows(
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    problems: list[str] | None = None,
) -> list["Row"]:
    """The rows of records, by the flags of `add_output_flags`."""
    from slm_toolkit.report.rows import rows_of

    return rows_of(
        records,
        usd_per_gpu_hour=args.usd_per_gpu_hour,
        parity_tolerance=args.parity_tolerance,
        strict=args.strict,
        problems=problems,
    )
