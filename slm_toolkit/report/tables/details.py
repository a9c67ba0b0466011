"""The losses of each dataset, and the phases of a step, as rich tables below the comparison."""

import math

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.cells import DASH, loss, milliseconds
from slm_toolkit.report.tables.fitted import Column, table_of


def has_several(row: Row) -> bool:
    """Whether a run mixed datasets, or was evaluated on several."""
    return len(row.final_loss_by_dataset) > 1 or len(row.final_eval_losses) > 1


def dataset_table(rows: dict[str, Row]) -> RenderableType:
    """Lines for each labelled row: its datasets' last training losses, its held-out sets' losses."""
    lines = [
        (label, name, row.final_loss_by_dataset.get(name), row.final_eval_losses.get(name))
        for label, row in rows.items()
        for name in dict.fromkeys([*row.final_loss_by_dataset, *row.final_eval_losses])
    ]
    columns = [
        Column("run", [label for label, *_ in lines], justify="left"),
        Column("dataset", [name for _, name, _, _ in lines], justify="left"),
        Column("last training\nloss", [loss(trained) for _, _, trained, _ in lines]),
        Column("held-out\nloss", [loss(held_out) for *_, held_out in lines]),
        Column("held-out\nperplexity", [_perplexity(held_out) for *_, held_out in lines]),
    ]
    return Group(Text("losses by dataset", style="bold"), table_of(columns))


def _perplexity(held_out_loss: float | None) -> str:
    return DASH if held_out_loss is None else f"{math.exp(min(held_out_loss, 50)):.4g}"


PHASES = ("step", "data", "forward", "backward", "optimizer")


def phase_table(rows: dict[str, Row]) -> RenderableType:
    """A line for each labelled row: the mean over the timed steps of the slowest rank."""
    columns = [Column("strategy", list(rows), justify="left")]
    for name in PHASES:
        cells = [milliseconds((row.phase_seconds or {}).get(name)) for row in rows.values()]
        columns.append(Column(f"{name}\nms", cells))
    notes = []
    if any(row.engine == "deepspeed" for row in rows.values()):
        note = "DeepSpeed steps inside backward: only its whole steps compare with the others'"
        notes.append(Text(note, style="dim"))
    return Group(Text("phases of a step, not profiled", style="bold"), table_of(columns), *notes)
