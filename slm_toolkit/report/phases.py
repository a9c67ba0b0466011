"""Milliseconds of a step's phases as a rich table, where the engine lets them be told apart."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.report.rows import Row
from slm_toolkit.report.widths import fix_width

PHASES = ("step", "data", "forward", "backward", "optimizer")


def phase_table(rows: dict[str, Row]) -> RenderableType:
    """A line for each labelled row: the mean over the timed steps of the slowest rank."""
    table = Table(header_style="bold")
    table.add_column("strategy", no_wrap=True)
    for title in PHASES:
        table.add_column(f"{title}\nms", justify="right", no_wrap=True)
    for label, row in rows.items():
        phases = row.phase_seconds or {}
        table.add_row(label, *(_ms(phases.get(name)) for name in PHASES))
    fix_width(table)
    notes = []
    if any(row.engine == "deepspeed" for row in rows.values()):
        note = "DeepSpeed steps inside backward: only its whole steps compare with the others'"
        notes.append(Text(note, style="dim"))
    return Group(Text("phases of a step, not profiled", style="bold"), table, *notes)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"
