"""Pictures of memory: parts by kind of evidence, a step from begin to end, the errors of predictions."""

from dataclasses import dataclass
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
    places_layout,
    strategy_colour,
    strategy_symbol,
)
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.ledger import COUNTED_STATE, LedgerEntry
from slm_toolkit.report.tables.memory import PARTS, MemoryPicture, size_text

UNTOLD = "not told apart"
DEEPSPEED = "model states, says DeepSpeed"
_TITLES = {part.field: part.title for part in PARTS} | {"workspace": "workspace of libraries"}
_COLOURS = {name: colour(number) for number, name in enumerate((*TRACED_PARTS, "workspace"))} | {
    UNTOLD: "#8a94a6",
    DEEPSPEED: "#b6a27c",
}
_CHANGES_NO_MEMORY = {  # flags in which a rehearsal and the run that it stands for may differ
    *("rehearse", "trace_memory", "profile", "max_steps", "timing_warmup_steps", "seed", "learning_rate"),
    *("save_steps", "eval_steps", "eval_batches", "dataset", "warmup_steps"),
}
_LIMIT_IN_SIGHT = 0.1
"of a GPU's memory: where the longest bar is shorter, the limit would make all bars stubs"
_MOST_PHASES_NAMED = 12
"below the timeline; names of shorter phases would lie on each other"


@dataclass(frozen=True)
class _Stack:
    """One bar: bytes by part, of one kind of evidence."""

    evidence: str
    parts: dict[str, int]


def parts_panel(rows: dict[str, Row], estimates: dict[str, Estimate]) -> Panel:
    """Estimate, rehearsal, measurement and DeepSpeed's word of the same configuration under each other."""
    name, title = "memory", "Memory by part"
    groups: dict[tuple, list[str]] = {}
    of_rehearsals: dict[tuple, list[str]] = {}
    for label, row in rows.items():
        asked = tuple(sorted((k, str(v)) for k, v in row.asked.items() if k not in _CHANGES_NO_MEMORY))
        key = (row.strategy, row.world_size, asked)
        if row.is_rehearsed and row.gpu is None:  # it stands for the run on any GPU
            of_rehearsals.setdefault(key, []).append(label)
        else:
            groups.setdefault((*key, row.gpu), []).append(label)
    for key, labels in of_rehearsals.items():
        for labels_on_gpu in [found for group, found in groups.items() if group[:-1] == key] or [
            groups.setdefault((*key, None), [])
        ]:
            labels_on_gpu += labels
    bars: list[Bar] = []
    stacks: dict[str, _Stack] = {}
    for number, labels in enumerate(groups.values()):
        found = _stacks({label: rows[label] for label in labels}, estimates)
        if found:
            bars.append(Bar(f"{number} heading", f"<b>{escaped(labels[0])}</b>", is_heading=True))
        for stack in found:
            key = f"{number} {stack.evidence}"
            bars.append(Bar(key, f"{stack.evidence} {size_text(sum(stack.parts.values()))}"))
            stacks[key] = stack
    if not bars:
        return Panel(name, title, missing="no record holds bytes of a GPU, of a trace or of the state")
    data = []
    for part, part_colour in _COLOURS.items():
        held = {key: stack for key, stack in stacks.items() if stack.parts.get(part)}
        if held:
            part_title = _TITLES.get(part, part)
            data.append(
                {
                    **{"type": "bar", "orientation": "h", "name": part_title, "hoverinfo": "text"},
                    "x": [_rounded_gib(stack.parts[part]) for stack in held.values()],
                    "y": list(held),
                    "marker": {"color": part_colour},
                    "hovertext": [
                        f"{stack.evidence}, {part_title}: {size_text(stack.parts[part])}"
                        for stack in held.values()
                    ],
                }
            )
    layout = bars_layout(bars, x_title="GiB on the rank that holds most", legend=True)
    longest_bytes = max(sum(stack.parts.values()) for stack in stacks.values())
    lines, notes = _limits(rows, bars, longest_bytes)
    if len(lines) < len(notes):
        notes.append("a line marks that memory where bars come near it")
    if any("state alone" in stack.evidence for stack in stacks.values()):
        notes.append("state alone: nobody traced or asked a GPU, tensors of the state were counted")
    return Panel(name, title, (Figure(name, title, [*data, *lines], layout),), tuple(notes))


def timeline_panel(rows: dict[str, Row], pictures: dict[str, MemoryPicture]) -> Panel:
    """What is alive while a step goes through its modules, one figure per run that was traced."""
    name, title = "timeline", "Memory over a step"
    shown = {label: picture for label, picture in pictures.items() if picture.moments}
    if not shown:
        return Panel(name, title, missing="no memory_timeline.csv: --trace_memory or --rehearse writes one")
    figures = tuple(
        _timeline(f"{name}-{number}", label, picture)
        for number, (label, picture) in enumerate(shown.items(), start=1)
    )
    return Panel(name, title, figures, ("of rank 0; a place is shown when most is alive in it",))


def errors_panel(rows: dict[str, Row], entries: list[LedgerEntry]) -> Panel:
    """How far predictions are from what was observed, of bytes and of rates."""
    name, title = "errors", "Errors of the predictions"
    labels = {row.record: label for label, row in rows.items()}
    found = [
        (labels[entry.record], f"{entry.what.replace('_', ' ')}, {entry.evidence}", entry.error)
        for entry in entries
        if entry.error is not None and entry.record in labels
    ]
    found += [
        (label, "tokens/s, measured", row.estimated_tokens_per_second / row.tokens_per_second - 1)
        for label, row in rows.items()
        if row.estimated_tokens_per_second and row.tokens_per_second
    ]
    if not found:
        return Panel(name, title, missing="no record can be held against an estimate")
    found.sort(key=lambda item: rows[item[0]].strategy)
    others = [row.strategy for row in rows.values()]
    data: list[dict[str, Any]] = []
    for strategy, group in groupby(found, key=lambda item: rows[item[0]].strategy):
        points = list(group)
        data.append(
            {
                **{"type": "scatter", "mode": "markers", "name": escaped(strategy), "hoverinfo": "text"},
                "x": [float(f"{error:.4g}") for _, _, error in points],
                "y": [what for _, what, _ in points],
                "hovertext": [f"{escaped(label)}<br>{what}: {error:+.2%}" for label, what, error in points],
                "marker": {
                    "color": strategy_colour(strategy, others),
                    "symbol": strategy_symbol(strategy, others),
                    "size": 10,
                    "opacity": 0.75,
                },
            }
        )
    bars = [Bar(what, what) for what in dict.fromkeys(what for _, what, _ in found)]
    layout = places_layout(bars, x_title="predicted / observed - 1", legend=True)
    farthest = max(0.001, *(abs(error) for _, _, error in found)) * 1.15
    layout["xaxis"] |= {"tickformat": "+.2~%", "range": [-farthest, farthest], "zerolinewidth": 2}
    return Panel(name, title, (Figure(name, title, data, layout),))


def _stacks(rows: dict[str, Row], estimates: dict[str, Estimate]) -> list[_Stack]:
    """Of rows of one configuration: each evidence once, the first that has it."""
    found: dict[str, _Stack] = {}
    observed = {label: stack for label, row in rows.items() if (stack := _observed(row)) is not None}
    for label, stack in observed.items():
        if (made := estimates.get(label)) is not None:
            whole = {part: made.parts.get(part, 0) for part in _COLOURS}
            if "state alone" in stack.evidence:
                alone = {part: whole[part] for part in COUNTED_STATE}
                found.setdefault("estimated", _Stack("estimated, state alone", alone))
            elif "estimated" not in found or "state alone" in found["estimated"].evidence:
                found["estimated"] = _Stack("estimated", whole)
    for evidence in ("rehearsed", "measured"):
        for label, stack in observed.items():
            if rows[label].evidence == evidence:
                found.setdefault(evidence, stack)
    for row in rows.values():
        if row.deepspeed_bytes and row.status == "ok":
            said = _Stack("DeepSpeed's estimate", {DEEPSPEED: row.deepspeed_bytes})
            found.setdefault("deepspeed", said)
    return list(found.values())


def _observed(row: Row) -> _Stack | None:
    """By part where allocations were followed; else the counted state, and what the peak has beside it."""
    if row.status != "ok":
        return None
    if row.memory_at_peak is not None:
        return _Stack(row.evidence, row.memory_at_peak["parts"])
    state = row.state_bytes_per_rank or {}
    if peak := row.peak_allocated_bytes:
        rest = peak - sum(state.values())
        if rest < 0:  # part of the state was gone, or on the host, at the peak
            return _Stack(row.evidence, {UNTOLD: peak})
        return _Stack(row.evidence, {**{part: state.get(part, 0) for part in STATE}, UNTOLD: rest})
    if not state:
        return None
    return _Stack(f"{row.evidence}, state alone", {part: state.get(part, 0) for part in COUNTED_STATE})


def _limits(rows: dict[str, Row], bars: list[Bar], longest_bytes: int) -> tuple[list[dict], list[str]]:
    """A line at each GPU's memory, where bars come near it; and what they all have, in words."""
    gpus = {gpu.name: gpu for row in rows.values() if (gpu := find_gpu(row.gpu))}
    notes = [f"a {gpu.name} has {size_text(gpu.memory_bytes)}" for gpu in gpus.values()]
    lines = [
        {
            **{"type": "scatter", "mode": "lines+markers", "name": f"memory of a {gpu.name}"},
            "x": [_rounded_gib(gpu.memory_bytes)] * len(bars),
            "y": [bar.key for bar in bars],
            "line": {"color": "#d62728", "width": 2, "dash": "dash"},
            "marker": {"symbol": "line-ns-open", "size": 30, "color": "#d62728"},
            "hovertemplate": f"memory of a {gpu.name}: {size_text(gpu.memory_bytes)}<extra></extra>",
        }
        for gpu in gpus.values()
        if longest_bytes >= _LIMIT_IN_SIGHT * gpu.memory_bytes
    ]
    return lines, notes


def _timeline(name: str, label: str, picture: MemoryPicture) -> Figure:
    moments = picture.moments
    at = list(range(len(moments)))
    places = [escaped(f"{moment.phase} {moment.place}".strip()) for moment in moments]
    data = [
        {
            **{"type": "scatter", "mode": "lines", "stackgroup": "alive", "name": _TITLES[part], "x": at},
            "y": [_rounded_gib(moment.parts.get(part, 0)) for moment in moments],
            "line": {"width": 0.5, "color": _COLOURS[part], "shape": "hvh"},
            "fillcolor": _COLOURS[part],
            "text": places,
            "hovertemplate": "%{text}<br>%{fullData.name}: %{y} GiB<extra></extra>",
        }
        for part in TRACED_PARTS
        if any(moment.parts.get(part, 0) > 0 for moment in moments)
    ]
    layout = curves_layout(x_title="", y_title="GiB alive", num_keys=2)
    phases = [list(group) for _, group in groupby(at, key=lambda index: moments[index].phase)]
    wide = [phase for phase in phases if len(phase) * _MOST_PHASES_NAMED >= len(at)]
    layout["xaxis"] |= {
        "tickvals": [phase[0] for phase in wide],
        "ticktext": [moments[phase[0]].phase for phase in wide],
        "tickangle": 0,
    }
    peak = next(index for index, moment in enumerate(moments) if moment.is_peak)
    layout["annotations"] = [
        {"x": peak, "y": moments[peak].num_bytes / 2**30, "text": f"peak {size_text(picture.num_bytes)}"}
        | {"showarrow": True, "arrowhead": 2, "ax": 0, "ay": -28}
    ]
    layout["margin"]["t"] = 36
    return Figure(name, label, data, layout)


def _rounded_gib(num_bytes: int) -> float:
    return float(f"{num_bytes / 2**30:.4g}")
