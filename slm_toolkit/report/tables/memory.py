"""A step's memory: what uses it at the peak, and its course over the step, which the page draws."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.memory_timeline import OF_MODULES, Segment
from slm_toolkit.report.tables.fitted import DASH, Column, table_of

PARTS = {
    "parameters": "parameters",
    "master_weights": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "gathered_parameters": "gathered parameters",
    "communication": "communication buckets",
    "temporary": "temporary",
}
"titles of the parts of a record's `memory_at_peak`"
MOST_ROWS = 30
_SMALLEST_SHARE = 0.005  # of the peak; smaller owners share one row, and smaller parts are not named
_OWNER_BAR = 24


@dataclass(frozen=True)
class Owner:
    """A part or module that uses memory at the peak; layers of similar size are one owner."""

    name: str
    num_bytes: int
    num_layers: int = 1


@dataclass(frozen=True)
class ChartRow:
    """One row of the chart: the highest memory while one module or several modules in a row run."""

    phase: str
    place: str
    num_bytes: int
    parts: dict[str, int]
    is_peak: bool


@dataclass(frozen=True)
class MemoryPicture:
    """The content of the table and the chart of one step's memory."""

    where: str
    num_bytes: int
    parts: dict[str, int]
    owners: tuple[Owner, ...]
    moments: tuple[ChartRow, ...]


def memory_picture(
    at_peak: dict[str, Any], segments: list[Segment], *, most_rows: int = MOST_ROWS
) -> MemoryPicture:
    """Make the picture from a record's `memory_at_peak` and timeline; the timeline may be empty."""
    module = at_peak["module"] or ("" if at_peak["phase"] == "optimizer" else "outside the layers")
    return MemoryPicture(
        where=" at ".join(filter(None, (at_peak["phase"], module))),
        num_bytes=at_peak["num_bytes"],
        parts=at_peak["parts"],
        owners=tuple(_owners(at_peak)),
        moments=tuple(_moments(segments, most_rows)),
    )


def peak_table(title: str, picture: MemoryPicture) -> RenderableType:
    """Show the peak as a sentence, and its owners as a table. Print it with `crop=False`."""
    parts = [
        f"{part_title} {size_text(count)}"
        for part, part_title in PARTS.items()
        if (count := picture.parts.get(part, 0)) > _SMALLEST_SHARE * picture.num_bytes
    ]
    return Group(
        Text(f"{title}: peak {size_text(picture.num_bytes)} in {picture.where}", style="bold"),
        Text(", ".join(parts)),
        table_of(_owner_columns(picture)),
    )


def _owners(at_peak: dict[str, Any]) -> list[Owner]:
    """List the owners, largest first: parts outside of modules, and modules; similar layers are joined."""
    owners = [Owner(PARTS[part], size) for part, size in at_peak["parts"].items() if part not in OF_MODULES]
    bytes_by_layer: dict[int, int] = {}
    for module, count in at_peak["modules"].items():
        layer = _layer_of(module)
        if layer is None:
            name = "logits and loss" if module == "loss" else module or "outside the layers"
            owners.append(Owner(name, count))
        else:
            bytes_by_layer[layer] = bytes_by_layer.get(layer, 0) + count
    for layers in _similar_layers(bytes_by_layer):
        owners.append(Owner(_span(layers), sum(bytes_by_layer[layer] for layer in layers), len(layers)))
    owners.sort(key=lambda owner: -owner.num_bytes)
    large = [owner for owner in owners if owner.num_bytes >= _SMALLEST_SHARE * at_peak["num_bytes"]]
    rest = sum(owner.num_bytes for owner in owners) - sum(owner.num_bytes for owner in large)
    return [*large, Owner("all others", rest)] if rest else large


def _similar_layers(bytes_by_layer: dict[int, int]) -> list[list[int]]:
    """Group neighbouring layers whose bytes differ by less than 1 %."""
    groups: list[list[int]] = []
    for layer in sorted(bytes_by_layer):
        last = groups[-1] if groups else None
        if last and layer == last[-1] + 1 and abs(bytes_by_layer[layer] / bytes_by_layer[last[0]] - 1) < 0.01:
            last.append(layer)
        else:
            groups.append([layer])
    return groups


def _moments(segments: list[Segment], most_rows: int) -> list[ChartRow]:
    """Shorten the timeline to at most `most_rows` rows, if possible, by joining as few layers as necessary.

    Of several micro-steps, only the micro-step with the peak has rows of its own (the last micro-step, if the
    peak is outside of all). All micro-steps before it share one row, and all after it share another.
    """
    if not segments:
        return []
    peak = max(segments, key=lambda segment: segment.num_bytes)
    numbers = _micro_steps(segments)
    shown_step = numbers[segments.index(peak)] or max(numbers)
    places = _places(segments)
    num_layers = 1 + max((_layer_of(place) or 0 for place in places), default=0)
    for together in range(1, num_layers + 1):
        rows = [
            _highest(group)
            for _, group in groupby(
                zip(segments, places, numbers, strict=True),
                key=lambda item, together=together: _row_of(*item, shown_step=shown_step, together=together),
            )
        ]
        if len(rows) <= most_rows:
            break
    return [
        ChartRow(phase, place, segment.num_bytes, segment.parts, segment is peak)
        for segment, phase, place in (_labelled(row, shown_step) for row in rows)
    ]


def _micro_steps(segments: list[Segment]) -> list[int]:
    """Return the number of each segment's micro-step, from 1; 0 outside of micro-steps."""
    numbers, number, last = [], 0, ""
    for segment in segments:
        inside = segment.phase in ("data", "forward", "backward")
        if inside and (number == 0 or (last == "backward" and segment.phase != "backward")):
            number += 1
        numbers.append(number if inside else 0)
        last = segment.phase if inside else last
    return numbers


def _places(segments: list[Segment]) -> list[str]:
    """Return each segment's module; a segment between modules gets the previous module, else the next."""
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


def _row_of(segment: Segment, place: str, number: int, *, shown_step: int, together: int) -> tuple:
    """Return a key; neighbouring segments with equal keys share a row."""
    if number not in (0, shown_step):
        return ("another micro-step", number < shown_step)
    if segment.phase in ("between", "data"):
        return ("data",)
    layer = _layer_of(place)
    return segment.phase, place if layer is None else layer // together


def _highest(group: Iterable[_Item]) -> list[_Item]:
    """Sort the segments of a group, the one with the most memory first."""
    return sorted(group, key=lambda item: -item[0].num_bytes)


def _labelled(row: list[_Item], shown_step: int) -> tuple[Segment, str, str]:
    """Return a row's highest segment, and its phase and place in words."""
    segment, place, number = row[0]
    if number not in (0, shown_step):
        others = sorted({number for _, _, number in row})
        return segment, "micro-step" + "s" * (len(others) > 1), _numbers(others)
    if segment.phase == "between":
        return segment, "data", ""
    layers = sorted({layer for _, place, _ in row if (layer := _layer_of(place)) is not None})
    return segment, segment.phase, _span(layers) if layers else place


def _layer_of(module: str) -> int | None:
    match = re.match(r"layers\.(\d+)", module)
    return int(match[1]) if match else None


def _span(layers: list[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {_numbers(layers)}"


def _numbers(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _owner_columns(picture: MemoryPicture) -> list[Column]:
    owners = picture.owners
    longest = max((owner.num_bytes for owner in owners), default=1)
    return [
        Column("in use at the peak", [owner.name for owner in owners]),
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


def size_text(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
