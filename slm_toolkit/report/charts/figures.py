"""Pictures of what rows hold: rates, dollars, their front, scaling, losses and the parts of a step."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.step_breakdown import PARTS
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

# Figure: what plotly draws, as plain data, so that making one needs no plotly and takes no time.

_COLOURS = (  # Observable 10, for white and for black: https://observablehq.com/blog/crafting-data-colors
    *("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#97bbf5"),
    *("#9c6b4e", "#9498a0"),
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon")
_MOST_NAMED = 5
"names in a sentence; of more there is a count"
MOST_KEYS = 16
"entries of a legend; of more there is none, hovering tells"


@dataclass(frozen=True)
class Figure:
    """One picture: `data` and `layout` are plotly.js's (https://plotly.com/javascript/reference/)."""

    name: str
    "also of its file"
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Figures of one purpose, of which one is seen at a time; or why there are none."""

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = field(default=())
    missing: str | None = None
    "what would have to be recorded for it"


@dataclass(frozen=True)
class Bar:
    """A place on the vertical axis, named above what is drawn there."""

    key: str
    "tells it from the others"
    title: str
    is_heading: bool = False
    "of the places below it; nothing is drawn there"


def colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def strategy_colour(strategy: str, others: list[str]) -> str:
    """The study's have theirs in every figure; further ones are numbered by their place in `others`."""
    return colour(_strategy_number(strategy, others))


def strategy_symbol(strategy: str, others: list[str]) -> str:
    """For readers, and printers, that see no colours."""
    return _SYMBOLS[_strategy_number(strategy, others) % len(_SYMBOLS)]


def _strategy_number(strategy: str, others: list[str]) -> int:
    known = list(dict.fromkeys((*STUDIED_STRATEGIES, *others)))
    return known.index(strategy)


def escaped(text: str) -> str:
    """plotly reads tags in texts: what comes from records has none."""
    return html.escape(text, quote=False)


def named(labels: list[str]) -> str:
    """A few in full, of more the count."""
    rest = len(labels) - _MOST_NAMED
    return ", ".join(labels[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def bars_layout(bars: list[Bar], *, x_title: str, legend: bool = False) -> dict[str, Any]:
    """Horizontal bars, parts of a whole beside each other."""
    return places_layout(bars, x_title=x_title, legend=legend) | {"barmode": "stack", "bargap": 0.62}


def places_layout(bars: list[Bar], *, x_title: str, legend: bool = False) -> dict[str, Any]:
    """Names stand above what they name, which leaves a phone all its width for the figures."""
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
    """Two numeric axes and a legend above, where it is short enough to be read."""
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
    """In sight however long the chart is; plotly makes room for it."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "traceorder": "normal",
        "maxheight": 0.9,  # of the figure; plotly would make a legend beyond half of it scroll
    }


MOST_POINTS = 300
"of a curve; of longer ones every second, third, ... step is drawn"
_MOST_TEXTS = 12
"names beside points; more would cover each other"
_MOST_BANDS = 6
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def speed_panel(rows: dict[str, Row]) -> Panel:
    """Tokens per second with intervals, the estimate beside them."""
    name, title = "speed", "Tokens per second"
    shown = {label: row for label, row in rows.items() if row.tokens_per_second and not row.is_rehearsed}
    if not shown:
        return Panel(name, title, missing="no run was timed")
    measured = _bars(shown, lambda row: row.tokens_per_second, _speed_words)
    measured["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [row.tokens_per_second_highest - row.tokens_per_second for row in shown.values()],
        "arrayminus": [row.tokens_per_second - row.tokens_per_second_lowest for row in shown.values()],
        "thickness": 1.5,
    }
    data = [measured]
    if estimated := {label: row for label, row in shown.items() if row.estimated_tokens_per_second}:
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
    notes = ["whiskers: where another measurement is expected"]
    notes += ["hollow diamonds: estimated by closed forms"] if estimated else []
    layout = bars_layout(_places(shown), x_title="tokens/s, all ranks")
    return Panel(name, title, (Figure(name, title, data, layout),), (*notes, *_others(rows, shown)))


def cost_panel(rows: dict[str, Row]) -> Panel:
    """Dollars per million tokens."""
    name, title = "cost", "Dollars per million tokens"
    shown = {label: row for label, row in rows.items() if row.usd_per_million_tokens is not None}
    if not shown:
        return Panel(name, title, missing=_no_dollars(rows))
    bars = _bars(
        shown,
        lambda row: row.usd_per_million_tokens,
        lambda row: f"${row.usd_per_million_tokens:.4f} per million tokens<br>{escaped(row.price or '')}",
    )
    layout = bars_layout(_places(shown), x_title="$ per million tokens")
    prices = tuple(f"price: {price}" for price in sorted({row.price for row in shown.values()}))
    return Panel(name, title, (Figure(name, title, [bars], layout),), prices)


def front_panel(rows: dict[str, Row]) -> Panel:
    """Cost against speed, and the runs that none beats in both."""
    name, title = "front", "Cost and speed"
    shown = {label: row for label, row in rows.items() if row.usd_per_million_tokens is not None}
    if not shown:
        return Panel(name, title, missing=_no_dollars(rows))
    front = pareto_front(shown)
    line = {
        **{"type": "scatter", "mode": "lines", "name": "Pareto front", "hoverinfo": "skip"},
        "x": [shown[label].tokens_per_second for label in front],
        "y": [shown[label].usd_per_million_tokens for label in front],
        "line": {"dash": "dot", "width": 1.5, "color": colour(9)},
    }
    points = {
        **{"type": "scatter", "hoverinfo": "text", "textposition": "top center", "cliponaxis": False},
        "mode": "markers+text" if len(shown) <= _MOST_TEXTS else "markers",
        "x": [row.tokens_per_second for row in shown.values()],
        "y": [row.usd_per_million_tokens for row in shown.values()],
        "text": [escaped(label) for label in shown],
        "hovertext": [
            f"{escaped(label)}<br>{row.tokens_per_second:,.0f} tokens/s"
            f"<br>${row.usd_per_million_tokens:.4f} per million tokens"
            for label, row in shown.items()
        ],
        "marker": {
            "size": [13 if label in front else 8 for label in shown],
            "color": _colours(shown),
            "symbol": _symbols(shown),
        },
    }
    layout = curves_layout(x_title="tokens/s, all ranks", y_title="$ per million tokens", num_keys=1)
    words = f"large, on the dotted line: none is both faster and cheaper ({named(front)})"
    return Panel(name, title, (Figure(name, title, [line, points], layout),), (words,))


def pareto_front(rows: dict[str, Row]) -> list[str]:
    """Labels of those that no other row beats in speed and in cost, from the slowest on."""
    by_speed = sorted(rows, key=lambda label: (-rows[label].tokens_per_second, _usd(rows[label])))
    front: list[str] = []
    for label in by_speed:
        if not front or _usd(rows[label]) < _usd(rows[front[-1]]):
            front.append(label)
    return front[::-1]


def scaling_panel(rows: dict[str, Row]) -> Panel:
    """Tokens per second by number of ranks, of runs that differ in nothing else."""
    name, title = "scaling", "Scaling with the number of GPUs"
    series: dict[tuple, list[tuple[str, Row]]] = {}
    num_seen: dict[tuple, int] = {}
    for label, row in rows.items():
        if row.tokens_per_second and row.world_size and not row.is_rehearsed:
            asked = tuple(sorted((key, str(value)) for key, value in row.asked.items()))
            key = (row.strategy, row.gpu or row.cpu, asked)
            of_size = num_seen[*key, row.world_size] = num_seen.get((*key, row.world_size), -1) + 1
            series.setdefault((*key, of_size), []).append(
                (label, row)
            )  # of other versions: a line of its own
    several = [found for found in series.values() if len({row.world_size for _, row in found}) > 1]
    if not several:
        return Panel(name, title, missing="no two runs differ in their number of ranks alone")
    data = []
    others = [row.strategy for row in rows.values()]
    for number, found in enumerate(several):
        found.sort(key=lambda item: item[1].world_size)
        label, first = found[0]
        per_rank = first.tokens_per_second / first.world_size
        sizes, rates = [row.world_size for _, row in found], [row.tokens_per_second for _, row in found]
        data.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "hoverinfo": "text", "x": sizes, "y": rates},
                "name": escaped(label.replace(f" ranks={first.world_size}", "")),
                "hovertext": [
                    f"{escaped(label)}<br>{row.tokens_per_second:,.0f} tokens/s on {row.world_size}"
                    f"<br>{row.tokens_per_second / row.world_size / per_rank:.0%} of linear"
                    for label, row in found
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
    sizes = sorted({row.world_size for found in several for _, row in found})
    layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes))}
    layout["yaxis"] |= {"type": "log", "dtick": "D2"}
    return Panel(name, title, (Figure(name, title, [linear, *data], layout),), ("both axes logarithmic",))


def loss_panel(rows: dict[str, Row]) -> Panel:
    """Loss curves over each other."""
    name, title = "losses", "Loss"
    shown = {label: row for label, row in rows.items() if len(row.losses) > 1}
    if not shown:
        return Panel(name, title, missing="no run of more than one step")
    used: dict[str, int] = {}
    data = []
    others = [row.strategy for row in rows.values()]
    for index, (label, row) in enumerate(shown.items()):
        number = used[row.strategy] = used.get(row.strategy, -1) + 1
        every = math.ceil(len(row.losses) / MOST_POINTS)
        steps = list(range(len(row.losses)))[::-every][::-1]  # the last one is always drawn
        data.append(
            {
                **{"type": "scatter", "mode": "lines", "name": escaped(label)},
                "x": [row.first_step + step + 1 for step in steps],
                "y": [_rounded(row.losses[step]) for step in steps],
                "line": {
                    "color": strategy_colour(row.strategy, others),
                    "dash": _DASHES[number % len(_DASHES)],
                    # equal losses hide each other: of few curves the first are broad bands under the rest
                    "width": 1.8 + (1.4 * (len(shown) - 1 - index) if len(shown) <= _MOST_BANDS else 0),
                },
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y}<extra></extra>",
            }
        )
    layout = curves_layout(x_title="step", y_title="loss, mean over ranks", num_keys=len(data))
    thinned = any(len(row.losses) > MOST_POINTS for row in shown.values())
    notes = (f"at most {MOST_POINTS} steps of a curve are drawn",) if thinned else ()
    return Panel(name, title, (Figure(name, title, data, layout),), notes)


def anatomy_panel(rows: dict[str, Row]) -> Panel:
    """Where a profiled step's time goes."""
    name, title = "anatomy", "Anatomy of a step"
    shown = {label: Anatomy(**row.anatomy) for label, row in rows.items() if row.anatomy}
    if not shown:
        return Panel(name, title, missing="no run with --profile")
    data = []
    for number, part in enumerate(PARTS):
        seconds = [getattr(anatomy, part.field) for anatomy in shown.values()]
        part_title = part.title.replace("\n", " ").replace("comm.", "communication")
        data.append(
            {
                **{"type": "bar", "orientation": "h", "name": part_title, "hoverinfo": "text"},
                "x": [_rounded(each * 1e3) for each in seconds],
                "y": list(shown),
                "marker": {"color": colour(9) if part.field == "idle_seconds" else colour(number)},
                "hovertext": [
                    f"{escaped(label)}<br>{part_title}: {each * 1e3:,.1f} ms, {each / whole.step_seconds:.0%}"
                    for (label, whole), each in zip(shown.items(), seconds, strict=True)
                ],
            }
        )
    layout = bars_layout(_places(shown), x_title="ms per step", legend=True)
    notes = ("profiling slows a step: read shares here, rates where steps were timed",)
    return Panel(name, title, (Figure(name, title, data, layout),), notes)


def _bars(rows: dict[str, Row], value: Callable[[Row], float], words: Callable[[Row], str]) -> dict[str, Any]:
    """A bar for each row, in its strategy's colour."""
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
    return (
        f"{row.tokens_per_second:,.0f} tokens/s"
        f"<br>{row.tokens_per_second_lowest:,.0f} to {row.tokens_per_second_highest:,.0f}"
        f"<br>{row.num_timed_steps} timed steps, {launches}"
    )


def _others(rows: dict[str, Row], shown: dict[str, Row]) -> list[str]:
    """Rows that a panel does not have, by why."""
    found: dict[str, list[str]] = {}
    for label, row in rows.items():
        if label not in shown:
            found.setdefault(row.status if row.status != "ok" else row.evidence, []).append(label)
    return [f"without a rate, {why}: {named(labels)}" for why, labels in found.items()]


def _no_dollars(rows: dict[str, Row]) -> str:
    if any(row.price for row in rows.values()):
        return "no run was timed"
    return "no price known of this hardware: --usd_per_gpu_hour gives one"


def _usd(row: Row) -> float:
    return row.usd_per_million_tokens


def _rounded(value: float | None) -> float | None:
    """Five digits, as many as a chart can show: they are most of the page's bytes."""
    return None if value is None else float(f"{value:.5g}")
