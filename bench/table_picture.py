"""Draw the table of `slm report` as README's picture.

python bench/table_picture.py results/cpu docs/images/comparison.svg
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from slm_toolkit import api
from slm_toolkit.report.tables.comparison import columns_of, comparison_table
from slm_toolkit.report.tables.fitted import PIPE_WIDTH, columns_that_fit, table_width


def picture(records: str) -> str:
    """Return the table, its heading and its notes as an SVG."""
    rows = api.report(records).rows
    columns, _ = columns_that_fit(columns_of(rows), width=PIPE_WIDTH)
    console = Console(record=True, file=io.StringIO(), width=table_width(columns), markup=False, emoji=False)
    console.print(comparison_table(rows, width=PIPE_WIDTH))
    return console.export_svg(title="slm report")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(sys.argv[1]))
