"""Changes since a baseline: a table and a verdict."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.report.baseline import Change
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.cells import rate
from slm_toolkit.report.tables.fitted import Column, columns_that_fit, table_of

_STYLES = {"slower": "red", "bigger": "red", "differ": "red", "faster": "green", "smaller": "green"}


def baseline_table(
    found: list[Change], missing: list[Row], *, named: dict[str, str], baseline: Path, width: int
) -> RenderableType:
    """A line for each run that both have. Print it with `crop=False`."""
    columns, _ = columns_that_fit(_columns(found, named), width=width)
    worse = [change for change in found if change.is_regression]
    verdict = (
        Text(f"worse than {baseline}: {', '.join(named[change.record_now] for change in worse)}", style="red")
        if worse
        else Text(f"nothing is slower, bigger or less accurate than {baseline} beyond noise", style="green")
    )
    if not found:
        verdict = Text(f"{baseline} has none of these runs", style="yellow")
    notes = [Text(f"not in the baseline: {named[row.record]}", style="dim") for row in missing]
    return Group(Text(f"against the records in {baseline}", style="bold"), table_of(columns), verdict, *notes)


def _columns(found: list[Change], named: dict[str, str]) -> list[Column]:
    def verdicts(title: str, words: list[str], ratios: list[float | None]) -> Column:
        cells = [
            word if ratio is None else f"{word} ({ratio - 1:+.1%})"
            for word, ratio in zip(words, ratios, strict=True)
        ]
        return Column(title, cells, justify="left", styles=[_STYLES.get(word, "") for word in words])

    status_styles = ["" if change.status in ("ok", "mended") else "red" for change in found]
    return [
        Column("strategy", [named[change.record_now] for change in found], justify="left"),
        Column("status", [change.status for change in found], justify="left", styles=status_styles),
        Column("tokens/s\nthen", [rate(change.tokens_per_second_then) for change in found], 1),
        Column("tokens/s\nnow", [rate(change.tokens_per_second_now) for change in found], 2),
        verdicts("speed", [change.speed for change in found], [change.speed_ratio for change in found]),
        verdicts("memory", [change.memory for change in found], [change.memory_ratio for change in found]),
        verdicts("losses", [change.losses for change in found], [None] * len(found)),
    ]
