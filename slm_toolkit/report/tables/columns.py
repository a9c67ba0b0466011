"""The columns of the comparison table: titles, cells as text, and which are left out first."""

from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.record.run_record import FP32_REFERENCE
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.cells import (
    DASH,
    PARITY_COLUMNS,
    dollars,
    energy_column,
    estimate_column,
    estimated_rate_column,
    gib,
    interval,
    largest_batch_column,
    peak_columns,
    peak_place,
    rank,
    rate,
    setting,
)

BEFORE_OTHERS = ("numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps")
"flags of which the columns come first"
_FACTS = {
    "evidence": "evidence",
    "gpu": "GPU",
    "allocator": "allocator",
    "world_size": "ranks",
    "num_machines": "machines",
}
TITLES = {
    name: flag.column or name.replace("_", " ")
    for name, flag in FLAGS.items()
    if flag.identity and flag.column != ""
} | _FACTS
"by what a column shows: a flag, or a fact of the run"


@dataclass(frozen=True)
class Column:
    """A title of one or several lines, and a cell for each row."""

    title: str
    cells: list[str]
    drop_order: int
    "the first to be left out where width is short have the least; 0: never"

    @property
    def is_numeric(self) -> bool:
        return all(cell[:1] in f"0123456789${DASH}~±+" for cell in self.cells)

    @property
    def says_something(self) -> bool:
        return any(cell != DASH for cell in self.cells)


def columns_of(rows: list[Row]) -> list[Column]:
    """All that these rows have something for, settings first where they differ."""
    on_gpu = any(row.gpu for row in rows)
    marks = marks_of(rows)
    gate = any(row.parity_reference == FP32_REFERENCE for row in rows)
    made: list[tuple[str, Callable[[Row], str], int]] = [
        *((title, lambda row, name=name: setting(value_of(row, name)), 0) for name, title in varying(rows)),
        ("strategy", lambda row: row.strategy + marks.get(tuple(row.numerics_differences), ""), 0),
        ("status", lambda row: "unequal" if row.parity_holds is False else row.status, 0),
        *largest_batch_column(rows),
        ("rank", rank, 12),
        ("tokens/s", lambda row: rate(row.tokens_per_second), 0),
        ("interval", interval, 8),
        *estimated_rate_column(rows),
        (
            f"tokens/s\nper {'GPU' if on_gpu else 'process'}",
            lambda row: rate(row.tokens_per_second_per_gpu),
            2,
        ),
        ("MFU", lambda row: DASH if row.mfu is None else f"{row.mfu:.1%}", 5),
        *peak_columns(rows, on_gpu=on_gpu),
        *estimate_column(rows),
        *([("peak at", peak_place, 4)] if any(row.is_rehearsed for row in rows) else []),
        ("state\nGiB/rank", lambda row: gib(sum((row.state_bytes_per_rank or {}).values()) or None), 3),
        ("DeepSpeed's\nestimate GiB", lambda row: gib(row.deepspeed_bytes), 2),
        ("$ per 1M\ntokens", lambda row: dollars(row.usd_per_million_tokens), 9),
        *energy_column(rows),
        *([("padding", lambda row: f"{row.padding:.0%}", 7)] if any(row.padding for row in rows) else []),
        *(PARITY_COLUMNS if gate else ()),
        ("final\nloss", lambda row: DASH if row.final_loss is None else f"{row.final_loss:.4f}", 6),
    ]
    columns = [Column(title, [cell(row) for row in rows], drop_order) for title, cell, drop_order in made]
    if all(row.is_rehearsed for row in rows):  # which are of one thing mostly, memory
        columns = [column for column in columns if column.says_something]
    return columns


def varying(rows: list[Row]) -> list[tuple[str, str]]:
    """Name and title of each setting in which rows differ: they are columns."""
    found = [(name, title) for name, title in _settings(rows) if _differs(rows, name)]
    if all(row.largest_batch == row.per_device_train_batch_size for row in rows):  # a column of its own
        found = [(name, title) for name, title in found if name != "per_device_train_batch_size"]
    return found


def common(rows: list[Row], name: str) -> object:
    """The value that all rows which have one share."""
    return next((getattr(row, name) for row in rows if getattr(row, name) is not None), None)


def _differs(rows: list[Row], name: str) -> bool:
    values = values_of(rows, name)
    first = next((value for value in values if value is not None), None)
    return any(value is not None and value != first and str(value) != str(first) for value in values)


def _settings(rows: list[Row]) -> list[tuple[str, str]]:
    """Name and title of what may be a column: each fact and flag, those of newer records too."""
    newer = (name for row in rows for name in row.asked if name not in FLAGS)
    titles = TITLES | {name: name.replace("_", " ") for name in newer}
    return [(name, titles[name]) for name in dict.fromkeys(("model", *_FACTS, *BEFORE_OTHERS, *titles))]


def value_of(row: Row, name: str) -> object:
    return values_of([row], name)[0]


def values_of(rows: list[Row], name: str) -> list[object]:
    """A field's values, or a flag's as it was asked."""
    if rows and hasattr(rows[0], name):
        return [getattr(row, name) for row in rows]
    return [row.asked.get(name) for row in rows]


def marks_of(rows: list[Row]) -> dict[tuple[str, ...], str]:
    """A footnote mark for each way in which rows were computed otherwise than their reference."""
    ways = dict.fromkeys(tuple(row.numerics_differences) for row in rows if row.numerics_differences)
    return {way: f" [{number}]" for number, way in enumerate(ways, start=1)}
