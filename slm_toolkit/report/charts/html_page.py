"""Rows and charts as one HTML page. It contains plotly.js, data, style and script, and fetches nothing."""

import html
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.comparison import columns_of, heading, notes, parity_notes, provenance
from slm_toolkit.report.verdict import verdict

_PAGE = Path(__file__).parent / "page"
PLOTLY_FILE = _PAGE / "plotly-basic.min.js"
"from https://cdn.plot.ly; its licence is in the same folder"


def html_page(rows: list[Row], *, left_out: list[str]) -> str:
    """Return the whole page; `left_out` has sentences about records that could not be read."""
    by_label = labelled(rows)
    drawn = [*filter(None, (speed_figure(by_label), loss_figure(by_label)))]
    figures = {figure.name: vars(figure) for figure in drawn}
    data = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    note_lines = [note.plain for note in (*parity_notes(by_label), *notes(rows, columns_of(rows)))]
    commands = "\n".join(f"# {label}\n{row.command}" for label, row in by_label.items() if row.command)
    parts = {
        "commands": commands,
        "heading": heading(rows).plain,
        "provenance": provenance(rows),
    }
    links = (f'<a href="#{figure.name}">{figure.title}</a>' for figure in drawn)
    sections = (
        f'<section id="{figure.name}"><h2>{figure.title}</h2>'
        f'<div class="chart" id="chart-{figure.name}" data-figure="{figure.name}"></div>'
        f'<p class="rest" hidden></p><p class="notes">{figure.note}</p></section>'
        for figure in drawn
    )
    filled = {name: html.escape(text) for name, text in parts.items()} | {
        "style": _file("report.css"),
        "links": "".join(links),
        "verdict": _items(verdict(rows)),
        "table": _table(by_label),
        "notes": _items(note_lines + left_out),
        "panels": "".join(sections),
        "figures": data.replace("<", "\\u003c"),  # so that a record's text can't end the element
        "plotly": _plotly_script(),
        "script": _file("report.js"),
    }
    return re.sub(r"{{(\w+)}}", lambda match: filled[match[1]], _file("report.html"))


def _plotly_script() -> str:
    """Return plotly.js's basic bundle with its licence (MIT): 1.2 MB of the page."""
    licence = _file("plotly-LICENSE").replace("*/", "")
    return f"/*\n{licence}*/\n" + PLOTLY_FILE.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _file(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _table(rows: dict[str, Row]) -> str:
    """Return the table's head and body; a row's label ties it to its marks in the charts."""
    # the page has a heading for each model instead of its column
    columns = [column for column in columns_of(list(rows.values())) if column.title != "model"]
    titles = "".join(
        f'<th scope="col" aria-sort="none"><button>{html.escape(column.title)}</button></th>'
        for column in columns
    )
    lines = [f"<thead><tr>{titles}</tr></thead><tbody>"]
    for (label, row), *texts in zip(rows.items(), *(column.cells for column in columns), strict=True):
        state = "unequal" if row.parity_holds is False else "best" if row.rank == 1 else row.status
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        data = f'data-label="{html.escape(label)}" data-model="{html.escape(row.model)}"'
        lines.append(f'<tr class="{html.escape(state)}" {data}>{cells}</tr>')
    return "\n".join([*lines, "</tbody>"])


def _items(lines: list[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


# A Figure is plain data for plotly.js, so that making it is fast and needs no plotly package.

_COLOURS = (  # Observable 10, for light and dark pages: https://observablehq.com/blog/crafting-data-colors
    *("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#97bbf5"),
    *("#9c6b4e", "#9498a0"),
)
_MOST_KEYS = 16
"most entries of a legend; with more there is no legend, and hovering shows the names"
MOST_POINTS = 300
"points of a curve at most; of a longer curve, every second, third, ... step is drawn"
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
        },
        "hovermode": "closest",
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title, "standoff": 12}},
    }


def speed_figure(rows: dict[str, Row]) -> Figure | None:
    """Show the tokens per second of labelled rows with intervals; None if no row has a rate."""
    timed = {label: row for label, row in rows.items() if row.tokens_per_second and not row.is_rehearsed}
    if not timed:
        return None
    rates = [row.tokens_per_second for row in timed.values()]
    ends = [row.interval or 2 * (row.tokens_per_second,) for row in timed.values()]
    bars = {
        **{"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False},
        "x": rates,
        "y": list(timed),
        "customdata": list(timed),
        "marker": {"color": [colour([*rows].index(label)) for label in timed]},
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
    return Figure("speed", "Tokens per second", [bars], layout, note)


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


def loss_figure(rows: dict[str, Row]) -> Figure | None:
    """Show the losses of labelled rows over time; None if no row has two."""
    trained = {label: row for label, row in rows.items() if len(row.losses) > 1}
    if not trained:
        return None
    layout = curves_layout(x_title="step", y_title="loss, mean over ranks", num_keys=len(trained))
    curves = []
    for label, row in trained.items():
        every = math.ceil(len(row.losses) / MOST_POINTS)
        steps = list(range(len(row.losses)))[::-every][::-1]  # the last step is always drawn
        curves.append(
            {
                **{"type": "scatter", "mode": "lines", "name": escaped(label), "meta": label},
                "x": [row.first_step + step + 1 for step in steps],
                "y": [rounded(row.losses[step]) for step in steps],
                "line": {"color": colour([*rows].index(label))},
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y}<extra></extra>",
            }
        )
    return Figure("losses", "Loss", curves, layout)
