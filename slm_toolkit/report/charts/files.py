"""Rows and charts as one HTML page. It contains plotly.js, data, style and script, and fetches nothing."""

import dataclasses
import html
import json
import re
from pathlib import Path

from slm_toolkit import __version__
from slm_toolkit.report.charts.figures import Panel, loss_panel, speed_panel
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.columns import columns_of
from slm_toolkit.report.tables.comparison import commands_of, heading, notes, parity_notes, provenance
from slm_toolkit.report.verdict import verdict

_PAGE = Path(__file__).parent / "page"
PLOTLY_FILE = _PAGE / "plotly-basic.min.js"
"from https://cdn.plot.ly; its licence is in the same folder"


def html_page(rows: list[Row], *, left_out: list[str]) -> str:
    """Return the whole page; `left_out` has sentences about records that could not be read."""
    by_label = labelled(rows)
    panels = (speed_panel(by_label), loss_panel(by_label))
    drawn = [panel for panel in panels if panel is not None]
    figures = {figure.name: dataclasses.asdict(figure) for panel in drawn for figure in panel.figures}
    data = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    note_lines = [note.plain for note in (*parity_notes(by_label), *notes(rows, columns_of(rows)))]
    note_lines += left_out
    commands = html.escape(commands_of(by_label))
    parts = {
        "heading": heading(rows).plain,
        "provenance": provenance(rows),
        "made_by": f"slm_toolkit {__version__}",
        "num_rows": str(len(rows)),
    }
    filled = {name: html.escape(text) for name, text in parts.items()} | {
        "style": _file("report.css"),
        "links": "".join(f'<a href="#{panel.name}">{html.escape(panel.title)}</a>' for panel in drawn),
        "verdict": _items(verdict(rows)),
        "table": _table(by_label),
        "commands": commands and f"<details><summary>commands</summary><pre>{commands}</pre></details>",
        "notes": _items(note_lines),
        "panels": "".join(map(_section, drawn)),
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


def _section(panel: Panel) -> str:
    choice = ""
    if len(panel.figures) > 1:
        options = "".join(
            f'<option value="{figure.name}">{html.escape(figure.title)}</option>' for figure in panel.figures
        )
        choice = f'<label>show <select data-of="{panel.name}">{options}</select></label>'
    return (
        f'<section id="{panel.name}"><h2>{html.escape(panel.title)}</h2>{choice}'
        f'<div class="chart" id="chart-{panel.name}" data-figure="{panel.figures[0].name}"></div>'
        '<p class="rest" hidden></p>'
        f'<p class="notes">{html.escape(panel.note)}</p></section>'
    )


def _items(lines: list[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)
