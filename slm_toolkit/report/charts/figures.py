"""Draw rows: rates, dollars, the Pareto front of both, scaling, losses and the parts of a step."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.step_breakdown import PARTS
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

# A Figure is plain data for plotly.js, so that making it is fast and needs no plotly package.

_COLOURS = (  # Observable 10, for light and dark pages: https://observablehq.com/blog/crafting-data-colors
    *("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#97bbf5"),
    *("#9c6b4e", "#9498a0"),
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon")
_MOST_NAMED = 5
"most names in a sentence; the rest is a count"
MOST_KEYS = 16
"most entries of a legend; with more there is no legend, and hovering shows the names"


@dataclass(frozen=True)
class Figure:
    """A picture: `data` and `layout` are plotly.js's (https://plotly.com/javascript/reference/)."""

    name: str
    "also the name of its file"
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Figures for one purpose, shown one at a time; or the reason why there are none."""

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = field(default=())
    missing: str | None = None
    "why there are no figures; None if there are"


@dataclass(frozen=True)
class Bar:
    """A place on the vertical axis; its title is above its bar or points."""

    key: str
    "unique key of this place"
    title: str
    is_heading: bool = False
    "whether this is only a heading for the places below it"


def colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def strategy_colour(strategy: str, others: list[str]) -> str:
    """Return a strategy's colour. The study's strategies have fixed colours; `others` come after them."""
    return colour(_strategy_number(strategy, others))


def strategy_symbol(strategy: str, others: list[str]) -> str:
    """Return a strategy's symbol, for readers and printers without colours."""
    return _SYMBOLS[_strategy_number(strategy, others) % len(_SYMBOLS)]


def _strategy_number(strategy: str, others: list[str]) -> int:
    strategies = list(dict.fromkeys((*STUDIED_STRATEGIES, *others)))
    return strategies.index(strategy)


def escaped(text: str) -> str:
    """Escape text from records, because plotly interprets tags."""
    return html.escape(text, quote=False)


def named(labels: list[str]) -> str:
    """Join the first labels; count the rest."""
    rest = len(labels) - _MOST_NAMED
    return ", ".join(labels[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def bars_layout(bars: list[Bar], *, x_title: str, legend: bool = False) -> dict[str, Any]:
    """Return a layout for horizontal stacked bars."""
    return places_layout(bars, x_title=x_title, legend=legend) | {"barmode": "stack", "bargap": 0.62}


def places_layout(bars: list[Bar], *, x_title: str, legend: bool = False) -> dict[str, Any]:
    """Return a layout with each name above its bar or points, which lets phones use their whole width."""
    return {
        "height": 44 * len(bars) + (110 if legend else 80),
        "margin": {"l": 12, "r": 36, "t": 30, "b": 50},
        "showlegend": legend,
        "legend": above_plot(),
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero", "fixedrange": True},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [bar.key for bar in bars],
            "range": [len(bars) - 0.5, -0.7],
            "showticklabels": False,
            "showgrid": False,
            "fixedrange": True,
        },
        "annotations": [
            {
                **{"xref": "paper", "x": 0, "xanchor": "left", "y": bar.key, "yanchor": "bottom"},
                **{"text": bar.title, "showarrow": False, "align": "left", "font": {"size": 12}},
                "yshift": -17 if bar.is_heading else 7,
            }
            for bar in bars
        ],
    }


def curves_layout(*, x_title: str, y_title: str, num_keys: int) -> dict[str, Any]:
    """Return a layout with two numeric axes, and a legend above the plot unless it is too long."""
    return {
        "height": 460,
        "margin": {"l": 64, "r": 36, "t": 30, "b": 50},
        "showlegend": 1 < num_keys <= MOST_KEYS,
        "legend": above_plot(),
        "hovermode": "closest",
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title, "standoff": 12}},
    }


def above_plot() -> dict[str, Any]:
    """Place the legend above the plot, where it is visible even if the chart is long."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "traceorder": "normal",
        "maxheight": 0.9,  # of the figure's height; by default, a legend scrolls beyond half of it
    }


MOST_POINTS = 300
"points of a curve at most; of a longer curve, every second, third, ... step is drawn"
_MOST_TEXTS = 12
"most names next to points; more would overlap"
_MOST_BANDS = 6
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def speed_panel(rows: dict[str, Row]) -> Panel:
    """Show tokens per second with intervals, and the estimates."""
    name, title = "speed", "Tokens per second"
    shown_rows = {label: row for label, row in rows.items() if row.tokens_per_second and not row.is_rehearsed}
    if not shown_rows:
        return Panel(name, title, missing="no run was timed")
    measured = _bars(shown_rows, lambda row: row.tokens_per_second, _speed_words)
    measured["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [_whisker(row, 1) for row in shown_rows.values()],
        "arrayminus": [_whisker(row, 0) for row in shown_rows.values()],
        "thickness": 1.5,
    }
    data = [measured]
    if estimated := {label: row for label, row in shown_rows.items() if row.estimated_tokens_per_second}:
        data.append(
            {
                **{"type": "scatter", "mode": "markers", "name": "estimated", "hoverinfo": "text"},
                "x": [row.estimated_tokens_per_second for row in estimated.values()],
                "y": list(estimated),
                "marker": {"symbol": "diamond-open", "size": 11, "color": colour(9), "line": {"width": 2}},
                "hovertext": [
                    f"{escaped(label)}<br>estimated {row.estimated_tokens_per_second:,.0f} tokens/s"
                    for label, row in estimated.items()
                ],
            }
        )
    notes = ["whiskers: the interval in which another measurement is expected"]
    notes += ["hollow diamonds: estimated by closed forms"] if estimated else []
    layout = bars_layout(_places(shown_rows), x_title="tokens/s, all ranks")
    return Panel(
        name, title, (Figure(name, title, data, layout),), (*notes, *_left_out_notes(rows, shown_rows))
    )


def _whisker(row: Row, end: int) -> float:
    """Return how far an end of the interval is from the rate; 0 without an interval."""
    return abs(row.interval[end] - row.tokens_per_second) if row.interval else 0.0


def cost_panel(rows: dict[str, Row]) -> Panel:
    """Show dollars per million tokens."""
    name, title = "cost", "Dollars per million tokens"
    shown_rows = {label: row for label, row in rows.items() if row.usd_per_million_tokens is not None}
    if not shown_rows:
        return Panel(name, title, missing=_no_dollars(rows))
    bars = _bars(
        shown_rows,
        lambda row: row.usd_per_million_tokens,
        lambda row: f"${row.usd_per_million_tokens:.4f} per million tokens<br>{escaped(row.price or '')}",
    )
    layout = bars_layout(_places(shown_rows), x_title="$ per million tokens")
    prices = tuple(f"price: {price}" for price in sorted({row.price for row in shown_rows.values()}))
    return Panel(name, title, (Figure(name, title, [bars], layout),), prices)


def front_panel(rows: dict[str, Row]) -> Panel:
    """Show cost against speed, and the Pareto front: no other run is both faster and cheaper."""
    name, title = "front", "Cost and speed"
    shown_rows = {label: row for label, row in rows.items() if row.usd_per_million_tokens is not None}
    if not shown_rows:
        return Panel(name, title, missing=_no_dollars(rows))
    front = pareto_front(shown_rows)
    line = {
        **{"type": "scatter", "mode": "lines", "name": "Pareto front", "hoverinfo": "skip"},
        "x": [shown_rows[label].tokens_per_second for label in front],
        "y": [shown_rows[label].usd_per_million_tokens for label in front],
        "line": {"dash": "dot", "width": 1.5, "color": colour(9)},
    }
    points = {
        **{"type": "scatter", "hoverinfo": "text", "textposition": "top center", "cliponaxis": False},
        "mode": "markers+text" if len(shown_rows) <= _MOST_TEXTS else "markers",
        "x": [row.tokens_per_second for row in shown_rows.values()],
        "y": [row.usd_per_million_tokens for row in shown_rows.values()],
        "text": [escaped(label) for label in shown_rows],
        "hovertext": [
            f"{escaped(label)}<br>{row.tokens_per_second:,.0f} tokens/s"
            f"<br>${row.usd_per_million_tokens:.4f} per million tokens"
            for label, row in shown_rows.items()
        ],
        "marker": {
            "size": [13 if label in front else 8 for label in shown_rows],
            "color": _colours(shown_rows),
            "symbol": _symbols(shown_rows),
        },
    }
    layout = curves_layout(x_title="tokens/s, all ranks", y_title="$ per million tokens", num_keys=1)
    note = f"large points on the dotted line: no run is both faster and cheaper ({named(front)})"
    return Panel(name, title, (Figure(name, title, [line, points], layout),), (note,))


def pareto_front(rows: dict[str, Row]) -> list[str]:
    """Return the labels of rows that no other row beats in both speed and cost, the slowest first."""
    by_speed = sorted(rows, key=lambda label: (-rows[label].tokens_per_second, _usd(rows[label])))
    front: list[str] = []
    for label in by_speed:
        if not front or _usd(rows[label]) < _usd(rows[front[-1]]):
            front.append(label)
    return front[::-1]


def scaling_panel(rows: dict[str, Row]) -> Panel:
    """Show tokens per second by number of ranks, for runs that differ only in their number of ranks."""
    name, title = "scaling", "Scaling with the number of GPUs"
    series: dict[tuple, list[tuple[str, Row]]] = {}
    num_seen: dict[tuple, int] = {}
    for label, row in rows.items():
        if row.tokens_per_second and row.world_size and not row.is_rehearsed:
            flags = tuple(sorted((key, str(value)) for key, value in row.asked.items()))
            key = (row.strategy, row.gpu or row.cpu, flags)
            # a second run of the same size has other versions: it starts another line
            repeat = num_seen[*key, row.world_size] = num_seen.get((*key, row.world_size), -1) + 1
            series.setdefault((*key, repeat), []).append((label, row))
    several = [runs for runs in series.values() if len({row.world_size for _, row in runs}) > 1]
    if not several:
        return Panel(name, title, missing="no two runs differ only in their number of ranks")
    data = []
    others = [row.strategy for row in rows.values()]
    for number, runs in enumerate(several):
        runs.sort(key=lambda item: item[1].world_size)
        label, first = runs[0]
        per_rank = first.tokens_per_second / first.world_size
        sizes, rates = [row.world_size for _, row in runs], [row.tokens_per_second for _, row in runs]
        data.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "hoverinfo": "text", "x": sizes, "y": rates},
                "name": escaped(label.replace(f" ranks={first.world_size}", "")),
                "hovertext": [
                    f"{escaped(label)}<br>{row.tokens_per_second:,.0f} tokens/s on {row.world_size}"
                    f"<br>{row.tokens_per_second / row.world_size / per_rank:.0%} of linear"
                    for label, row in runs
                ],
                "line": {
                    "color": strategy_colour(first.strategy, others),
                    "dash": _DASHES[number % len(_DASHES)] if len(several) > len(set(others)) else "solid",
                },
                "marker": {"symbol": strategy_symbol(first.strategy, others), "size": 9},
            }
        )
        if number == 0:
            linear = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "x": sizes}
            linear |= {"name": f"linear, from {escaped(first.strategy)} on {sizes[0]}"}
            linear |= {"y": [per_rank * size for size in sizes], "line": {"dash": "dot", "color": colour(9)}}
    layout = curves_layout(x_title="ranks", y_title="tokens/s, all ranks", num_keys=len(data) + 1)
    sizes = sorted({row.world_size for runs in several for _, row in runs})
    layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes))}
    layout["yaxis"] |= {"type": "log", "dtick": "D2"}
    return Panel(name, title, (Figure(name, title, [linear, *data], layout),), ("both axes are logarithmic",))


def loss_panel(rows: dict[str, Row]) -> Panel:
    """Show all loss curves; before them, if all runs should be equal, how far they are from a reference's."""
    name, title = "losses", "Loss"
    shown_rows = {label: row for label, row in rows.items() if len(row.losses) > 1}
    if not shown_rows:
        return Panel(name, title, missing="no run has more than one step")
    layout = curves_layout(x_title="step", y_title="loss, mean over ranks", num_keys=len(shown_rows))
    curves = _loss_curves({label: row.losses for label, row in shown_rows.items()}, shown_rows)
    thinned = any(len(row.losses) > MOST_POINTS for row in shown_rows.values())
    notes = (f"at most {MOST_POINTS} steps of a curve are drawn",) if thinned else ()
    figures = [*_loss_differences(shown_rows), Figure(name, title, curves, layout)]
    if len(figures[0].data) < len(shown_rows) - 1:
        figures.reverse()
    return Panel(name, title, tuple(figures), notes)


def _loss_differences(rows: dict[str, Row]) -> list[Figure]:
    """Return a figure of losses minus a reference's (DDP's, else the first row's), if rows compare.

    Equal curves hide each other; their differences don't.
    """
    reference = next((label for label, row in rows.items() if row.engine == "ddp"), next(iter(rows)))
    losses = rows[reference].losses
    alike = {
        label: row for label, row in rows.items() if label != reference and _same_steps(row, rows[reference])
    }
    if not alike:
        return []
    differences = {
        label: [
            None if loss is None or other is None else loss - other
            for loss, other in zip(row.losses, losses, strict=True)
        ]
        for label, row in alike.items()
    }
    title = f"Loss minus that of {reference}"
    layout = curves_layout(x_title="step", y_title=escaped(title.lower()), num_keys=len(alike))
    layout["yaxis"]["exponentformat"] = "none"
    return [Figure("loss_differences", title, _loss_curves(differences, alike), layout)]


def _same_steps(row: Row, reference: Row) -> bool:
    """Return whether two rows trained the same steps, so that their losses should be equal."""

    def steps(one: Row) -> tuple:
        schedule = one.learning_rate, one.max_steps, one.first_step, len(one.losses)
        return one.model, one.seq_len, one.tokens_per_step, one.dataset, one.seed, schedule

    return steps(row) == steps(reference)


def _loss_curves(curves: dict[str, list[float | None]], rows: dict[str, Row]) -> list[dict[str, Any]]:
    used: dict[str, int] = {}
    data = []
    others = [row.strategy for row in rows.values()]
    for index, (label, row) in enumerate(rows.items()):
        number = used[row.strategy] = used.get(row.strategy, -1) + 1
        every = math.ceil(len(curves[label]) / MOST_POINTS)
        steps = list(range(len(curves[label])))[::-every][::-1]  # the last step is always drawn
        data.append(
            {
                **{"type": "scatter", "mode": "lines", "name": escaped(label)},
                "x": [row.first_step + step + 1 for step in steps],
                "y": [rounded(curves[label][step]) for step in steps],
                "line": {
                    "color": strategy_colour(row.strategy, others),
                    "dash": _DASHES[number % len(_DASHES)],
                    # equal curves hide each other, so the first of a few curves are wide bands below the rest
                    "width": 1.8 + (1.4 * (len(rows) - 1 - index) if len(rows) <= _MOST_BANDS else 0),
                },
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y}<extra></extra>",
            }
        )
    return data


def anatomy_panel(rows: dict[str, Row]) -> Panel:
    """Show the time of a profiled step by activity."""
    name, title = "anatomy", "Anatomy of a step"
    shown_rows = {label: Anatomy(**row.anatomy) for label, row in rows.items() if row.anatomy}
    if not shown_rows:
        return Panel(name, title, missing="no run used --profile")
    data = []
    for number, part in enumerate(PARTS):
        seconds = [getattr(anatomy, part.field) for anatomy in shown_rows.values()]
        part_title = part.title.replace("\n", " ").replace("comm.", "communication")
        data.append(
            {
                **{"type": "bar", "orientation": "h", "name": part_title, "hoverinfo": "text"},
                "x": [rounded(part_seconds * 1e3) for part_seconds in seconds],
                "y": list(shown_rows),
                "marker": {"color": colour(9) if part.field == "idle_seconds" else colour(number)},
                "hovertext": [
                    f"{escaped(label)}<br>{part_title}: {part_seconds * 1e3:,.1f} ms, "
                    f"{part_seconds / anatomy.step_seconds:.0%}"
                    for (label, anatomy), part_seconds in zip(shown_rows.items(), seconds, strict=True)
                ],
            }
        )
    layout = bars_layout(_places(shown_rows), x_title="ms per step", legend=True)
    notes = ("profiling slows steps down: use these shares, but take rates from timed steps",)
    return Panel(name, title, (Figure(name, title, data, layout),), notes)


def _bars(rows: dict[str, Row], value: Callable[[Row], float], words: Callable[[Row], str]) -> dict[str, Any]:
    """Return a bar for each row, in its strategy's colour."""
    return {
        **{"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False},
        "x": [value(row) for row in rows.values()],
        "y": list(rows),
        "marker": {"color": _colours(rows)},
        "hovertext": [f"{escaped(label)}<br>{words(row)}" for label, row in rows.items()],
    }


def _places(labels: dict[str, Any]) -> list[Bar]:
    return [Bar(label, escaped(label)) for label in labels]


def _colours(rows: dict[str, Row]) -> list[str]:
    others = [row.strategy for row in rows.values()]
    return [strategy_colour(strategy, others) for strategy in others]


def _symbols(rows: dict[str, Row]) -> list[str]:
    others = [row.strategy for row in rows.values()]
    return [strategy_symbol(strategy, others) for strategy in others]


def _speed_words(row: Row) -> str:
    launches = f"{row.num_launches} launch{'es' * (row.num_launches > 1)}"
    interval = f"<br>{row.interval[0]:,.0f} to {row.interval[1]:,.0f}" if row.interval else ""
    return f"{row.tokens_per_second:,.0f} tokens/s{interval}<br>{row.num_timed_steps} timed steps, {launches}"


def _left_out_notes(rows: dict[str, Row], shown_rows: dict[str, Row]) -> list[str]:
    """Return a note for the rows that a panel leaves out, grouped by reason."""
    labels_by_reason: dict[str, list[str]] = {}
    for label, row in rows.items():
        if label not in shown_rows:
            reason = row.status if row.status != "ok" else row.evidence
            labels_by_reason.setdefault(reason, []).append(label)
    return [f"without a rate, {reason}: {named(labels)}" for reason, labels in labels_by_reason.items()]


def _no_dollars(rows: dict[str, Row]) -> str:
    if any(row.price for row in rows.values()):
        return "no run was timed"
    return "no known price for this hardware: set one with --usd_per_gpu_hour"


def _usd(row: Row) -> float:
    return row.usd_per_million_tokens


def rounded(value: float | None) -> float | None:
    """Round to five digits, the resolution of a chart: numbers are most of the page's bytes."""
    return None if value is None else float(f"{value:.5g}")
