"""Draw the peak memory of each row by part, and the memory over a step."""

from itertools import groupby
from typing import Any

from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.record.memory_timeline import PARTS as TRACED_PARTS
from slm_toolkit.record.memory_timeline import Segment
from slm_toolkit.report.charts.figures import (
    MOST_POINTS,
    Bar,
    Figure,
    Panel,
    bars_layout,
    colour,
    curves_layout,
    escaped,
    left_out,
    rounded,
)
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.memory import PARTS, size_text
from slm_toolkit.report.verdict import PROBLEMS

_UNSPLIT = "not split by part"
_TITLES = PARTS | {"workspace": "workspace of libraries", _UNSPLIT: _UNSPLIT}
_COLOURS = {part: colour(number) for number, part in enumerate(_TITLES)} | {_UNSPLIT: "#5b6475"}


def parts_panel(rows: dict[str, Row], estimates: dict[str, Estimate]) -> Panel:
    """Show the peak of each row, observed and estimated, as bars of its parts."""
    name, title = "memory", "Memory by part"
    bars: list[Bar] = []
    stacks: dict[str, tuple[str, dict[str, int]]] = {}  # by bar: the row's label, and bytes by part
    drawn = {label: parts for label, row in rows.items() if (parts := _observed(row))}
    for label, observed in drawn.items():
        bars.append(Bar(f"{label} heading", f"<b>{escaped(label)}</b>", is_heading=True))
        by_evidence = {_evidence(rows[label]): observed}
        if label in estimates:
            of_estimate = estimates[label].parts
            by_evidence["estimated"] = {part: of_estimate.get(part, 0) for part in _TITLES}
        for evidence, parts in by_evidence.items():
            key = f"{label} {evidence}"
            bars.append(Bar(key, f"{evidence} {size_text(sum(parts.values()))}"))
            stacks[key] = label, parts
    notes = left_out(rows, drawn, lambda row: PROBLEMS.get(row.status, "no memory was recorded"))
    if not bars:
        return Panel(name, title, missing="; ".join(notes))
    layout = bars_layout(bars, x_title="GiB on the rank with the most", legend=True)
    return Panel(name, title, (Figure(name, title, _traces(stacks), layout),), tuple(notes))


def _observed(row: Row) -> dict[str, int]:
    """Return the bytes by part: those of a trace, else the state and the rest of the peak; may be empty."""
    if row.status != "ok":
        return {}
    if row.memory_at_peak is not None:
        return row.memory_at_peak["parts"]
    state, peak = row.state_bytes_per_rank or {}, row.peak_allocated_bytes
    if not peak:
        return state
    rest = peak - sum(state.values())  # below 0: at the peak, part of the state was freed or on the host
    return {**state, _UNSPLIT: rest} if rest >= 0 else {_UNSPLIT: peak}


def _evidence(row: Row) -> str:
    has_peak = row.memory_at_peak or row.peak_allocated_bytes
    return row.evidence if has_peak else f"{row.evidence}, training state only"


def _traces(stacks: dict[str, tuple[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """Return the bars of each part, at the places that are the keys of `stacks`."""
    return [
        {
            **{"type": "bar", "orientation": "h", "name": _TITLES[part], "hoverinfo": "text"},
            "x": [_gib(parts.get(part, 0)) for _, parts in stacks.values()],
            "y": list(stacks),
            "customdata": [label for label, _ in stacks.values()],
            "marker": {"color": part_colour},
            "hovertext": [
                f"{_TITLES[part]}: {size_text(parts.get(part, 0))}" for _, parts in stacks.values()
            ],
        }
        for part, part_colour in _COLOURS.items()
        if any(parts.get(part) for _, parts in stacks.values())
    ]


def timeline_panel(timelines: dict[str, list[Segment]]) -> Panel:
    """Show the memory in use while a step runs through its modules, in one figure per traced run."""
    name, title = "timeline", "Memory over a step"
    if not timelines:
        return Panel(name, title, missing="no memory_timeline.csv: --profile memory or --rehearse writes one")
    figures = tuple(
        _timeline(f"{name}-{number}", label, segments)
        for number, (label, segments) in enumerate(timelines.items(), start=1)
    )
    return Panel(name, title, figures, ("rank 0; each place shows its highest memory",))


def _timeline(name: str, label: str, segments: list[Segment]) -> Figure:
    moments: list[Segment] = []
    starts: dict[int, str] = {}  # of the phases to name: those between are short
    for phase, group in groupby(segments, key=lambda segment: segment.phase):
        if phase not in ("between", "data"):
            starts[len(moments)] = phase
        moments += _thinned(list(group), every=1 + len(segments) // MOST_POINTS)
    data = [
        {
            **{"type": "scatter", "mode": "lines", "stackgroup": "alive", "name": PARTS[part]},
            "y": [_gib(moment.parts.get(part, 0)) for moment in moments],
            "line": {"width": 0.5, "color": _COLOURS[part], "shape": "hvh"},
            "fillcolor": _COLOURS[part],
            "text": [escaped(f"{moment.phase} {moment.module}") for moment in moments],
            "hovertemplate": "%{text}<br>%{fullData.name}: %{y} GiB<extra></extra>",
        }
        for part in TRACED_PARTS
        if any(moment.parts.get(part) for moment in moments)
    ]
    layout = curves_layout(x_title="", y_title="GiB in use", num_keys=2)
    layout["xaxis"] |= {"tickvals": list(starts), "ticktext": list(starts.values())}
    layout["xaxis"]["ticklabelposition"] = "outside right"
    at, peak = max(enumerate(moments), key=lambda moment: moment[1].num_bytes)
    text = f"peak {size_text(peak.num_bytes)}"
    layout["annotations"] = [{"x": at, "y": _gib(peak.num_bytes), "text": text, "ax": 0, "ay": -28}]
    layout["margin"]["t"] = 36
    return Figure(name, label, data, layout)


def _thinned(segments: list[Segment], *, every: int) -> list[Segment]:
    """Return the highest of every so many segments."""
    groups = (segments[start : start + every] for start in range(0, len(segments), every))
    return [max(group, key=lambda segment: segment.num_bytes) for group in groups]


def _gib(num_bytes: int) -> float | None:
    return rounded(num_bytes / 2**30)
