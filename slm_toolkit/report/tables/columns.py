"""The columns of the comparison table: titles, cells as text, and the order in which columns are dropped."""

from slm_toolkit.record.run_record import FP32_REFERENCE
from slm_toolkit.report.labels import value_of, varying
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import DASH, Column, Heading, dollars, filled, gib, loss, rate, setting

_STATUS_STYLE = {"ok": "green", "oom": "yellow", "failed": "red", "timeout": "red"}


def columns_of(rows: list[Row]) -> list[Column]:
    """Return all columns with values in these rows; settings that differ come first."""
    marks = marks_of(rows)
    settings = [
        Heading(title, lambda row, name=name: setting(value_of(row, name)))
        for name, title in varying(rows).items()
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


def _parity(value: float | None, row: Row, form: str) -> str:
    return form.format(value) if row.parity_reference == FP32_REFERENCE and value is not None else DASH


_HEADINGS = (
    Heading("status", lambda row: row.state, style=lambda row: _STATUS_STYLE[row.status]),
    Heading(
        "largest\nbatch",
        lambda row: setting(row.largest_batch) + " or more" * row.is_open_ended,
        note="largest batch: sequences per process that ran; one more ran out of memory; or more: no larger "
        "batch was tried",
    ),
    Heading(
        "rank",
        lambda row: setting(row.rank) + "=" * bool(row.shares_rank),
        12,
        note="rank: by tokens/s per process, among rows of one model, sequence length and machine; =: not "
        "clearly different",
    ),
    Heading("tokens/s", lambda row: rate(row.tokens_per_second)),
    Heading("interval", _interval, 8),
    Heading("estimated\ntokens/s", lambda row: rate(row.estimated_tokens_per_second), 7),
    Heading("tokens/s\nper GPU", lambda row: rate(row.tokens_per_second_per_gpu if row.gpu else None), 2),
    Heading("tokens/s\nper process", lambda row: rate(None if row.gpu else row.tokens_per_second_per_gpu), 2),
    Heading("MFU", lambda row: DASH if row.mfu is None else f"{row.mfu:.1%}", 5),
    # measured and rehearsed peaks have separate columns, because they must not be compared
    Heading("peak GiB", lambda row: gib(None if row.is_rehearsed else row.peak_allocated_bytes)),
    Heading("peak GiB\n(process)", lambda row: gib(row.peak_rss_bytes if row.is_on_cpu else None)),
    Heading(
        "peak GiB\nallocated on\nrank 0",
        lambda row: gib(row.peak_allocated_bytes if row.is_rehearsed else None),
        note="rehearsed: one process played rank 0 and sent nothing; memory of tensors only, without the "
        "overhead of CUDA, NCCL and the allocator",
    ),
    Heading(
        "estimated\nGiB", lambda row: gib(row.estimated_peak_bytes), 1, note="estimated: by closed forms"
    ),
    Heading(
        "peak at",
        lambda row: (
            f"{row.memory_at_peak['phase']} {row.memory_at_peak['module']}".strip()
            if row.memory_at_peak
            else DASH
        ),
        4,
    ),
    Heading("state\nGiB/rank", lambda row: gib(row.state_bytes), 3),
    Heading(
        "DeepSpeed's\nestimate GiB",
        lambda row: gib(row.deepspeed_bytes),
        2,
        note="DeepSpeed's estimate: by its own function; model states only, no activations",
    ),
    Heading("$ per 1M\ntokens", lambda row: dollars(row.usd_per_million_tokens), 9),
    # 1 J per token is 1,000 kJ per million tokens
    Heading(
        "kJ per 1M\ntokens",
        lambda row: DASH if row.joules_per_token is None else f"{row.joules_per_token * 1e3:,.1f}",
        10,
    ),
    Heading("padding", lambda row: f"{row.padding:.0%}" if row.padding else DASH, 7),
    Heading("max\n|Δloss|", lambda row: _parity(row.parity_max_loss_difference, row, "{:.1e}"), 11),
    Heading("grad-norm\nratio", lambda row: _parity(row.parity_grad_norm_ratio, row, "{:.5f}"), 7),
    Heading("final\nloss", lambda row: loss(row.final_loss), 6),
)
"the columns: to add one, add an entry"
