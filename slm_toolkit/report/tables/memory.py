"""Where a step's memory peak is, who owns it, and how memory rises and falls: a table and a chart."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.memory_timeline import OF_MODULES, Segment
from slm_toolkit.report.tables.fitted import DASH, Column, table_of


@dataclass(frozen=True)
class _MemoryPart:
    """One part of memory as it is shown."""

    field: str
    title: str
    letter: str
    style: str


PARTS = (
    _MemoryPart("parameters", "parameters", "P", "white on blue"),
    _MemoryPart("master_weights", "master weights", "M", "black on cyan"),
    _MemoryPart("gradients", "gradients", "G", "black on yellow"),
    _MemoryPart("optimizer", "optimizer states", "O", "white on magenta"),
    _MemoryPart("activations", "activations", "A", "black on green"),
    _MemoryPart("logits_and_loss", "logits and loss", "L", "white on red"),
    _MemoryPart("gathered_parameters", "gathered parameters", "W", "black on bright_blue"),
    _MemoryPart("communication", "communication buckets", "C", "black on bright_yellow"),
    _MemoryPart("temporary", "temporary", "t", "white on bright_black"),
)
MOST_ROWS = 30
_SMALLEST_SHARE = 0.005  # of the peak; owners of less are shown together, parts of less in the chart only
_SHORTEST_BAR = 10  # characters; a narrower console wraps
_OWNER_BAR = 24


@dataclass(frozen=True)
class Owner:
    """Who holds a share of what is alive at the peak."""

    name: str
    num_bytes: int
    num_layers: int = 1


@dataclass(frozen=True)
class ChartRow:
    """One row of the chart: a stay in some modules, when most was alive there."""

    phase: str
    place: str
    num_bytes: int
    parts: dict[str, int]
    is_peak: bool


@dataclass(frozen=True)
class MemoryPicture:
    """What is shown of one step's memory."""

    where: str
    num_bytes: int
    parts: dict[str, int]
    owners: tuple[Owner, ...]
    moments: tuple[ChartRow, ...]


def memory_picture(
    at_peak: dict[str, Any], segments: list[Segment], *, most_rows: int = MOST_ROWS
) -> MemoryPicture:
    """What to show of a record's `memory_at_peak` and its timeline, which may be empty."""
    module = at_peak["module"] or ("" if at_peak["phase"] == "optimizer" else "outside the layers")
    return MemoryPicture(
        where=" at ".join(filter(None, (at_peak["phase"], module))),
        num_bytes=at_peak["num_bytes"],
        parts=at_peak["parts"],
        owners=tuple(_owners(at_peak)),
        moments=tuple(_moments(segments, most_rows)),
    )


def memory_chart(title: str, picture: MemoryPicture, *, width: int) -> RenderableType:
    """The peak in words, its owners as a table, the step as bars. Print it with `crop=False`."""
    parts = [
        f"{part.title} {size_text(count)}"
        for part in PARTS
        if (count := picture.parts.get(part.field, 0)) > _SMALLEST_SHARE * picture.num_bytes
    ]
    return Group(
        Text(f"{title}: peak {size_text(picture.num_bytes)} in {picture.where}", style="bold"),
        Text(", ".join(parts)),
        table_of(_owner_columns(picture)),
        *_chart(picture.moments, width),
    )


def _owners(at_peak: dict[str, Any]) -> list[Owner]:
    """The largest first: parts of the engine and the state, then modules, like layers together."""
    titles = {part.field: part.title for part in PARTS}
    found = [Owner(titles[part], count) for part, count in at_peak["parts"].items() if part not in OF_MODULES]
    of_layer: dict[int, int] = {}
    for module, count in at_peak["modules"].items():
        layer = _layer_of(module)
        if layer is None:
            name = "logits and loss" if module == "loss" else module or "outside the layers"
            found.append(Owner(name, count))
        else:
            of_layer[layer] = of_layer.get(layer, 0) + count
    for layers in _alike(of_layer):
        found.append(Owner(_span(layers), sum(of_layer[layer] for layer in layers), len(layers)))
    found.sort(key=lambda owner: -owner.num_bytes)
    large = [owner for owner in found if owner.num_bytes >= _SMALLEST_SHARE * at_peak["num_bytes"]]
    rest = sum(owner.num_bytes for owner in found) - sum(owner.num_bytes for owner in large)
    return [*large, Owner("all others", rest)] if rest else large


def _alike(of_layer: dict[int, int]) -> list[list[int]]:
    """Neighbouring layers that hold the same, to a hundredth."""
    groups: list[list[int]] = []
    for layer in sorted(of_layer):
        last = groups[-1] if groups else None
        if last and layer == last[-1] + 1 and abs(of_layer[layer] / of_layer[last[0]] - 1) < 0.01:
            last.append(layer)
        else:
            groups.append([layer])
    return groups


def _moments(segments: list[Segment], most_rows: int) -> list[ChartRow]:
    """The timeline in at most `most_rows` rows, where that can be: layers together, as few as need be.

    Of several micro-steps the one with the peak is shown (else the last); the others are a row.
    """
    if not segments:
        return []
    peak = max(segments, key=lambda segment: segment.num_bytes)
    numbers = _micro_steps(segments)
    shown = numbers[segments.index(peak)] or max(numbers)
    places = _places(segments)
    num_layers = 1 + max((_layer_of(place) or 0 for place in places), default=0)
    for together in range(1, num_layers + 1):
        rows = [
            _highest(group)
            for _, group in groupby(
                zip(segments, places, numbers, strict=True),
                key=lambda item, together=together: _row_of(*item, shown=shown, together=together),
            )
        ]
        if len(rows) <= most_rows:
            break
    return [
        ChartRow(phase, place, segment.num_bytes, segment.parts, segment is peak)
        for segment, phase, place in (_labelled(row, shown) for row in rows)
    ]


def _micro_steps(segments: list[Segment]) -> list[int]:
    """Of each segment, the number of its micro-step, from 1; 0 outside."""
    numbers, number, last = [], 0, ""
    for segment in segments:
        inside = segment.phase in ("data", "forward", "backward")
        if inside and (number == 0 or (last == "backward" and segment.phase != "backward")):
            number += 1
        numbers.append(number if inside else 0)
        last = segment.phase if inside else last
    return numbers


def _places(segments: list[Segment]) -> list[str]:
    """Of each segment its module; what is between modules belongs to the one before, else to the next."""
    places = [segment.module for segment in segments]
    for index, segment in enumerate(segments):
        before = index > 0 and segments[index - 1].phase == segment.phase
        if not places[index] and before:
            places[index] = places[index - 1]
    for index in range(len(segments) - 2, -1, -1):
        if not places[index] and segments[index + 1].phase == segments[index].phase:
            places[index] = places[index + 1]
    return places


_Item = tuple[Segment, str, int]
"a segment, its place, the number of its micro-step"


def _row_of(segment: Segment, place: str, number: int, *, shown: int, together: int) -> tuple:
    """Neighbouring segments for which this is equal share a row."""
    if number not in (0, shown):
        return ("another micro-step", number < shown)
    if segment.phase in ("between", "data"):
        return ("data",)
    layer = _layer_of(place)
    return segment.phase, place if layer is None else layer // together


def _highest(group: Iterable[_Item]) -> list[_Item]:
    """The group, its highest segment first."""
    return sorted(group, key=lambda item: -item[0].num_bytes)


def _labelled(row: list[_Item], shown: int) -> tuple[Segment, str, str]:
    """A row's highest segment, its phase and its place, in words."""
    segment, place, number = row[0]
    if number not in (0, shown):
        others = sorted({number for _, _, number in row})
        return segment, "micro-step" + "s" * (len(others) > 1), _numbers(others)
    if segment.phase == "between":
        return segment, "data", ""
    layers = sorted({layer for _, place, _ in row if (layer := _layer_of(place)) is not None})
    return segment, segment.phase, _span(layers) if layers else place


def _layer_of(module: str) -> int | None:
    found = re.match(r"layers\.(\d+)", module)
    return int(found[1]) if found else None


def _span(layers: list[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {_numbers(layers)}"


def _numbers(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _owner_columns(picture: MemoryPicture) -> list[Column]:
    owners = picture.owners
    longest = max((owner.num_bytes for owner in owners), default=1)
    return [
        Column("alive at the peak", [owner.name for owner in owners]),
        Column("size", [size_text(owner.num_bytes) for owner in owners]),
        Column("share", [f"{owner.num_bytes / picture.num_bytes:.1%}" for owner in owners]),
        Column(
            "per layer",
            [
                size_text(owner.num_bytes // owner.num_layers) if owner.num_layers > 1 else DASH
                for owner in owners
            ],
        ),
        Column("", ["#" * max(1, round(owner.num_bytes / longest * _OWNER_BAR)) for owner in owners]),
    ]


def _chart(moments: tuple[ChartRow, ...], width: int) -> list[RenderableType]:
    """A stacked bar per moment, all on one scale, and the legend."""
    if not moments:
        return [Text("no timeline beside this record: memory_timeline.csv is gone", style="dim")]
    longest = max(moment.num_bytes for moment in moments)
    phase_width = max(len(moment.phase) for moment in moments)
    place_width = max(len(moment.place) for moment in moments)
    size_width = max(len(size_text(moment.num_bytes)) for moment in moments)
    marks = {True: " <- peak", False: ""}
    num_cells = max(_SHORTEST_BAR, width - phase_width - place_width - size_width - 3 - len(marks[True]))
    lines = []
    for moment in moments:
        line = Text(no_wrap=True, overflow="ignore")
        line.append(f"{moment.phase:<{phase_width}} {moment.place:<{place_width}} ")
        line.append(f"{size_text(moment.num_bytes):>{size_width}} ")
        num_bytes = drawn = 0
        for part in PARTS:
            num_bytes += moment.parts.get(part.field, 0)
            until = round(num_bytes / longest * num_cells)  # of the sum, so that lengths compare
            line.append(part.letter * (until - drawn), style=part.style)
            drawn = max(drawn, until)
        lines.append(line.append(marks[moment.is_peak], style="bold"))
    legend = Text("the step from top to bottom, most alive in each row:")
    for part in PARTS:
        if any(moment.parts.get(part.field, 0) > 0 for moment in moments):
            legend.append(" ").append(f" {part.letter} ", style=part.style).append(f" {part.title}")
    return [*lines, legend]


def size_text(num_bytes: int) -> str:
    """GiB, below one MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
