"""The columns of the comparison table: titles, cells as text, and the order in which columns are dropped."""

from slm_toolkit.report.labels import value_of, varying
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    Heading,
    dollars,
    filled,
    gib,
    loss,
    number,
    rate,
    setting,
)

_STATUS_STYLE = {"ok": "green", "oom": "yellow", "failed": "red", "timeout": "red"}


def columns_of(rows: list[Row]) -> list[Column]:
    """Return all columns with values in these rows; settings that differ come first."""
    marks = marks_of(rows)
    settings = [
        Heading(title, lambda row, name=name: value_of(row, name)) for name, title in varying(rows).items()
    ]
    marked = Heading("strategy", lambda row: row.strategy + marks.get(tuple(row.numerics_differences), ""))
    return filled([*settings, marked, *_HEADINGS], rows)


def marks_of(rows: list[Row]) -> dict[tuple[str, ...], str]:
    """Return a footnote mark for each combination of differences from a reference's numerics."""
    combinations = dict.fromkeys(tuple(row.numerics_differences) for row in rows if row.numerics_differences)
    return {combination: f" [{number}]" for number, combination in enumerate(combinations, start=1)}


def _interval(row: Row) -> str:
    """Return both ends of the interval, relative to the median."""
    if row.interval is None:
        return DASH
    below, above = (end / row.tokens_per_second - 1 for end in row.interval)
    return f"±{above:.1%}" if abs(above + below) < 0.001 else f"{below:+.1%} {above:+.1%}"


_HEADINGS = (
    Heading("status", "state", style=lambda row: _STATUS_STYLE[row.status]),
    Heading(
        "largest\nbatch",
        lambda row: setting(row.largest_batch) + " or more" * row.is_open_ended,
        note="largest batch: sequences per process that ran; one more ran out of memory",
    ),
    Heading(
        "rank",
        lambda row: setting(row.rank) + "=" * bool(row.shares_rank),
        drop_order=12,
        note="rank: by tokens/s per process, on one kind of machine; =: not clearly different",
    ),
    Heading("tokens/s", "tokens_per_second", rate),
    Heading("interval", _interval, drop_order=8),
    Heading("estimated\ntokens/s", "estimated_tokens_per_second", rate, 7),
    Heading("tokens/s\nper GPU", lambda row: row.tokens_per_second_per_gpu if row.gpu else None, rate, 2),
    Heading("tokens/s\nper process", lambda row: None if row.gpu else row.tokens_per_second_per_gpu, rate, 2),
    Heading("MFU", "mfu", number("{:.1%}"), 5),
    # measured and rehearsed peaks have separate columns, because they must not be compared
    Heading("peak GiB", lambda row: None if row.is_rehearsed else row.peak_allocated_bytes, gib),
    Heading("peak GiB\n(process)", lambda row: row.peak_rss_bytes if row.is_on_cpu else None, gib),
    Heading(
        "peak GiB\nallocated on\nrank 0",
        lambda row: row.peak_allocated_bytes if row.is_rehearsed else None,
        gib,
        note="rehearsed: memory of tensors only, without the overhead of CUDA, NCCL and the allocator",
    ),
    Heading("estimated\nGiB", "estimated_peak_bytes", gib, 1),
    Heading(
        "peak at",
        lambda row: row.memory_at_peak and "{phase} {module}".format(**row.memory_at_peak).strip(),
        drop_order=4,
    ),
    Heading("state\nGiB/rank", "state_bytes", gib, 3),
    Heading("$ per 1M\ntokens", "usd_per_million_tokens", dollars, 9),
    # 1 J per token is 1,000 kJ per million tokens
    Heading("kJ per 1M\ntokens", "joules_per_token", number("{:,.1f}", 1e3), 10),
    Heading("final\nloss", "final_loss", loss, 6),
)
"the columns: to add one, add an entry"
