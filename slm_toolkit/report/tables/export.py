"""Export rows to other programs: CSV, JSON and Markdown."""

import csv
import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.columns import columns_of
from slm_toolkit.report.tables.comparison import (
    commands_of,
    heading,
    notes,
    parity_notes,
    provenance,
)
from slm_toolkit.report.verdict import verdict

_TEXTS: dict[str, Callable[..., str]] = {
    ".csv": lambda rows, content, page: csv_text(content),
    ".md": lambda rows, content, page: markdown_text(rows),
    ".html": lambda rows, content, page: page(),
}
ENDINGS = tuple(_TEXTS)
"endings of exported files: the ending decides the format"


def write_export(
    path: Path, rows: list[Row], content: list[dict[str, Any]], *, page: Callable[[], str]
) -> None:
    """Write rows to a file, in the format of its ending.

    `content`: the objects of `--json`. `page`: makes the HTML page, which a room above this one draws.
    """
    path.write_text(_TEXTS[path.suffix](rows, content, page), encoding="utf-8")


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
    """Return the table of `slm report` with all columns, its heading, notes and commands, as Markdown."""
    columns = columns_of(rows)
    titles = [_markdown(column.title) for column in columns]
    rules = ["---:" if column.is_numeric else "---" for column in columns]
    cells = [[_markdown(cell) for cell in column.cells] for column in columns]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *zip(*cells, strict=True))]
    all_notes = (*notes(rows, columns), *parity_notes(labelled(rows)))
    note_lines = [f"- {_markdown(note.plain)}" for note in all_notes]
    conclusion = [f"- **{_markdown(line)}**" for line in verdict(rows)]
    conclusion.append(f"- {_markdown(provenance(rows))}")
    parts = [_markdown(heading(rows).plain), "", *lines, "", *conclusion, *note_lines, *_commands(rows)]
    return "\n".join(parts) + "\n"


def _commands(rows: list[Row]) -> list[str]:
    """Return the launch commands as lines of Markdown, folded up."""
    text = commands_of(labelled(rows))
    if not text:
        return []
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)  # so that no command ends the block
    return ["", "<details><summary>commands</summary>", "", f"{fence}text", text, fence, "", "</details>"]


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
