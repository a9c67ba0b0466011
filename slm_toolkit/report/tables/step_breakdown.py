"""Anatomies as a rich table with a chart below it; no figure is ever cut, narrow terminals get less."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.tables.fitted import fix_width


@dataclass(frozen=True)
class _Part:
    """One part of a step as it is shown."""

    field: str
    title: str
    letter: str
    style: str
    priority: int
    "order in which columns are dropped; 0: never"


PARTS = (
    _Part("matmul_seconds", "matmul", "M", "black on green", 6),
    _Part("attention_seconds", "attention", "A", "black on cyan", 5),
    _Part("other_compute_seconds", "other\ncompute", "+", "black on bright_green", 3),
    _Part("optimizer_seconds", "optimizer", "O", "white on blue", 4),
    _Part("communication_exposed_seconds", "comm.\nexposed", "X", "white on red", 0),
    _Part("data_seconds", "data", "D", "black on yellow", 1),
    _Part("idle_seconds", "idle", ".", "white on bright_black", 7),
)
_OVERLAPPED = _Part("communication_overlapped_seconds", "comm.\noverlapped", "", "", 2)
_SHORTEST_BAR = 10  # characters; a narrower console wraps


def anatomy_table(anatomies: dict[str, Anatomy], *, width: int) -> RenderableType:
    """A row and a bar per strategy, in the order given. Print it with `crop=False`, like `comparison_table`.

    On a narrow console the shares go first, then the columns that tell least.
    """
    parts, shares = [*PARTS, _OVERLAPPED], True
    dropped: list[str] = []
    while (table := _build(anatomies, parts, shares=shares)).width > width:
        if shares:
            shares = False
        elif any(part.priority for part in parts):
            victim = min((part for part in parts if part.priority), key=lambda part: part.priority)
            parts.remove(victim)
            dropped.append(victim.title.replace("\n", " "))
        else:
            break
    return Group(_heading(anatomies), table, *_notes(anatomies, dropped), Text(""), _chart(anatomies, width))


def _build(anatomies: dict[str, Anatomy], parts: list[_Part], *, shares: bool) -> Table:
    table = Table(header_style="bold")
    columns: list[tuple[str, Callable[[Anatomy], str]]] = [
        ("step\nms", lambda anatomy: _ms(anatomy.step_seconds)),
        *((part.title, lambda anatomy, part=part: _cell(anatomy, part, shares=shares)) for part in parts),
    ]
    table.add_column("strategy", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for strategy, anatomy in anatomies.items():
        table.add_row(Text(strategy), *(Text(cell(anatomy)) for _, cell in columns))
    return fix_width(table)


def _heading(anatomies: dict[str, Anatomy]) -> Text:
    counts = sorted({anatomy.num_steps for anatomy in anatomies.values()})
    steps = " or ".join(map(str, counts))
    return Text(f"where a step's time goes: ms per step, mean of {steps} profiled steps", style="bold")


def _notes(anatomies: dict[str, Anatomy], dropped: list[str]) -> list[Text]:
    notes = ["profiling slows a step: read the shares here, the rates in the table of timed steps"]
    if _OVERLAPPED.title.replace("\n", " ") not in dropped:
        notes.append("comm. overlapped: communication while compute ran, not part of the sum")
    if any(anatomy.device == "cpu" for anatomy in anatomies.values()):
        notes.append("on a CPU the same cores compute and communicate; idle is Python between torch's ops")
    if dropped:
        notes.append(f"left out for want of width: {', '.join(dropped)}")
    return [Text(note, style="dim") for note in notes]


def _chart(anatomies: dict[str, Anatomy], width: int) -> RenderableType:
    """One stacked bar per strategy, all on one scale, and the legend."""
    longest_seconds = max(anatomy.step_seconds for anatomy in anatomies.values())
    label_width = max(map(len, anatomies))
    number_width = len(f" {_ms(longest_seconds)} ms")
    num_cells = max(_SHORTEST_BAR, width - label_width - 1 - number_width)
    legend = Text("one scale for all bars:")
    for part in PARTS:
        title = part.title.replace("\n", " ").replace("comm.", "communication")
        legend.append(" ").append(f" {part.letter} ", style=part.style).append(f" {title}")
    lines = []
    for strategy, anatomy in anatomies.items():
        line = Text(f"{strategy:<{label_width}} ", no_wrap=True, overflow="ignore")
        seconds = 0.0
        drawn = 0
        for part in PARTS:
            seconds += getattr(anatomy, part.field)
            until = round(seconds / longest_seconds * num_cells)  # of the sum, so that lengths compare
            line.append(part.letter * (until - drawn), style=part.style)
            drawn = until
        lines.append(line.append(f" {_ms(anatomy.step_seconds)} ms"))
    return Group(*lines, legend)


def _cell(anatomy: Anatomy, part: _Part, *, shares: bool) -> str:
    seconds = getattr(anatomy, part.field)
    return f"{_ms(seconds)} {seconds / anatomy.step_seconds:>4.0%}" if shares else _ms(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
