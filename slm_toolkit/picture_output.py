"""Pictures of records from flags to files: `slm report --html`, `--figures` and `--plot`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from slm_toolkit.errors import user_errors
from slm_toolkit.output import labels, pictures_of
from slm_toolkit.record import RunRecord

if TYPE_CHECKING:
    from slm_toolkit.report.figure import Panel
    from slm_toolkit.report.rows import Row

PICTURES = ("html", "figures", "plot")
_PLOT_WIDTH = 80
"columns where stdout has no width"


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the table and all charts as one page that needs no network",
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="write each chart as PNG and SVG; needs kaleido and a Chrome, see CHROME_PATH",
    )
    parser.add_argument("--plot", action="store_true", help="draw bars and curves below the table")


def print_plots(rows: list["Row"]) -> None:
    from slm_toolkit.report.plot import terminal_plots

    console = Console(markup=False, emoji=False)
    console.width = console.width if console.is_terminal else _PLOT_WIDTH
    plots = terminal_plots(dict(zip(labels(rows), rows, strict=True)), width=console.width)
    console.print(plots, crop=False)


def write_pictures(
    rows: list["Row"],
    records: list[tuple[Path, RunRecord]],
    args: argparse.Namespace,
    *,
    left_out: list[str],
) -> None:
    """The files that flags ask for; their names go to stderr. `left_out`: records that could not be read."""
    from slm_toolkit.report.html import html_page
    from slm_toolkit.report.images import write_images

    panels = panels_of(records, dict(zip(labels(rows), rows, strict=True)))
    with user_errors():
        try:
            if args.html:
                args.html.parent.mkdir(parents=True, exist_ok=True)
                args.html.write_text(html_page(rows, panels, left_out=left_out), encoding="utf-8")
                print(f"wrote {args.html}", file=sys.stderr)
            if args.figures:
                written = write_images(panels, args.figures)
                print(f"wrote {len(written)} files to {args.figures}", file=sys.stderr)
        except OSError as error:
            raise ValueError(f"can't write: {error}\nhint: a place where you may, with room") from None
    for panel in panels:
        if panel.missing:
            print(f"left out: {panel.title}: {panel.missing}", file=sys.stderr)


def panels_of(records: list[tuple[Path, RunRecord]], rows: dict[str, "Row"]) -> list["Panel"]:
    """All panels of labelled rows, in the order of a page."""
    from slm_toolkit.report import figures, memory_figures
    from slm_toolkit.report.ledger import ledger_of
    from slm_toolkit.report.recorded_estimate import estimate_of

    by_path = {str(path): record for path, record in records}
    estimates = {
        label: made for label, row in rows.items() if (made := estimate_of(by_path[row.record])) is not None
    }
    return [
        figures.speed_panel(rows),
        memory_figures.parts_panel(rows, estimates),
        figures.cost_panel(rows),
        figures.front_panel(rows),
        figures.scaling_panel(rows),
        figures.loss_panel(rows),
        memory_figures.timeline_panel(rows, pictures_of(list(rows.values()))),
        figures.anatomy_panel(rows),
        memory_figures.errors_panel(rows, ledger_of(records)[0]),
    ]
