"""Draw charts in a terminal: bars of rates, peaks and dollars, and curves of losses."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import dollars, gib, rate

_STYLES = ("blue", "yellow", "red", "green", "magenta", "cyan", "bright_blue", "bright_yellow")
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # Unicode 6.0, Braille Patterns: by column, row
_CURVE_ROWS = 14
_MOST_CURVES = len(_STYLES)
_LONGEST_LABEL_SHARE = 0.5  # of the width; if a label is longer, every label has its own line
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class _Measure:
    """The title of a bar chart, and a row's value and text in it."""

    title: str
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]


def terminal_plots(rows: dict[str, Row], *, width: int) -> RenderableType:
    """Draw a bar chart for each measure with values, then loss curves. Print it with `crop=False`."""
    parts: list[RenderableType] = []
    for measure in _MEASURES:
        shown_rows = {label: row for label, row in rows.items() if measure.value(row) is not None}
        if shown_rows:
            parts += [Text(""), Text(measure.title, style="bold"), *_bars(shown_rows, measure, width)]
    curves = {label: row for label, row in rows.items() if len(row.losses) > 1}
    if curves:
        parts += [Text(""), *_curves(curves, width)]
    return Group(*parts) if parts else Text("nothing to draw: no rate, no peak, no loss", style="dim")


def _bars(rows: dict[str, Row], measure: _Measure, width: int) -> list[Text]:
    texts = {label: measure.text(row) for label, row in rows.items()}
    longest = max(measure.value(row) for row in rows.values())
    text_width = max(map(len, texts.values())) + 1
    label_width = max(map(len, rows)) + 1
    is_above = label_width > _LONGEST_LABEL_SHARE * width
    label_width = 2 if is_above else label_width
    num_cells = max(1, width - label_width - text_width)
    lines = []
    for label, row in rows.items():
        line = Text(no_wrap=True, overflow="ignore")
        if is_above:
            lines.append(Text(label))
        line.append(f"{'' if is_above else label:<{label_width}}")
        whole, eighths = divmod(round(measure.value(row) / longest * num_cells * 8), 8)
        line.append("█" * whole + (_EIGHTHS[eighths] if eighths else ""), style="blue")
        lines.append(line.append(f" {texts[label]}"))
    return lines


def _curves(rows: dict[str, Row], width: int) -> list[Text]:
    """Draw curves in braille, two by four dots per character; later curves overwrite the colour."""
    shown_rows = dict(list(rows.items())[:_MOST_CURVES])
    losses = [loss for row in shown_rows.values() for loss in row.losses if loss is not None]
    if not losses:
        return []
    lowest, highest = min(losses), max(losses)
    longest = max(row.first_step + len(row.losses) for row in shown_rows.values())
    axis_width = max(len(f"{lowest:.3g}"), len(f"{highest:.3g}")) + 1
    num_columns = max(1, width - axis_width - 1)
    dots: dict[tuple[int, int], int] = {}
    styles: dict[tuple[int, int], str] = {}
    for row, style in zip(shown_rows.values(), _STYLES, strict=False):
        for column in range(num_columns * 2):
            position = column / (num_columns * 2 - 1) * (longest - 1) - row.first_step
            loss = _interpolated(row.losses, position)
            if loss is None:
                continue
            height = (highest - loss) / ((highest - lowest) or 1)
            dot_row = round(height * (_CURVE_ROWS * 4 - 1))
            cell = (dot_row // 4, column // 2)
            dots[cell] = dots.get(cell, 0) | _DOTS[column % 2][dot_row % 4]
            styles[cell] = style
    lines = [Text("loss", style="bold")]
    for line_number in range(_CURVE_ROWS):
        ends = {0: f"{highest:.3g}", _CURVE_ROWS - 1: f"{lowest:.3g}"}
        line = Text(f"{ends.get(line_number, ''):>{axis_width}}┤", no_wrap=True, overflow="ignore")
        for column in range(num_columns):
            cell = (line_number, column)
            line.append(chr(0x2800 + dots.get(cell, 0)), style=styles.get(cell, ""))
        lines.append(line)
    lines.append(Text(f"{'':>{axis_width}}└{f' step 1 to {longest}':─>{num_columns}}"))
    legend = Text()
    for label, style in zip(shown_rows, _STYLES, strict=False):
        legend.append("━╴", style=style).append(f"{label}  ")  # not a space, so that no line ends in one
    hidden = len(rows) - len(shown_rows)
    more = [Text(f"{hidden} more: --html shows all", style="dim")] if hidden else []
    return [*lines, legend, *more]


def _interpolated(curve: list[float | None], position: float) -> float | None:
    """Return the loss at a position between two steps, on the line from one to the next; None: unknown."""
    if position < 0:
        return None
    before = int(position)
    pair = curve[before : before + 2]
    if not pair or None in pair:
        return None
    return pair[0] + (pair[-1] - pair[0]) * (position - before)


def _measured_rate(row: Row) -> float | None:
    return None if row.is_rehearsed else row.tokens_per_second


def _rate(row: Row) -> str:
    if row.interval is None:
        return rate(row.tokens_per_second)
    lowest, highest = (rate(end) for end in row.interval)
    return f"{rate(row.tokens_per_second)} ({lowest} to {highest})"


def _peak(row: Row, evidence: str) -> int | None:
    return row.peak_bytes if row.evidence == evidence and row.status == "ok" else None


_MEASURES = (
    _Measure("tokens/s", _measured_rate, _rate),
    _Measure("peak GiB, measured", lambda row: _peak(row, "measured"), lambda row: gib(row.peak_bytes)),
    _Measure("peak GiB, rehearsed", lambda row: _peak(row, "rehearsed"), lambda row: gib(row.peak_bytes)),
    _Measure(
        "$ per 1M tokens",
        lambda row: row.usd_per_million_tokens,
        lambda row: dollars(row.usd_per_million_tokens),
    ),
)
