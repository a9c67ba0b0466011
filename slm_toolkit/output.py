"""What `slm compare` and `slm report` print of records: rows, notes, and the exit code they add up to."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from slm_toolkit.compare.parity import Parity, judge
from slm_toolkit.config import RunConfig
from slm_toolkit.record import RunRecord, find_records

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row

PIPE_WIDTH = 220
"columns where stdout has no width: nothing may be left out"


def print_records(records: list[tuple[Path, RunRecord]], args: argparse.Namespace) -> int:
    """Rows to stdout; returns 1 where a row failed, broke parity or is worse than its baseline, else 0."""
    from slm_toolkit.anatomy import Anatomy
    from slm_toolkit.report.anatomy import anatomy_table
    from slm_toolkit.report.baseline import changes
    from slm_toolkit.report.baseline_table import baseline_table
    from slm_toolkit.report.phases import phase_table
    from slm_toolkit.report.table import comparison_table

    rows = rows_of(records, usd_per_gpu_hour=args.usd_per_gpu_hour, strict=args.strict)
    found, missing = [], []
    if args.baseline is not None:
        earlier, _ = find_records([args.baseline])
        found, missing = changes(rows, rows_of(earlier, usd_per_gpu_hour=args.usd_per_gpu_hour, strict=False))
    if args.json:
        content = [dataclasses.asdict(row) for row in rows]
        if args.baseline is not None:
            by_record = {change.record_now: dataclasses.asdict(change) for change in found}
            content = [{**row, "baseline": by_record.get(row["record"])} for row in content]
        print(json.dumps(content, indent=2))
    else:
        console = Console()
        width = console.width if console.is_terminal else PIPE_WIDTH
        console.width = width
        console.print(comparison_table(rows, width=width), crop=False)
        for note in (*_failed_references(records), *_parity_notes(rows)):
            console.print(note, highlight=False)
        if args.phases:
            console.print(phase_table({_label(row, rows): row for row in rows}), crop=False)
        anatomies = {_label(row, rows): Anatomy(**row.anatomy) for row in rows if row.anatomy}
        if anatomies:
            console.print(anatomy_table(anatomies, width=width), crop=False)
        if args.baseline is not None:
            console.print(baseline_table(found, missing, baseline=args.baseline, width=width), crop=False)
    well = all(row.status in ("ok", "oom") and row.parity_holds is not False for row in rows)
    worse = any(change.is_regression for change in found)
    return 0 if well and not worse and not _failed_references(records) else 1


def rows_of(
    records: list[tuple[Path, RunRecord]], *, usd_per_gpu_hour: float | None, strict: bool
) -> list["Row"]:
    """One row for each run, however often it was launched, with parity, marks and ranks."""
    from slm_toolkit.report.ranking import ranked
    from slm_toolkit.report.rows import row_of

    parities = judge([record for _, record in records])
    launches: dict[str, list[int]] = {}
    for index, (_, record) in enumerate(records):
        if not (record.is_parity_reference and _others_than_references(records)):
            launches.setdefault(record.identity, []).append(index)
    rows = []
    for indices in launches.values():
        row = row_of([records[index] for index in indices], usd_per_gpu_hour=usd_per_gpu_hour)
        judged = [parities[index] for index in indices if parities[index] is not None]
        rows.append(_with_parity(row, judged))
    return ranked(rows, strict=strict)


def _others_than_references(records: list[tuple[Path, RunRecord]]) -> bool:
    return any(not record.is_parity_reference for _, record in records)


def _with_parity(row: "Row", judged: list[Parity]) -> "Row":
    if not judged:
        return row
    worst = max(judged, key=lambda parity: (not parity.holds, parity.max_loss_difference))
    return dataclasses.replace(
        row,
        parity_reference=worst.reference,
        parity_max_loss_difference=worst.max_loss_difference,
        parity_grad_norm_ratio=worst.grad_norm_ratio,
        parity_holds=worst.holds,
        parity=str(worst),
    )


def _failed_references(records: list[tuple[Path, RunRecord]]) -> list[str]:
    return [
        f"[red]no parity check: the single-process fp32 reference ended {record.status}: {record.reason}[/]"
        for _, record in records
        if record.is_parity_reference and record.status != "ok"
    ]


def _parity_notes(rows: list["Row"]) -> list[str]:
    """A line for what holds, red ones for each row that does not."""
    broken = [row for row in rows if row.parity_holds is False]
    notes = [f"[red]{_label(row, rows)} does not compute the same thing, {row.parity}[/]" for row in broken]
    for reference in sorted({row.parity_reference for row in rows if row.parity_holds}):
        held = [row for row in rows if row.parity_holds and row.parity_reference == reference]
        worst = max(held, key=lambda row: row.parity_max_loss_difference)
        notes.append(
            f"parity holds {worst.parity}; that is {_label(worst, rows)}, the farthest of {len(held)}"
        )
    if not notes and len(rows) > 1:
        notes.append("losses were not compared: no run asked the same (--parity K adds a reference)")
    return notes


def _label(row: "Row", rows: list["Row"]) -> str:
    """The strategy, and what else tells this row from the others."""
    names = [f.name for f in dataclasses.fields(RunConfig) if f.metadata["id"]]
    varying = [name for name in names if len({str(other.asked.get(name)) for other in rows}) > 1]
    return " ".join([row.strategy, *(f"{name}={row.asked.get(name)}" for name in varying)])
