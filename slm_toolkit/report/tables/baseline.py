"""Changes since a baseline as a rich table with its verdict."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.report.baseline import Change
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import fix_width

_STYLES = {"slower": "red", "bigger": "red", "differ": "red", "faster": "green", "smaller": "green"}


def baseline_table(
    found: list[Change], missing: list[Row], *, named: dict[str, str], baseline: Path, width: int
) -> RenderableType:
    """A line for each run that both have; narrow consoles get the verdicts without the rates."""
    table = _build(found, named, with_figures=True)
    if table.width > width:
        table = _build(found, named, with_figures=False)
    worse = [change for change in found if change.is_regression]
    verdict = (
        Text(f"worse than {baseline}: {', '.join(named[change.record_now] for change in worse)}", style="red")
        if worse
        else Text(f"nothing is slower, bigger or less accurate than {baseline} beyond noise", style="green")
    )
    if not found:
        verdict = Text(f"{baseline} has none of these runs", style="yellow")
    notes = [Text(f"not in the baseline: {named[row.record]}", style="dim") for row in missing]
    return Group(Text(f"against the records in {baseline}", style="bold"), table, verdict, *notes)


def _build(found: list[Change], named: dict[str, str], *, with_figures: bool) -> Table:
    table = Table(header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("status", no_wrap=True)
    if with_figures:
        table.add_column("tokens/s\nthen", justify="right", no_wrap=True)
        table.add_column("tokens/s\nnow", justify="right", no_wrap=True)
    table.add_column("speed", no_wrap=True)
    table.add_column("memory", no_wrap=True)
    table.add_column("losses", no_wrap=True)
    for change in found:
        cells = [
            Text(named[change.record_now]),
            Text(change.status, style="" if change.status in ("ok", "mended") else "red"),
        ]
        if with_figures:
            cells += [Text(_rate(change.tokens_per_second_then)), Text(_rate(change.tokens_per_second_now))]
        cells += [
            _verdict(change.speed, change.speed_ratio),
            _verdict(change.memory, change.memory_ratio),
            Text(change.losses, style=_STYLES.get(change.losses, "")),
        ]
        table.add_row(*cells)
    return fix_width(table)


def _verdict(word: str, ratio: float | None) -> Text:
    shown = word if ratio is None else f"{word} ({ratio - 1:+.1%})"
    return Text(shown, style=_STYLES.get(word, ""))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
