"""What stands in a cell of the comparison table, and columns that come and go with what rows have."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row

DASH = "-"


def rank(row: "Row") -> str:
    if row.rank is None:
        return DASH
    return f"{row.rank}=" if row.shares_rank else str(row.rank)


def energy_column(rows: "list[Row]") -> "list[tuple[str, Callable[[Row], str], int]]":
    """Shown where there is any: CPUs have no counter that we read."""
    if all(row.joules_per_token is None for row in rows):
        return []
    # a joule per token is 1,000 kJ per million tokens
    shown = lambda row: DASH if row.joules_per_token is None else f"{row.joules_per_token * 1e3:,.1f}"  # noqa: E731
    return [("kJ per 1M\ntokens", shown, 10)]


def setting(value: object) -> str:
    if value is None:
        return DASH
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def rate(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def interval(row: "Row") -> str:
    """Both ends, as shares of the median."""
    if row.tokens_per_second is None:
        return DASH
    below, above = (end / row.tokens_per_second - 1 for end in row.interval)
    return f"±{above:.1%}" if abs(above + below) < 0.001 else f"{below:+.1%} {above:+.1%}"


def peak_columns(rows: "list[Row]", *, on_gpu: bool) -> "list[tuple[str, Callable[[Row], str], int]]":
    """Measured peaks and rehearsed ones never share a column."""
    titles = {
        "measured": "peak GiB" if on_gpu else "peak GiB\n(process)",
        "rehearsed": "peak GiB\nallocated on\nrank 0",
    }

    def of(evidence: str) -> "Callable[[Row], str]":
        return lambda row: gib(row.peak_bytes) if row.evidence == evidence else DASH

    found = {row.evidence for row in rows}
    return [(title, of(evidence), 0) for evidence, title in titles.items() if evidence in found]


def largest_batch_column(rows: "list[Row]") -> "list[tuple[str, Callable[[Row], str], int]]":
    if all(row.largest_batch is None for row in rows):
        return []

    def shown(row: "Row") -> str:
        if row.largest_batch is None:
            return DASH
        return f"{row.largest_batch}{' or more' if row.smallest_oom_batch is None else ''}"

    return [("largest\nbatch", shown, 0)]


def estimate_column(rows: "list[Row]") -> "list[tuple[str, Callable[[Row], str], int]]":
    """Beside peaks that it is an estimate of: not those of CPU processes."""
    if all(row.estimated_peak_bytes is None for row in rows):
        return []
    return [("estimated\nGiB", lambda row: gib(row.estimated_peak_bytes), 1)]


def estimated_rate_column(rows: "list[Row]") -> "list[tuple[str, Callable[[Row], str], int]]":
    """Only beside rates that were measured on a GPU."""
    if all(row.estimated_tokens_per_second is None for row in rows):
        return []
    return [("estimated\ntokens/s", lambda row: rate(row.estimated_tokens_per_second), 7)]


def peak_place(row: "Row") -> str:
    if row.memory_at_peak is None:
        return DASH
    return f"{row.memory_at_peak['phase']} {row.memory_at_peak['module']}".strip()


def scientific(value: float | None) -> str:
    return DASH if value is None else f"{value:.1e}"


def gib(value: int | None) -> str:
    return DASH if value is None else f"{value / 2**30:.2f}"


def dollars(value: float | None) -> str:
    return DASH if value is None else f"${value:.4f}"


PARITY_COLUMNS: "tuple[tuple[str, Callable[[Row], str], int], ...]" = (
    ("max\n|Δloss|", lambda row: scientific(row.parity_max_loss_difference), 11),
    (
        "grad-norm\nratio",
        lambda row: DASH if row.parity_grad_norm_ratio is None else f"{row.parity_grad_norm_ratio:.5f}",
        7,
    ),
)
