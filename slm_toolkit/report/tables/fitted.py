"""Tables that fit the console's width: a narrow console loses columns, but no figure is cut."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 220
"width in characters if stdout is a file or a pipe"


# Values as the text of a table's cell; an unknown value is a dash.

DASH = "-"


def setting(value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def number(form: str, factor: float = 1) -> Callable[[float | None], str]:
    """Return the function that writes a number times `factor` in this form."""
    return lambda value: DASH if value is None else form.format(value * factor)


rate = number("{:,.0f}")
percent = number("{:.0%}")
gib = number("{:.2f}", 2**-30)
milliseconds = number("{:,.1f}", 1e3)
dollars = number("${:.4f}")
loss = number("{:.4f}")


@dataclass(frozen=True)
class Column:
    """A column of a table: a title of one or several lines, and a cell for each row."""

    title: str
    cells: Sequence[str]
    drop_order: int = 0
    "a narrow console drops columns with low values first; 0: never dropped"
    justify: Literal["left", "right"] | None = None
    "None: right if all cells are numbers"
    styles: Sequence[str] = ()
    "style of each cell; empty: plain"
    note: str | None = None
    "the line below a table that has this column"

    @property
    def is_numeric(self) -> bool:
        if self.justify is not None:
            return self.justify == "right"
        return all(cell[:1] in f"0123456789${DASH}~±+" for cell in self.cells)

    @property
    def has_values(self) -> bool:
        return any(cell != DASH for cell in self.cells)

    @property
    def name(self) -> str:
        """Return the title as one line."""
        return self.title.replace("-\n", "").replace("\n", " ")

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, {*self.title.split("\n"), *self.cells}))


@dataclass(frozen=True)
class Heading:
    """A column of a table of any rows: its title, its value, and the value's text."""

    title: str
    value: str | Callable[[Any], Any]
    "name of a row's attribute, or a function of a row"
    text: Callable[[Any], str] = setting
    drop_order: int = 0
    style: Callable[[Any], str] | None = None
    justify: Literal["left", "right"] | None = None
    note: str | None = None


def filled(headings: Sequence[Heading], rows: Sequence[Any]) -> list[Column]:
    """Return the columns of these rows; columns without a value are left out."""
    columns = [
        Column(
            heading.title,
            [heading.text(value(row)) for row in rows],
            heading.drop_order,
            heading.justify,
            [heading.style(row) for row in rows] if heading.style else (),
            heading.note,
        )
        for heading in headings
        for value in [attrgetter(heading.value) if isinstance(heading.value, str) else heading.value]
    ]
    return [column for column in columns if column.has_values]


def columns_that_fit(columns: Sequence[Column], *, width: int) -> tuple[list[Column], list[str]]:
    """Drop columns until the table fits `width`; return the kept columns and the names of the dropped.

    Columns are dropped by `drop_order`; those with 0 stay, even if the table is still too wide.
    """
    kept, dropped = list(columns), []
    while table_width(kept) > width and (droppable := [column for column in kept if column.drop_order]):
        least = min(droppable, key=lambda column: column.drop_order)
        kept.remove(least)
        dropped.append(least.name)
    return kept, dropped


def table_width(columns: Sequence[Column]) -> int:
    """Return the table's width: each column adds two blanks and a line, and one more line is on the left."""
    return 1 + sum(column.width + 3 for column in columns)


def table_of(columns: Sequence[Column], *, row_styles: Sequence[str | None] = ()) -> Table:
    """Make a table as wide as its content. Print it with `crop=False`.

    On a narrower terminal, lines wrap, so that nothing is cut.
    """
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_numeric else "left", no_wrap=True)
    for index in range(len(columns[0].cells)):
        cells = (
            Text(column.cells[index], style=column.styles[index] if column.styles else "")
            for column in columns
        )
        table.add_row(*cells, style=row_styles[index] if row_styles else None)
    return fix_width(table)


def fix_width(table: Table) -> Table:
    """Set `table.width` to the width of its content; otherwise rich cuts figures to fit the console."""
    roomy = Console(width=10_000, markup=False, emoji=False)
    table.width = table.__rich_measure__(roomy, roomy.options).maximum
    return table


def left_out_note(dropped: Sequence[str]) -> str:
    return f"columns that did not fit: {', '.join(dropped)} (--json has all)"


def console_of_stdout(*, pipe_width: int = PIPE_WIDTH) -> Console:
    """Return a console that prints tables.

    If stdout is not a terminal, its width is $COLUMNS if that is set, else `pipe_width`.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = pipe_width
    return console


def command_line(command: str) -> Text:
    """Return a command that no console wraps, so that it can be copied."""
    return Text(command, no_wrap=True, overflow="ignore")
