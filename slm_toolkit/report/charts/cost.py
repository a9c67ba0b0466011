"""Draw dollars: per million tokens, and against speed."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from slm_toolkit.report.charts.figures import (
    Figure,
    Panel,
    bars_layout,
    bars_of,
    curves_layout,
    escaped,
    left_out,
    named,
    places_of,
    rate_whiskers,
    reasons,
    strategy_colour,
    strategy_symbol,
    whiskers,
    why_no_rate,
)
from slm_toolkit.report.rows import Row, clearly_faster


def cost_panel(rows: dict[str, Row]) -> Panel:
    """Show dollars per million tokens."""
    name, title = "cost", "Dollars per million tokens"
    shown_rows = _priced(rows)
    if not shown_rows:
        return Panel(name, title, missing=reasons(rows, _why_no_dollars))
    bars = bars_of(shown_rows, _usd, _words)
    bars["error_x"] = whiskers(shown_rows.values(), _usd, _usd_interval)
    layout = bars_layout(places_of(shown_rows), x_title="$ per million tokens")
    prices = [f"price: {price}" for price in sorted({row.price for row in shown_rows.values()})]
    notes = (*prices, *left_out(rows, shown_rows, _why_no_dollars))
    return Panel(name, title, (Figure(name, title, [bars], layout),), notes)


def front_panel(rows: dict[str, Row]) -> Panel:
    """Show cost against speed with intervals: a figure for each model, whose rows compete."""
    name, title = "front", "Cost and speed"
    shown_rows = _priced(rows)
    if not shown_rows:
        return Panel(name, title, missing=reasons(rows, _why_no_dollars))
    by_model: dict[str, dict[str, Row]] = {}
    for label, row in shown_rows.items():
        by_model.setdefault(row.model, {})[label] = row
    figures, notes = [], ["lines: the intervals in which another measurement is expected"]
    for number, (model, group) in enumerate(by_model.items()):
        front = unbeaten(group)
        figure_name, figure_title = (name, title) if number == 0 else (f"{name}-{number + 1}", title)
        if len(by_model) > 1:
            figure_title = f"{title}: {model}"
        figures.append(_front(figure_name, figure_title, group, front))
        where = f" of {model}" if len(by_model) > 1 else ""
        notes.append(
            f"large marks: no run{where} is clearly both faster and cheaper than {named(front)}"
            if front
            else f"no run{where} is clearly both faster and cheaper than another"
        )
    return Panel(name, title, tuple(figures), (*notes, *left_out(rows, shown_rows, _why_no_dollars)))


def unbeaten(rows: dict[str, Row]) -> list[str]:
    """Return the labels of rows than which no other row is clearly both faster and cheaper.

    Rows of other sequence lengths don't compete, and rows without an interval are not judged. Return none if
    no row beats another: all tie then, or each cheaper row is slower.
    """
    judged = {label: row for label, row in rows.items() if row.interval}
    front = [
        label
        for label, row in judged.items()
        if not any(_beats(other, row) for other in judged.values() if other.seq_len == row.seq_len)
    ]
    return front if len(front) < len(judged) else []


def _beats(row: Row, other: Row) -> bool:
    # dollars per token are dollars per second / rate, so the cheaper row has the higher rate per dollar
    dollars_per_second = [each.usd_per_million_tokens * each.tokens_per_second for each in (row, other)]
    return clearly_faster(row, other) and clearly_faster(
        row, other, weight=dollars_per_second[1] / dollars_per_second[0]
    )


def _front(name: str, title: str, rows: dict[str, Row], front: list[str]) -> Figure:
    """Draw one trace per strategy, so that a legend names the marks: names next to them would overlap."""
    others = [row.strategy for row in rows.values()]
    by_strategy = sorted(rows.items(), key=lambda item: others.index(item[1].strategy))
    data = []
    for strategy, group in groupby(by_strategy, key=lambda item: item[1].strategy):
        of_strategy = dict(group)
        data.append(
            _marks(of_strategy, front, strategy_colour(strategy, others), strategy_symbol(strategy, others))
        )
    layout = curves_layout(x_title="tokens/s, all ranks", y_title="$ per million tokens", num_keys=len(data))
    return Figure(name, title, data, layout)


def _marks(rows: dict[str, Row], front: Iterable[str], colour: str, symbol: str) -> dict[str, Any]:
    values = rows.values()
    bars = {"color": colour, "width": 0, "thickness": 1.2}
    return {
        **{"type": "scatter", "mode": "markers", "hoverinfo": "text", "cliponaxis": False},
        "name": escaped(next(iter(values)).strategy),
        "x": [row.tokens_per_second for row in values],
        "y": [row.usd_per_million_tokens for row in values],
        "error_x": rate_whiskers(values) | bars,
        "error_y": whiskers(values, _usd, _usd_interval) | bars,
        "customdata": list(rows),
        "hovertext": [
            f"{escaped(label)}<br>{row.tokens_per_second:,.0f} tokens/s<br>{_words(row)}"
            for label, row in rows.items()
        ],
        "marker": {
            "size": [14 if label in front else 8 for label in rows],
            "color": colour,
            "symbol": symbol,
            "opacity": 1,
        },
    }


def _priced(rows: dict[str, Row]) -> dict[str, Row]:
    return {label: row for label, row in rows.items() if row.usd_per_million_tokens is not None}


def _why_no_dollars(row: Row) -> str:
    if row.tokens_per_second and not row.is_rehearsed:
        return "no known price for this hardware: set one with --usd_per_gpu_hour"
    return why_no_rate(row)


def _usd(row: Row) -> float:
    return row.usd_per_million_tokens


def _usd_interval(row: Row) -> tuple[float, float] | None:
    """Return the interval of dollars: they are as uncertain as the rate. A rate near 0 has no upper end."""
    if row.interval is None or row.interval[0] <= 0:
        return None
    lowest, highest = row.interval
    at_one = row.usd_per_million_tokens * row.tokens_per_second
    return at_one / highest, at_one / lowest


def _words(row: Row) -> str:
    return f"${row.usd_per_million_tokens:.4f} per million tokens<br>{escaped(row.price or '')}"
