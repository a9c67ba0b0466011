"""Rows as CSV, Parquet, JSON, Markdown and LaTeX."""

import csv
import io
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.columns import Column, columns_of
from slm_toolkit.report.tables.comparison import heading, notes

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after the \\ of the line before, it would be that line's height
    "]": "{]}",
    "*": "{*}",  # and this would forbid a page break there
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
}


def json_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """One object per row; `dataclasses.asdict` would copy each loss, which takes as long as all the rest."""
    return [dict(vars(row)) for row in rows]


def json_text(content: list[dict[str, Any]]) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def csv_text(content: list[dict[str, Any]]) -> str:
    """The names and rows of `--json`; lists and objects are JSON text, unknown is an empty cell.

    Text that a spreadsheet would compute (=, +, -, @ at its beginning) gets an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(content[0])
    writer.writerows([_csv_cell(value) for value in row.values()] for row in content)
    return text.getvalue()


def write_parquet(content: list[dict[str, Any]], path: Path) -> None:
    """The names and rows of `--json`; lists stay lists, objects are JSON text, unknown is null."""
    import pyarrow
    from pyarrow import parquet

    hints = get_type_hints(Row)
    columns = {}
    for name in content[0]:
        kind = _arrow_type(hints.get(name, dict[str, Any]))
        values = [row[name] for row in content]
        if kind == pyarrow.string():
            values = [_as_text(value) for value in values]
        columns[name] = pyarrow.array(values, kind)
    parquet.write_table(pyarrow.table(columns), path)


def markdown_text(rows: list[Row]) -> str:
    """The table that `slm report` prints, all columns of it, between its heading and its notes."""
    columns = columns_of(rows)
    titles = [_markdown(column.title) for column in columns]
    rules = ["---:" if column.is_numeric else "---" for column in columns]
    cells = [[_markdown(cell) for cell in column.cells] for column in columns]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *zip(*cells, strict=True))]
    said = [f"- {_markdown(note.plain)}" for note in notes(rows, [])]
    return "\n".join([_markdown(heading(rows).plain), "", *lines, "", *said]) + "\n"


def latex_text(rows: list[Row]) -> str:
    """The same as a LaTeX table with booktabs' rules: the heading is its caption, empty columns would make it
    wider than a page."""
    columns = [column for column in columns_of(rows) if column.has_values]
    cells = [[_latex(cell) for cell in column.cells] for column in columns]
    lines = [f"{' & '.join(line)} \\\\" for line in zip(*cells, strict=True)]
    said = " \\\\\n".join(_latex(note.plain) for note in notes(rows, []))
    return f"""\
% needs \\usepackage{{booktabs}}
\\begin{{table}}
\\caption{{{_latex(heading(rows).plain)}}}
\\begin{{tabular}}{{{"".join("r" if column.is_numeric else "l" for column in columns)}}}
\\toprule
{" & ".join(_latex_title(column) for column in columns)} \\\\
\\midrule
{chr(10).join(lines)}
\\bottomrule
\\end{{tabular}}

{{\\footnotesize
{said}
}}
\\end{{table}}
"""


def _latex_title(column: Column) -> str:
    side = "r" if column.is_numeric else "l"
    lines = [_latex(line) for line in column.title.split("\n")]
    stacked = r" \\ ".join(lines)
    return rf"\shortstack[{side}]{{{stacked}}}" if len(lines) > 1 else stacked


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return _as_text(value) if isinstance(value, bool | list | dict) else value


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _arrow_type(hint: Any) -> Any:
    """Of `list[float | None]` a list of doubles; of an object the text that it becomes."""
    import pyarrow

    (kind,) = [kind for kind in get_args(hint) if kind is not type(None)] if _is_union(hint) else [hint]
    if get_origin(kind) is list:
        return pyarrow.list_(_arrow_type(get_args(kind)[0]))
    known = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    return known.get(kind, pyarrow.string())


def _is_union(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _markdown(text: str) -> str:
    """GitHub's dialect: an underscore inside a word is none of emphasis, and stays readable."""
    text = re.sub(r"([\\`*|<>\[\]~&$])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text).replace("\n", " ")


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become one dash
