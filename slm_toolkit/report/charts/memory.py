"""Draw memory by part and by evidence, and memory over a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.memory.machine import STATE
from slm_toolkit.record.memory_timeline import PARTS as TRACED_PARTS
from slm_toolkit.report.charts.figures import (
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
from slm_toolkit.report.tables.memory import PARTS, ChartRow, MemoryPicture, size_text
from slm_toolkit.report.verdict import PROBLEMS

_COUNTED_STATE = ("parameters", "master_weights", "optimizer")
"""The parts to show if live tensors were counted and nothing was traced. Gradients are left out: they are
counted when the optimizer's step begins, but estimated at the peak."""
UNSPLIT = "not split by part"
DEEPSPEED = "model states, by DeepSpeed"
_TITLES = PARTS | {"workspace": "workspace of libraries"}
_COLOURS = {name: colour(number) for number, name in enumerate((*TRACED_PARTS, "workspace"))} | {
    UNSPLIT: "#8a94a6",
    DEEPSPEED: "#b6a27c",
}
_CHANGES_NO_MEMORY = {  # flags that may differ between a rehearsal and the run that it stands for
    *("rehearse", "profile", "max_steps", "seed", "learning_rate"),
    *("save_steps", "eval_steps", "eval_batches", "dataset", "warmup_steps"),
    *("lr_scheduler_type", "max_tokens"),
}
_SMALLEST_SHARE_OF_LIMIT = 0.1
"show a GPU's memory only if the longest bar reaches this share of it; else all bars would be too short"
_NARROWEST_PHASE = 0.15
"width of a phase of few moments, as a share of the moments' width: its name fits below it, also on a phone"


@dataclass(frozen=True)
class _Unit:
    """The unit of all sizes in one figure, so that numbers next to bars match the axis."""

    name: str
    num_bytes: int

    def of(self, size_bytes: int) -> float:
        return rounded(size_bytes / self.num_bytes)

    def text(self, size_bytes: int) -> str:
        return f"{size_bytes / self.num_bytes:,.{2 if self.name == 'GiB' else 1}f} {self.name}"


def _unit(longest_bytes: int) -> _Unit:
    return _Unit("GiB", 2**30) if longest_bytes >= 2**30 else _Unit("MiB", 2**20)


@dataclass(frozen=True)
class _Stack:
    """One bar: bytes by part, from one kind of evidence."""

    label: str
    "of the row with this evidence"
    evidence: str
    parts: dict[str, int]


def parts_panel(rows: dict[str, Row], estimates: dict[str, Estimate]) -> Panel:
    """Show estimate, rehearsal, measurement and DeepSpeed's estimate of each configuration as bars."""
    name, title = "memory", "Memory by part"
    bars: list[Bar] = []
    stacks: dict[str, _Stack] = {}
    for number, labels in enumerate(_configurations(rows)):
        group_stacks = _stacks({label: rows[label] for label in labels}, estimates)
        if group_stacks:
            bars.append(Bar(f"{number} heading", f"<b>{escaped(labels[0])}</b>", is_heading=True))
        for stack in group_stacks:
            key = f"{number} {stack.evidence}"
            bars.append(Bar(key, stack.evidence))
            stacks[key] = stack
    if not bars:
        return Panel(
            name,
            title,
            missing="no record has a GPU's memory, a memory trace or the bytes of the training state",
        )
    longest_bytes = max(sum(stack.parts.values()) for stack in stacks.values())
    unit = _unit(longest_bytes)
    bars = [
        replace(bar, title=f"{bar.title} {unit.text(sum(stacks[bar.key].parts.values()))}")
        if bar.key in stacks
        else bar
        for bar in bars
    ]
    layout = bars_layout(bars, x_title=f"{unit.name} on the rank with the most", legend=True)
    lines, notes = _limits(rows, bars, longest_bytes, unit)
    if len(lines) < len(notes):
        notes.append("a line marks a GPU's memory if bars come near it")
    if any("state only" in stack.evidence for stack in stacks.values()):
        notes.append(
            "state only: no GPU peak and no trace, so these bars lack gradients, which the table's state has"
        )
    drawn = {stack.label for stack in stacks.values()}
    notes += left_out(rows, drawn, _why_no_bytes)
    return Panel(name, title, (Figure(name, title, [*_traces(stacks, unit), *lines], layout),), tuple(notes))


def _configurations(rows: dict[str, Row]) -> list[list[str]]:
    """Return the labels of each configuration: its measured runs, and the rehearsals that stand for them."""
    groups: dict[tuple, list[str]] = {}
    rehearsals: dict[tuple, list[str]] = {}
    for label, row in rows.items():
        flags = tuple(sorted((k, str(v)) for k, v in row.asked.items() if k not in _CHANGES_NO_MEMORY))
        key = (row.strategy, row.world_size, flags)
        if row.is_rehearsed and row.gpu is None:  # one rehearsal stands for the same run on any GPU
            rehearsals.setdefault(key, []).append(label)
        else:
            groups.setdefault((*key, row.gpu), []).append(label)
    for key, labels in rehearsals.items():
        same = [labels_on_gpu for group, labels_on_gpu in groups.items() if group[:-1] == key]
        for group_labels in same or [groups.setdefault((*key, None), [])]:
            group_labels += labels
    return list(groups.values())


def _traces(stacks: dict[str, _Stack], unit: _Unit) -> list[dict[str, Any]]:
    """Return the bars of each part, at the places that are the keys of `stacks`."""
    data = []
    for part, part_colour in _COLOURS.items():
        with_part = {key: stack for key, stack in stacks.items() if stack.parts.get(part)}
        if not with_part:
            continue
        part_title = _TITLES.get(part, part)
        hovers = [
            f"{stack.evidence}, {part_title}: {unit.text(stack.parts[part])}" for stack in with_part.values()
        ]
        data.append(
            {
                **{"type": "bar", "orientation": "h", "name": part_title, "hoverinfo": "text"},
                "x": [unit.of(stack.parts[part]) for stack in with_part.values()],
                "y": list(with_part),
                "customdata": [stack.label for stack in with_part.values()],
                "marker": {"color": part_colour},
                "hovertext": hovers,
            }
        )
    return data


def _why_no_bytes(row: Row) -> str:
    if row.status != "ok":
        return PROBLEMS[row.status]
    if _observed("", row) is None:
        return "no GPU's memory, no trace and no bytes of the training state were recorded"
    return "a run of the same configuration is drawn"


def timeline_panel(rows: dict[str, Row], pictures: dict[str, MemoryPicture]) -> Panel:
    """Show the memory in use while a step runs through its modules, in one figure per traced run."""
    name, title = "timeline", "Memory over a step"
    with_timeline = {label: picture for label, picture in pictures.items() if picture.moments}
    if not with_timeline:
        return Panel(name, title, missing="no memory_timeline.csv: --profile memory or --rehearse writes one")
    figures = tuple(
        _timeline(f"{name}-{number}", label, picture)
        for number, (label, picture) in enumerate(with_timeline.items(), start=1)
    )
    return Panel(name, title, figures, ("rank 0; each place shows its highest memory",))


def _stacks(rows: dict[str, Row], estimates: dict[str, Estimate]) -> list[_Stack]:
    """Return one bar per kind of evidence, from the first of a configuration's rows that has the evidence."""
    stacks: dict[str, _Stack] = {}
    observed = {label: stack for label, row in rows.items() if (stack := _observed(label, row)) is not None}
    for label, stack in observed.items():
        if (estimate := estimates.get(label)) is not None:
            parts = {part: estimate.parts.get(part, 0) for part in _COLOURS}
            if "state only" in stack.evidence:
                state = {part: parts[part] for part in _COUNTED_STATE}
                stacks.setdefault("estimated", _Stack(label, "estimated, state only", state))
            elif "estimated" not in stacks or "state only" in stacks["estimated"].evidence:
                stacks["estimated"] = _Stack(label, "estimated", parts)
    for evidence in ("rehearsed", "measured"):
        for label, stack in observed.items():
            if rows[label].evidence == evidence:
                stacks.setdefault(evidence, stack)
    for label, row in rows.items():
        if row.deepspeed_bytes and row.status == "ok":
            deepspeed_stack = _Stack(label, "DeepSpeed's estimate", {DEEPSPEED: row.deepspeed_bytes})
            stacks.setdefault("deepspeed", deepspeed_stack)
    return list(stacks.values())


def _observed(label: str, row: Row) -> _Stack | None:
    """Return the observed bytes by part; without a trace, the counted state and the rest of the peak."""
    if row.status != "ok":
        return None
    if row.memory_at_peak is not None:
        return _Stack(label, row.evidence, row.memory_at_peak["parts"])
    state = row.state_bytes_per_rank or {}
    if peak := row.peak_allocated_bytes:
        rest = peak - sum(state.values())
        if rest < 0:  # at the peak, part of the state was freed or on the host
            return _Stack(label, row.evidence, {UNSPLIT: peak})
        return _Stack(label, row.evidence, {**{part: state.get(part, 0) for part in STATE}, UNSPLIT: rest})
    if not state:
        return None
    return _Stack(label, f"{row.evidence}, state only", {part: state.get(part, 0) for part in _COUNTED_STATE})


def _limits(
    rows: dict[str, Row], bars: list[Bar], longest_bytes: int, unit: _Unit
) -> tuple[list[dict], list[str]]:
    """Return a note for each GPU type's memory, and a line for each that bars come near."""
    gpus = {gpu.name: gpu for row in rows.values() if (gpu := find_gpu(row.gpu))}
    notes = [f"a {gpu.name} has {size_text(gpu.memory_bytes)}" for gpu in gpus.values()]
    lines = [
        {
            **{"type": "scatter", "mode": "lines+markers", "name": f"memory of a {gpu.name}"},
            "x": [unit.of(gpu.memory_bytes)] * len(bars),
            "y": [bar.key for bar in bars],
            "line": {"color": "#d62728", "width": 2, "dash": "dash"},
            "marker": {"symbol": "line-ns-open", "size": 30, "color": "#d62728"},
            "hovertemplate": f"memory of a {gpu.name}: {size_text(gpu.memory_bytes)}<extra></extra>",
        }
        for gpu in gpus.values()
        if longest_bytes >= _SMALLEST_SHARE_OF_LIMIT * gpu.memory_bytes
    ]
    return lines, notes


def _timeline(name: str, label: str, picture: MemoryPicture) -> Figure:
    moments = picture.moments
    unit = _unit(picture.num_bytes)
    edges = _edges(moments)
    shown = [*moments, moments[-1]]  # the last moment lasts until the last edge
    data = [
        {
            **{"type": "scatter", "mode": "lines", "stackgroup": "alive", "name": _TITLES[part], "x": edges},
            "y": [unit.of(moment.parts.get(part, 0)) for moment in shown],
            "line": {"width": 0.5, "color": _COLOURS[part], "shape": "hv"},
            "fillcolor": _COLOURS[part],
            "text": [escaped(f"{moment.phase} {moment.place}".strip()) for moment in shown],
            "hovertemplate": "%{text}<br>%{fullData.name}: %{y} " + unit.name + "<extra></extra>",
        }
        for part in TRACED_PARTS
        if any(moment.parts.get(part, 0) > 0 for moment in moments)
    ]
    layout = curves_layout(x_title="", y_title=f"{unit.name} in use", num_keys=2)
    starts = [index for index, moment in enumerate(moments) if index == 0 or _starts(moments, index)]
    layout["xaxis"] |= {
        "tickvals": [edges[index] for index in starts],
        "ticktext": [moments[index].phase for index in starts],
        **{"tickangle": 0, "ticklabelposition": "outside right", "range": [0, edges[-1]]},
    }
    peak = next(index for index, moment in enumerate(moments) if moment.is_peak)
    layout["annotations"] = [
        {"x": (edges[peak] + edges[peak + 1]) / 2, "y": unit.of(moments[peak].num_bytes)}
        | {"text": f"peak {unit.text(picture.num_bytes)}"}
        | {"showarrow": True, "arrowhead": 2, "ax": 0, "ay": -28}
    ]
    layout["margin"]["t"] = 36
    return Figure(name, label, data, layout)


def _starts(moments: Sequence[ChartRow], index: int) -> bool:
    return moments[index].phase != moments[index - 1].phase


def _edges(moments: Sequence[ChartRow]) -> list[float]:
    """Return where each moment begins on the axis, and where the last one ends.

    A phase gets at least _NARROWEST_PHASE of the others' width: the optimizer's step is one moment, but may
    have the step's peak.
    """
    phases = [len(list(group)) for _, group in groupby(moments, key=lambda moment: moment.phase)]
    narrowest = _NARROWEST_PHASE * len(moments)
    edges = [0.0]
    for count in phases:
        width = max(count, narrowest) / count
        edges += [round(edges[-1] + width * number, 3) for number in range(1, count + 1)]
    return edges
