"""The columns of the comparison table: titles, cells as text, and the order in which columns are dropped."""

from collections.abc import Callable

from slm_toolkit.config.run_config import COLUMN_TITLES, FIRST_COLUMNS, FLAGS
from slm_toolkit.record.run_record import FP32_REFERENCE
from slm_toolkit.report.rows import SEEN_OF_SCRIPTS, Row
from slm_toolkit.report.tables.fitted import DASH, Column, dollars, gib, loss, rate, setting

_FACTS = {
    "evidence": "evidence",
    "gpu": "GPU",
    "allocator": "allocator",
    "world_size": "ranks",
    "num_machines": "machines",
}
TITLES = COLUMN_TITLES | _FACTS
"title of a column by the flag or field of the run that it shows"


_STATUS_STYLE = {"ok": "green", "oom": "yellow", "failed": "red", "timeout": "red"}


def columns_of(rows: list[Row]) -> list[Column]:
    """Return all columns with values in these rows; settings that differ come first."""
    on_gpu = any(row.gpu for row in rows)
    marks = marks_of(rows)

    def column(title: str, cell: Callable[[Row], str], drop_order: int = 0) -> Column:
        return Column(title, [cell(row) for row in rows], drop_order)

    def if_known(title: str, cell: Callable[[Row], str], drop_order: int = 0) -> list[Column]:
        optional = column(title, cell, drop_order)
        return [optional] if optional.has_values else []

    columns = [column(title, lambda row, n=name: setting(value_of(row, n))) for name, title in varying(rows)]
    columns += [
        column("strategy", lambda row: row.strategy + marks.get(tuple(row.numerics_differences), "")),
        Column("status", list(map(_status, rows)), styles=[_STATUS_STYLE[row.status] for row in rows]),
        *if_known("largest\nbatch", _largest_batch),
        column("rank", _rank, 12),
        column("tokens/s", lambda row: rate(row.tokens_per_second)),
        column("interval", _interval, 8),
        *if_known("estimated\ntokens/s", lambda row: rate(row.estimated_tokens_per_second), 7),
        column(
            f"tokens/s\nper {'GPU' if on_gpu else 'process'}",
            lambda row: rate(row.tokens_per_second_per_gpu),
            2,
        ),
        column("MFU", lambda row: DASH if row.mfu is None else f"{row.mfu:.1%}", 5),
    ]
    for evidence in ("measured", "rehearsed"):  # separate columns, because the two must not be compared
        if any(row.evidence == evidence for row in rows):
            peaks = [gib(row.peak_bytes) if row.evidence == evidence else DASH for row in rows]
            columns.append(Column(_peak_title(evidence, on_gpu=on_gpu), peaks))
    columns += if_known("estimated\nGiB", lambda row: gib(row.estimated_peak_bytes), 1)
    if any(row.is_rehearsed for row in rows):
        columns.append(column("peak at", _peak_place, 4))
    columns += [
        column("state\nGiB/rank", lambda row: gib(sum((row.state_bytes_per_rank or {}).values()) or None), 3),
        column("DeepSpeed's\nestimate GiB", lambda row: gib(row.deepspeed_bytes), 2),
        column("$ per 1M\ntokens", lambda row: dollars(row.usd_per_million_tokens), 9),
        *if_known("kJ per 1M\ntokens", _kilojoules_per_million_tokens, 10),
    ]
    if any(row.padding for row in rows):
        columns.append(column("padding", lambda row: f"{row.padding:.0%}", 7))
    if any(row.parity_reference == FP32_REFERENCE for row in rows):
        columns.append(column("max\n|Δloss|", _loss_difference, 11))
        columns.append(column("grad-norm\nratio", _grad_norm_ratio, 7))
    columns.append(column("final\nloss", lambda row: loss(row.final_loss), 6))
    if all(row.is_rehearsed for row in rows):  # rehearsals have memory, and little else
        columns = [column for column in columns if column.has_values]
    return columns


def _status(row: Row) -> str:
    return "unequal" if row.parity_holds is False else row.status


def _largest_batch(row: Row) -> str:
    if row.largest_batch is None:
        return DASH
    return f"{row.largest_batch}{' or more' if row.smallest_oom_batch is None else ''}"


def _rank(row: Row) -> str:
    if row.rank is None:
        return DASH
    return f"{row.rank}=" if row.shares_rank else str(row.rank)


def _interval(row: Row) -> str:
    """Return both ends of the interval, relative to the median."""
    if row.interval is None:
        return DASH
    below, above = (end / row.tokens_per_second - 1 for end in row.interval)
    return f"±{above:.1%}" if abs(above + below) < 0.001 else f"{below:+.1%} {above:+.1%}"


def _peak_title(evidence: str, *, on_gpu: bool) -> str:
    if evidence == "rehearsed":
        return "peak GiB\nallocated on\nrank 0"
    return "peak GiB" if on_gpu else "peak GiB\n(process)"


def _peak_place(row: Row) -> str:
    if row.memory_at_peak is None:
        return DASH
    return f"{row.memory_at_peak['phase']} {row.memory_at_peak['module']}".strip()


def _kilojoules_per_million_tokens(row: Row) -> str:
    """Convert joules per token: 1 J per token is 1,000 kJ per million tokens."""
    return DASH if row.joules_per_token is None else f"{row.joules_per_token * 1e3:,.1f}"


def _loss_difference(row: Row) -> str:
    value = row.parity_max_loss_difference
    return DASH if value is None else f"{value:.1e}"


def _grad_norm_ratio(row: Row) -> str:
    return DASH if row.parity_grad_norm_ratio is None else f"{row.parity_grad_norm_ratio:.5f}"


def varying(rows: list[Row]) -> list[tuple[str, str]]:
    """Return name and title of each setting in which rows differ; each becomes a column."""
    settings = [(name, title) for name, title in _settings(rows) if _differs(rows, name)]
    arguments = [name for name, _ in settings if name not in FLAGS and not hasattr(rows[0], name)]
    if arguments and any(row.script for row in rows):
        settings = [(name, title) for name, title in settings if name not in SEEN_OF_SCRIPTS]
    if all(row.largest_batch == row.per_device_train_batch_size for row in rows):  # has its own column
        settings = [(name, title) for name, title in settings if name != "per_device_train_batch_size"]
    return settings


def common(rows: list[Row], name: str) -> object:
    """Return the value that is common to all rows with a value."""
    return next((getattr(row, name) for row in rows if getattr(row, name) is not None), None)


def _differs(rows: list[Row], name: str) -> bool:
    values = values_of(rows, name)
    first = next((value for value in values if value is not None), None)
    return any(value is not None and value != first and str(value) != str(first) for value in values)


def _settings(rows: list[Row]) -> list[tuple[str, str]]:
    """Return name and title of each possible column: all facts and flags, newer records' flags included."""
    newer = (name for row in rows for name in row.asked if name not in FLAGS)
    titles = TITLES | {name: name.replace("_", " ") for name in newer}
    return [(name, titles[name]) for name in dict.fromkeys(("model", *_FACTS, *FIRST_COLUMNS, *titles))]


def value_of(row: Row, name: str) -> object:
    return values_of([row], name)[0]


def values_of(rows: list[Row], name: str) -> list[object]:
    """Return the values of a field of Row, or of a flag."""
    if rows and hasattr(rows[0], name):
        return [getattr(row, name) for row in rows]
    return [row.asked.get(name) for row in rows]


def marks_of(rows: list[Row]) -> dict[tuple[str, ...], str]:
    """Return a footnote mark for each combination of differences from a reference's numerics."""
    combinations = dict.fromkeys(tuple(row.numerics_differences) for row in rows if row.numerics_differences)
    return {combination: f" [{number}]" for number, combination in enumerate(combinations, start=1)}
