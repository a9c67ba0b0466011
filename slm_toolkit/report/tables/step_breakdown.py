"""Show the time of a step by activity: a table with a row per strategy, and a bar chart below it."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.tables.fitted import (
    Column,
    columns_that_fit,
    left_out_note,
    milliseconds,
    table_of,
)


@dataclass(frozen=True)
class _StepPart:
    """The title, letter and style of one part of a step."""

    field: str
    title: str
    letter: str
    style: str
    drop_order: int


PARTS = (
    _StepPart("matmul_seconds", "matmul", "M", "black on green", 6),
    _StepPart("attention_seconds", "attention", "A", "black on cyan", 5),
    _StepPart("other_compute_seconds", "other\ncompute", "+", "black on bright_green", 3),
    _StepPart("optimizer_seconds", "optimizer", "O", "white on blue", 4),
    _StepPart("communication_exposed_seconds", "comm.\nexposed", "X", "white on red", 0),
    _StepPart("data_seconds", "data", "D", "black on yellow", 1),
    _StepPart("idle_seconds", "idle", ".", "white on bright_black", 7),
)
_OVERLAPPED = _StepPart("communication_overlapped_seconds", "comm.\noverlapped", "", "", 2)
_SHORTEST_BAR = 10  # characters; a narrower console wraps


def anatomy_table(anatomies: dict[str, Anatomy], *, width: int) -> RenderableType:
    """Show a row and a bar per strategy. A narrow console shows no shares, then fewer columns.

    Print it with `crop=False`.
    """
    columns, dropped = columns_that_fit(_columns(anatomies, shares=True), width=width)
    if dropped:
        columns, dropped = columns_that_fit(_columns(anatomies, shares=False), width=width)
    notes = _notes(anatomies, dropped)
    return Group(_heading(anatomies), table_of(columns), *notes, Text(""), _chart(anatomies, width))


def _columns(anatomies: dict[str, Anatomy], *, shares: bool) -> list[Column]:
    steps = [milliseconds(anatomy.step_seconds) for anatomy in anatomies.values()]
    parts = [
        Column(
            part.title,
            [_cell(anatomy, part, shares=shares) for anatomy in anatomies.values()],
            part.drop_order,
        )
        for part in (*PARTS, _OVERLAPPED)
    ]
    return [Column("strategy", list(anatomies), justify="left"), Column("step\nms", steps), *parts]


def _heading(anatomies: dict[str, Anatomy]) -> Text:
    counts = sorted({anatomy.num_steps for anatomy in anatomies.values()})
    steps = " or ".join(map(str, counts))
    return Text(f"where a step's time goes: ms per step, mean of {steps} profiled steps", style="bold")


def _notes(anatomies: dict[str, Anatomy], dropped: list[str]) -> list[Text]:
    notes = ["profiling slows steps down: use these shares, but take rates from the table of timed steps"]
    if _OVERLAPPED.title.replace("\n", " ") not in dropped:
        notes.append("comm. overlapped: communication while compute ran; not part of the sum")
    if any(anatomy.device == "cpu" for anatomy in anatomies.values()):
        notes.append(
            "on a CPU, compute and communication share the cores; idle is Python between torch's ops"
        )
    if dropped:
        notes.append(left_out_note(dropped))
    return [Text(note, style="dim") for note in notes]


def _chart(anatomies: dict[str, Anatomy], width: int) -> RenderableType:
    """Draw one stacked bar per strategy, all on one scale, and the legend."""
    longest_seconds = max(anatomy.step_seconds for anatomy in anatomies.values())
    label_width = max(map(len, anatomies))
    number_width = len(f" {milliseconds(longest_seconds)} ms")
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
            end_cell = round(
                seconds / longest_seconds * num_cells
            )  # rounds the sum, so that total lengths are exact
            line.append(part.letter * (end_cell - drawn), style=part.style)
            drawn = end_cell
        lines.append(line.append(f" {milliseconds(anatomy.step_seconds)} ms"))
    return Group(*lines, legend)


def _cell(anatomy: Anatomy, part: _StepPart, *, shares: bool) -> str:
    seconds = getattr(anatomy, part.field)
    share = f" {seconds / anatomy.step_seconds:>4.0%}" if shares else ""
    return milliseconds(seconds) + share
