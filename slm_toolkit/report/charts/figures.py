"""What every chart is made of, and the charts of rates, losses and the parts of a step."""

import html
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from slm_toolkit.report.rows import Row
from slm_toolkit.report.verdict import PROBLEMS
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

# A Figure is plain data for plotly.js, so that making it is fast and needs no plotly package.

_COLOURS = (  # Observable 10, for light and dark pages: https://observablehq.com/blog/crafting-data-colors
    *("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#97bbf5"),
    *("#9c6b4e", "#9498a0"),
)
_MOST_NAMED = 3
"most names in a sentence; the rest is a count"
MOST_KEYS = 16
"most entries of a legend; with more there is no legend, and hovering shows the names"


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
    return colour(list(dict.fromkeys((*STUDIED_STRATEGIES, *others))).index(strategy))


def escaped(text: str) -> str:
    """Escape text from records, because plotly interprets tags."""
    return html.escape(text, quote=False)


def named(labels: list[str]) -> str:
    """Join the first labels; count the rest."""
    rest = len(labels) - _MOST_NAMED
    return ", ".join(labels[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def bars_layout(bars: list[Bar], *, x_title: str, legend: bool = False) -> dict[str, Any]:
    """Return a layout of stacked bars with each name above its bar: phones use their whole width."""
    return {
        "barmode": "stack",
        "bargap": 0.62,
        "height": _PLACE_PIXELS * len(bars) + (110 if legend else 80),
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
        "meta": {  # for the page, which leaves out places
            "headings": [bar.key for bar in bars if bar.is_heading],
            "place_pixels": _PLACE_PIXELS,
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


_PLACE_PIXELS = 44
MOST_POINTS = 300
"points of a curve at most; of a longer curve, every second, third, ... step is drawn"
_MOST_BANDS = 6
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def speed_panel(rows: dict[str, Row]) -> Panel:
    """Show tokens per second with intervals."""
    name, title = "speed", "Tokens per second"
    shown_rows = {label: row for label, row in rows.items() if row.tokens_per_second and not row.is_rehearsed}
    notes = left_out(rows, shown_rows, lambda row: _why(row, "no step was timed"))
    if not shown_rows:
        return Panel(name, title, missing="; ".join(notes))
    others = [row.strategy for row in shown_rows.values()]
    bars = {
        **{"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False},
        "x": [row.tokens_per_second for row in shown_rows.values()],
        "y": list(shown_rows),
        "customdata": list(shown_rows),
        "marker": {"color": [strategy_colour(strategy, others) for strategy in others]},
        "hovertext": [f"{escaped(label)}<br>{_speed_words(row)}" for label, row in shown_rows.items()],
        "error_x": _whiskers(shown_rows.values()),
    }
    layout = bars_layout(_places_of(shown_rows), x_title="tokens/s, all ranks")
    notes.insert(0, "whiskers: the interval in which another measurement is expected")
    return Panel(name, title, (Figure(name, title, [bars], layout),), tuple(notes))


def _whiskers(rows: Iterable[Row]) -> dict[str, Any]:
    """Return plotly's error bars of the rates; none for a row without an interval."""
    ends = [(row.tokens_per_second, *(row.interval or 2 * (row.tokens_per_second,))) for row in rows]
    return {
        **{"type": "data", "symmetric": False, "thickness": 1.5},
        "array": [rounded(highest - middle) for middle, _, highest in ends],
        "arrayminus": [rounded(middle - lowest) for middle, lowest, _ in ends],
    }


def loss_panel(rows: dict[str, Row]) -> Panel:
    """Show all loss curves; before them, if all runs should be equal, how far they are from a reference's."""
    name, title = "losses", "Loss"
    shown_rows = {label: row for label, row in rows.items() if len(row.losses) > 1}
    notes = left_out(rows, shown_rows, lambda row: _why(row, "fewer than two steps"))
    if not shown_rows:
        return Panel(name, title, missing="; ".join(notes))
    layout = curves_layout(x_title="step", y_title="loss, mean over ranks", num_keys=len(shown_rows))
    curves = _loss_curves({label: row.losses for label, row in shown_rows.items()}, shown_rows)
    if any(len(row.losses) > MOST_POINTS for row in shown_rows.values()):
        notes.insert(0, f"at most {MOST_POINTS} steps of a curve are drawn")
    figures = [*_loss_differences(shown_rows), Figure(name, title, curves, layout)]
    if len(figures[0].data) < len(shown_rows) - 1:
        figures.reverse()
    return Panel(name, title, tuple(figures), tuple(notes))


def _why(row: Row, otherwise: str) -> str:
    """Return the status of a row that did not end ok, or that it is a rehearsal, else another reason."""
    if row.status != "ok":
        return PROBLEMS[row.status]
    return "rehearsed" if row.is_rehearsed else otherwise


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
                **{"type": "scatter", "mode": "lines", "name": escaped(label), "meta": label},
                "x": [row.first_step + step + 1 for step in steps],
                "y": [rounded(curves[label][step]) for step in steps],
                "line": {
                    "color": strategy_colour(row.strategy, others),
                    "dash": DASHES[number % len(DASHES)],
                    # equal curves hide each other, so the first of a few curves are wide bands below the rest
                    "width": 1.8 + (1.4 * (len(rows) - 1 - index) if len(rows) <= _MOST_BANDS else 0),
                },
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y}<extra></extra>",
            }
        )
    return data


def _places_of(rows: dict[str, Row]) -> list[Bar]:
    """Return a place for each row; with several models, a heading before the rows of each."""
    places: list[Bar] = []
    for number, (model, group) in enumerate(groupby(rows.items(), key=lambda item: item[1].model)):
        places.append(Bar(f"{number} model", f"<b>{escaped(model)}</b>", is_heading=True))
        # the heading has the model
        places += [Bar(label, escaped(label.replace(f" {model}", "", 1))) for label, _ in group]
    return places if sum(place.is_heading for place in places) > 1 else places[1:]


def _speed_words(row: Row) -> str:
    launches = f"{row.num_launches} launch{'es' * (row.num_launches > 1)}"
    interval = f"<br>{row.interval[0]:,.0f} to {row.interval[1]:,.0f}" if row.interval else ""
    return f"{row.tokens_per_second:,.0f} tokens/s{interval}<br>{row.num_timed_steps} timed steps, {launches}"


def left_out(rows: dict[str, Row], shown_rows: Collection[str], reason_of: Callable[[Row], str]) -> list[str]:
    """Return a note for each reason why rows are not in a chart."""
    labels_by_reason: dict[str, list[str]] = {}
    for label, row in rows.items():
        if label not in shown_rows:
            labels_by_reason.setdefault(reason_of(row), []).append(label)
    return [f"not drawn, {reason}: {named(labels)}" for reason, labels in labels_by_reason.items()]


def rounded(value: float | None) -> float | None:
    """Round to five digits, the resolution of a chart: numbers are most of the page's bytes."""
    return None if value is None else float(f"{value:.5g}")
