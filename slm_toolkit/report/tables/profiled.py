"""Tables of what `--profile` found: where a step's time goes, and what uses its memory at the peak."""

from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.memory_parts import PARTS
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.tables.fitted import (
    Column,
    columns_that_fit,
    left_out_note,
    milliseconds,
    percent,
    table_of,
)

_ACTIVITIES = {  # title and drop order by field of Anatomy
    "matmul_seconds": ("matmul", 6),
    "attention_seconds": ("attention", 5),
    "other_compute_seconds": ("other\ncompute", 3),
    "optimizer_seconds": ("optimizer", 4),
    "communication_exposed_seconds": ("comm.\nexposed", 0),
    "data_seconds": ("data", 1),
    "idle_seconds": ("idle", 7),
    "communication_overlapped_seconds": ("comm.\noverlapped", 2),
}


def anatomy_table(anatomies: dict[str, Anatomy], *, width: int) -> RenderableType:
    """Show a row per strategy. Print it with `crop=False`."""
    of_runs = anatomies.values()
    columns, dropped = columns_that_fit(
        [
            Column("strategy", list(anatomies), justify="left"),
            Column("step\nms", [milliseconds(anatomy.step_seconds) for anatomy in of_runs]),
            *(
                Column(
                    title,
                    [percent(getattr(anatomy, name) / anatomy.step_seconds) for anatomy in of_runs],
                    drop_order,
                )
                for name, (title, drop_order) in _ACTIVITIES.items()
            ),
        ],
        width=width,
    )
    notes = [
        "profiling slows steps down: take rates from the table of timed steps; "
        "comm. overlapped, with compute, is not part of the sum"
    ]
    notes += [left_out_note(dropped)] * bool(dropped)
    title = Text("where a step's time goes: shares of profiled steps", style="bold")
    return Group(title, table_of(columns), *map(partial(Text, style="dim"), notes))


def peak_table(title: str, at_peak: dict[str, Any]) -> RenderableType:
    """Show a record's `memory_at_peak`: a sentence, and a table of its parts."""
    peak, module = at_peak["num_bytes"], at_peak["module"]
    where = f"{at_peak['phase']} at {module}" if module else at_peak["phase"]
    parts = sorted(((count, PARTS[part]) for part, count in at_peak["parts"].items() if count), reverse=True)
    return Group(
        Text(f"{title}: peak {size_text(peak)} in {where}", style="bold"),
        table_of(
            [
                Column("in use at the peak", [name for _, name in parts]),
                Column("size", [size_text(count) for count, _ in parts]),
                Column("share", [f"{count / peak:.1%}" for count, _ in parts]),
            ]
        ),
    )


def size_text(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
