"""The losses of each dataset, and the phases of a step, as rich tables below the comparison."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.cells import DASH
from slm_toolkit.report.tables.fitted import fix_width


def has_several(row: Row) -> bool:
    """Whether a run mixed datasets, or was evaluated on several."""
    return len(row.final_loss_by_dataset) > 1 or len(row.final_eval_losses) > 1


def dataset_table(rows: dict[str, Row]) -> RenderableType:
    """Lines for each labelled row: its datasets' last training losses, its held-out sets' losses."""
    table = Table(header_style="bold")
    for title in ("run", "dataset"):
        table.add_column(title, no_wrap=True)
    for title in ("last training\nloss", "held-out\nloss", "held-out\nperplexity"):
        table.add_column(title, justify="right", no_wrap=True)
    for label, row in rows.items():
        for name in dict.fromkeys([*row.final_loss_by_dataset, *row.final_eval_losses]):
            held_out = row.final_eval_losses.get(name)
            perplexity = DASH if held_out is None else f"{math.exp(min(held_out, 50)):.4g}"
            trained = row.final_loss_by_dataset.get(name)
            table.add_row(label, name, _loss(trained), _loss(held_out), perplexity)
    fix_width(table)
    return Group(Text("losses by dataset", style="bold"), table)


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"


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
