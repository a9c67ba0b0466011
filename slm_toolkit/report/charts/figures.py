"""The charts of a page: tokens per second and losses."""

import html
import math
from dataclasses import dataclass
from typing import Any

from slm_toolkit.report.rows import Row

# A Figure is plain data for plotly.js, so that making it is fast and needs no plotly package.

_COLOURS = (  # Observable 10, for light and dark pages: https://observablehq.com/blog/crafting-data-colors
    *("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#97bbf5"),
    *("#9c6b4e", "#9498a0"),
)
_MOST_KEYS = 16
"most entries of a legend; with more there is no legend, and hovering shows the names"
MOST_POINTS = 300
"points of a curve at most; of a longer curve, every second, third, ... step is drawn"
_MOST_BANDS = 6
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_PLACE_PIXELS = 44
"height of a bar with its title"


@dataclass(frozen=True)
class Figure:
    """A picture: `data` and `layout` are plotly.js's (https://plotly.com/javascript/reference/).

    The page hides what its table's filter hides. For that, a trace of one row has the row's label as `meta`,
    and any other trace of rows has the label of each point's row in `customdata`.
    """

    name: str
    "also the name of its file"
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Figures for one purpose, shown one at a time."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    note: str = ""


def colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def escaped(text: str) -> str:
    """Escape text from records, because plotly interprets tags."""
    return html.escape(text, quote=False)


def rounded(value: float | None) -> float | None:
    """Round to five digits, the resolution of a chart: numbers are most of the page's bytes."""
    return None if value is None else float(f"{value:.5g}")


def curves_layout(*, x_title: str, y_title: str, num_keys: int) -> dict[str, Any]:
    """Return a layout with two numeric axes, and a legend above the plot unless it is too long."""
    return {
        "height": 460,
        "margin": {"l": 64, "r": 36, "t": 36, "b": 50},
        "showlegend": 1 < num_keys <= _MOST_KEYS,
        "legend": {
            **{"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
            "traceorder": "normal",
            "maxheight": 0.9,  # of the figure's height; by default, a legend scrolls beyond half of it
        },
        "hovermode": "closest",
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title, "standoff": 12}},
    }


def speed_panel(rows: dict[str, Row]) -> Panel | None:
    """Show the tokens per second of labelled rows with intervals; None if no row has a rate."""
    timed = {label: row for label, row in rows.items() if row.tokens_per_second and not row.is_rehearsed}
    if not timed:
        return None
    title = "Tokens per second"
    rates = [row.tokens_per_second for row in timed.values()]
    ends = [row.interval or 2 * (row.tokens_per_second,) for row in timed.values()]
    bars = {
        **{"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False},
        "x": rates,
        "y": list(timed),
        "customdata": list(timed),
        "marker": {"color": _colours(timed)},
        "hovertext": [
            f"{escaped(label)}<br>{rate:,.0f} tokens/s" for label, rate in zip(timed, rates, strict=True)
        ],
        "error_x": {
            **{"type": "data", "symmetric": False, "thickness": 1.5},
            "array": [rounded(highest - rate) for rate, (_, highest) in zip(rates, ends, strict=True)],
            "arrayminus": [rounded(rate - lowest) for rate, (lowest, _) in zip(rates, ends, strict=True)],
        },
    }
    layout = bars_layout(list(timed), x_title="tokens/s, all ranks")
    note = "whiskers: the interval in which another measurement is expected"
    return Panel("speed", title, (Figure("speed", title, [bars], layout),), note)


def bars_layout(labels: list[str], *, x_title: str) -> dict[str, Any]:
    """Return a layout of bars with each label above its bar: phones use their whole width."""
    return {
        "barmode": "stack",
        "bargap": 0.62,
        "height": _PLACE_PIXELS * len(labels) + 80,
        "margin": {"l": 12, "r": 36, "t": 30, "b": 50},
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero", "fixedrange": True},
        "yaxis": {
            **{"type": "category", "categoryorder": "array", "categoryarray": labels},
            "range": [len(labels) - 0.5, -0.7],
            **{"showticklabels": False, "showgrid": False, "fixedrange": True},
        },
        "meta": {"place_pixels": _PLACE_PIXELS},  # for the page, which leaves out places
        "annotations": [
            {
                **{"xref": "paper", "x": 0, "xanchor": "left", "y": label, "yanchor": "bottom", "yshift": 7},
                **{"text": escaped(label), "showarrow": False, "align": "left", "font": {"size": 12}},
            }
            for label in labels
        ],
    }


def loss_panel(rows: dict[str, Row]) -> Panel | None:
    """Show the losses of labelled rows over time; None if no row has two."""
    trained = {label: row for label, row in rows.items() if len(row.losses) > 1}
    if not trained:
        return None
    layout = curves_layout(x_title="step", y_title="loss, mean over ranks", num_keys=len(trained))
    strategies = [row.strategy for row in trained.values()]
    curves = []
    for index, ((label, row), of_strategy) in enumerate(zip(trained.items(), _colours(trained), strict=True)):
        every = math.ceil(len(row.losses) / MOST_POINTS)
        steps = list(range(len(row.losses)))[::-every][::-1]  # the last step is always drawn
        curves.append(
            {
                **{"type": "scatter", "mode": "lines", "name": escaped(label), "meta": label},
                "x": [row.first_step + step + 1 for step in steps],
                "y": [rounded(row.losses[step]) for step in steps],
                "line": {
                    "color": of_strategy,
                    "dash": _DASHES[strategies[:index].count(row.strategy) % len(_DASHES)],
                    # equal curves hide each other, so the first of a few curves are wide bands below the rest
                    "width": 1.8 + (1.4 * (len(trained) - 1 - index) if len(trained) <= _MOST_BANDS else 0),
                },
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y}<extra></extra>",
            }
        )
    return Panel("losses", "Loss", (Figure("losses", "Loss", curves, layout),))


def _colours(rows: dict[str, Row]) -> list[str]:
    """Return the colour of each row's strategy."""
    strategies = list(dict.fromkeys(row.strategy for row in rows.values()))
    return [colour(strategies.index(row.strategy)) for row in rows.values()]
