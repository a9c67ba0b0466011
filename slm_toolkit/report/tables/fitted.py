"""Tables as wide as their content: rich would otherwise cut figures to fit a console."""

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 220  # of what is no terminal: a file or a pipe has room


def fix_width(table: Table) -> Table:
    """Set `table.width` to what its cells need; print such a table with `crop=False`."""
    roomy = Console(width=10_000, markup=False, emoji=False)
    table.width = table.__rich_measure__(roomy, roomy.options).maximum
    return table
