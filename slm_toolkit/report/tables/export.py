"""Rows as text for other programs: CSV, JSON and Markdown."""

import csv
import html
import io
import re
from typing import Any

import msgspec

from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.comparison import columns_of, heading, notes, parity_notes, provenance
from slm_toolkit.report.verdict import verdict


def json_text(content: list[dict[str, Any]]) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def csv_text(content: list[dict[str, Any]]) -> str:
    """Return the names and rows of `--json` as CSV: lists and objects as JSON text, unknown as empty cells.

    Text that a spreadsheet would compute (it begins with =, +, - or @) gets a leading apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(content[0])
    writer.writerows([_csv_cell(value) for value in row.values()] for row in content)
    return text.getvalue()


def markdown_text(rows: list[Row]) -> str:
    """Return the table of `slm report` with all columns, its heading and notes, as Markdown."""
    columns = columns_of(rows)
    titles = [column.title for column in columns]
    rules = ["---:" if column.is_numeric else "---" for column in columns]
    cells = zip(*(column.cells for column in columns), strict=True)
    head, *lines = [f"| {' | '.join(map(_markdown, line))} |" for line in (titles, *cells)]
    points = [f"**{_markdown(line)}**" for line in verdict(rows)]
    others = (*notes(rows, columns), *parity_notes(labelled(rows)))
    points += map(_markdown, (provenance(rows), *(note.plain for note in others)))
    table = [head, f"| {' | '.join(rules)} |", *lines]
    parts = [_markdown(heading(rows).plain), "", *table, "", *(f"- {point}" for point in points)]
    return "\n".join(parts) + "\n"


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return msgspec.json.encode(value).decode() if isinstance(value, bool | list | dict) else value


def _markdown(text: str) -> str:
    """Escape text for GitHub's Markdown; underscores inside words need no escape there.

    HTML is escaped by entities: mkdocs knows no backslash before < and &.
    """
    text = html.escape(re.sub(r"([\\`*|\[\]~$])", r"\\\1", text), quote=False)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text).replace("\n", " ")
