"""Show the time of a step by activity: a table with a row per strategy."""

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.tables.fitted import (
    Column,
    columns_that_fit,
    left_out_note,
    milliseconds,
    table_of,
)

_OVERLAPPED = "comm.\noverlapped"
_PARTS = {  # title and drop order by field of Anatomy
    "matmul_seconds": ("matmul", 6),
    "attention_seconds": ("attention", 5),
    "other_compute_seconds": ("other\ncompute", 3),
    "optimizer_seconds": ("optimizer", 4),
    "communication_exposed_seconds": ("comm.\nexposed", 0),
    "data_seconds": ("data", 1),
    "idle_seconds": ("idle", 7),
    "communication_overlapped_seconds": (_OVERLAPPED, 2),
}


def anatomy_table(anatomies: dict[str, Anatomy], *, width: int) -> RenderableType:
    """Show a row per strategy. A narrow console shows no shares, then fewer columns.

    Print it with `crop=False`.
    """
    columns, dropped = columns_that_fit(_columns(anatomies, shares=True), width=width)
    if dropped:
        columns, dropped = columns_that_fit(_columns(anatomies, shares=False), width=width)
    counts = sorted({anatomy.num_steps for anatomy in anatomies.values()})
    heading = f"where a step's time goes: ms per step, mean of {' or '.join(map(str, counts))} profiled steps"
    notes = ["profiling slows steps down: use these shares, but take rates from the table of timed steps"]
    if any(column.title == _OVERLAPPED for column in columns):
        notes.append("comm. overlapped: communication while compute ran; not part of the sum")
    if any(anatomy.device == "cpu" for anatomy in anatomies.values()):
        notes.append(
            "on a CPU, compute and communication share the cores; idle is Python between torch's ops"
        )
    notes += [left_out_note(dropped)] * bool(dropped)
    return Group(Text(heading, style="bold"), table_of(columns), *(Text(note, style="dim") for note in notes))


def _columns(anatomies: dict[str, Anatomy], *, shares: bool) -> list[Column]:
    def cell(anatomy: Anatomy, seconds: float) -> str:
        return milliseconds(seconds) + f" {seconds / anatomy.step_seconds:>4.0%}" * shares

    return [
        Column("strategy", list(anatomies), justify="left"),
        Column("step\nms", [milliseconds(anatomy.step_seconds) for anatomy in anatomies.values()]),
        *(
            Column(title, [cell(each, getattr(each, name)) for each in anatomies.values()], drop_order)
            for name, (title, drop_order) in _PARTS.items()
        ),
    ]
