"""The whole report of rows, as `slm report` prints it: the comparison, its notes, and tables below it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.comparison import (
    comparison_table,
    dataset_table,
    has_several,
    parity_notes,
)
from slm_toolkit.report.tables.profiled import anatomy_table, peak_table


def sections(
    rows: list[Row],
    *,
    width: int,
    most_rows: int | None = None,
    unchecked: Sequence[str] = (),
    with_memory: bool = False,
) -> Iterator[RenderableType]:
    """Yield what stands one below the other. Print each with `crop=False`.

    `width`: columns of the console. `most_rows`: more rows are counted, not shown. `unchecked`: red lines on
    checks that could not be made. `with_memory`: show the peaks of traced runs.
    """
    named = labelled(rows)
    shown = rows[:most_rows]
    yield comparison_table(shown, width=width, all_rows=rows)
    if hidden := rows[len(shown) :]:
        bad = sum(row.status in ("failed", "timeout") for row in hidden)
        said = f"the first {len(shown)} of {len(rows):,} rows; of the others {bad:,} failed or timed out"
        yield Text(f"{said}: a pipe and --export show all")
    yield from (Text(line, style="red") for line in unchecked)
    yield from parity_notes(named)
    if several := {label: row for label, row in named.items() if has_several(row)}:
        yield dataset_table(several)
    for label, row in named.items():
        if with_memory and row.memory_at_peak is not None:
            title = f"memory of {label}, {row.evidence} on rank 0 of {row.world_size}"
            yield peak_table(title, row.memory_at_peak)
    if anatomies := {label: Anatomy(**row.anatomy) for label, row in named.items() if row.anatomy}:
        yield anatomy_table(anatomies, width=width)
        yield Text(
            "the traces of each rank are next to the records; open them at https://ui.perfetto.dev",
            style="dim",
        )


def failed_references(records: list[tuple[Path, RunRecord]]) -> list[str]:
    """Return a line for each single-process reference of `--parity` that did not end ok."""
    return [
        f"no parity check: the single-process {record.config.numerics} reference ended "
        f"{record.status}: {record.reason}"
        for _, record in records
        if record.is_parity_reference and record.status != "ok"
    ]
