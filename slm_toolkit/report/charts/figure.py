"""Figure: what plotly draws, as plain data, so that making one needs no plotly and takes no time."""

import html
from dataclasses import dataclass, field
from typing import Any

from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

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
