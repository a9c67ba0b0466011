"""The prediction ledger: the estimated memory of each recorded run, compared with its observed memory."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.memory.machine import STATE
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.recorded_estimate import estimate_of, offloads
from slm_toolkit.report.tables.fitted import DASH, Column, columns_that_fit, left_out_note, table_of

PEAK_ALLOCATED = "peak_allocated"
PEAK_RESERVED = "peak_reserved"
TRAINING_STATE = "training_state"
REST = "activations_and_temporaries"
COUNTED_STATE = ("parameters", "master_weights", "optimizer")
"""Parts that are compared if live tensors were counted and nothing was traced. Gradients are left out: they
are counted when the optimizer's step begins, but estimated at the peak."""


@dataclass(frozen=True)
class LedgerEntry:
    """A predicted and an observed figure. The field names are the keys of `slm report --errors --json`."""

    model: str
    strategy: str
    world_size: int
    gpu: str | None
    evidence: str
    "of the observation: measured or rehearsed; the prediction is always estimated"
    what: str
    """peak_allocated; peak_reserved; training_state, the sum of the counted parts if no peak is known; a part
    of the state; or activations_and_temporaries, the peak without the state"""
    predicted_bytes: int
    observed_bytes: int
    error: float | None
    "predicted / observed - 1; None if nothing was observed"
    within_range: bool | None
    "whether a peak on a GPU is in the estimate's range from low to high; None for all other figures"
    predicted_instant: str | None
    "instant of the peak; None if the figure is not a peak"
    observed_instant: str | None
    "None if no allocations were traced"
    record: str
    "the record's file"

    @property
    def is_whole(self) -> bool:
        """Return whether summaries use this figure: the allocated peak, else the counted state."""
        return self.what in (PEAK_ALLOCATED, TRAINING_STATE)


@dataclass(frozen=True)
class Summary:
    """The errors of several records, for one kind of evidence."""

    strategy: str | None
    "None: all strategies"
    evidence: str
    what: str
    num_records: int
    median_error: float
    "median of the absolute errors"
    worst: LedgerEntry


def ledger_of(records: list[tuple[Path, RunRecord]]) -> tuple[list[LedgerEntry], list[str]]:
    """Return the entries of all ok records, and a sentence for each record that was left out."""
    entries: list[LedgerEntry] = []
    left_out = []
    for path, record in records:
        if record.status != "ok":
            left_out.append(f"{path}: ended {record.status}")
            continue
        estimate = estimate_of(record)
        if estimate is None:
            left_out.append(f"{path}: this run of {record.strategy} has no estimate")
            continue
        record_entries = _entries(path, record, estimate)
        if not record_entries:
            left_out.append(f"{path}: has no bytes of a GPU, of a trace or of the training state")
        entries += record_entries
    return entries, left_out


def summaries(entries: list[LedgerEntry]) -> list[Summary]:
    """Summarize the errors of each strategy, then of all; measured and rehearsed separately."""
    whole = [entry for entry in entries if entry.is_whole and entry.error is not None]
    kinds = dict.fromkeys((entry.evidence, entry.what) for entry in whole)
    totals = []
    for evidence, what in kinds:
        same_kind = [entry for entry in whole if (entry.evidence, entry.what) == (evidence, what)]
        for strategy in (*dict.fromkeys(entry.strategy for entry in same_kind), None):
            chosen = [entry for entry in same_kind if strategy in (None, entry.strategy)]
            errors = [abs(entry.error) for entry in chosen]
            worst = max(chosen, key=lambda entry: abs(entry.error))
            totals.append(Summary(strategy, evidence, what, len(chosen), median(errors), worst))
    return totals


def _entries(path: Path, record: RunRecord, estimate: Estimate) -> list[LedgerEntry]:
    traced = record.memory_at_peak

    def entry(what: str, predicted: int, observed: int, within_range: bool | None = None) -> LedgerEntry:
        is_peak = what == PEAK_ALLOCATED
        return LedgerEntry(
            model=record.model["name"],
            strategy=record.strategy,
            world_size=record.world_size,
            gpu=record.gpu,
            evidence="rehearsed" if record.is_rehearsal else "measured",
            what=what,
            predicted_bytes=predicted,
            observed_bytes=observed,
            error=_relative_error(predicted, observed),
            within_range=within_range,
            predicted_instant=estimate.peak_instant if is_peak else None,
            observed_instant=_instant(traced) if is_peak and traced else None,
            record=str(path),
        )

    def peak(what: str, observed: int, low: int, predicted: int, high: int) -> LedgerEntry:
        return entry(what, predicted, observed, low <= observed <= high if record.gpu else None)

    entries = []
    if observed := _peak_allocated(record):
        low, high = estimate.peak_allocated_low_bytes, estimate.peak_allocated_high_bytes
        entries.append(peak(PEAK_ALLOCATED, observed, low, estimate.peak_allocated_bytes, high))
    if record.peak_reserved_bytes and (record.gpu or record.is_rehearsal):  # replayed without a GPU
        low, high = estimate.peak_reserved_low_bytes, estimate.peak_reserved_high_bytes
        observed = max(record.peak_reserved_bytes)
        entries.append(peak(PEAK_RESERVED, observed, low, estimate.peak_reserved_bytes, high))
    predicted_parts, observed_parts = _parts(record, estimate)
    if predicted_parts and not entries:
        predicted, observed = sum(predicted_parts.values()), sum(observed_parts.values())
        entries.append(entry(TRAINING_STATE, predicted, observed))
    entries += [
        entry(part, predicted, observed_parts[part])
        for part, predicted in predicted_parts.items()
        if predicted or observed_parts[part]
    ]
    return entries


def _peak_allocated(record: RunRecord) -> int | None:
    """Return the peak of the rank with the most, from the GPU's allocator, else from the trace."""
    if record.gpu and record.peak_allocated_bytes:
        return max(record.peak_allocated_bytes)
    return record.memory_at_peak["num_bytes"] if record.memory_at_peak else None


def _parts(record: RunRecord, estimate: Estimate) -> tuple[dict[str, int], dict[str, int]]:
    """Return predicted and observed bytes of the same parts: at a traced peak, else as counted.

    Returns no parts with offload, because traced and counted bytes include those on the host.
    """
    if offloads(record):
        return {}, {}
    if (traced := record.memory_at_peak) is not None:
        traced_state = {part: traced["parts"].get(part, 0) for part in STATE}
        estimated_state = {part: estimate.parts[part] for part in STATE}
        workspace = estimate.parts["workspace"]  # of the GPU's libraries; traces don't include it
        rest = estimate.peak_allocated_bytes - workspace - sum(estimated_state.values())
        return (
            {**estimated_state, REST: rest},
            {**traced_state, REST: traced["num_bytes"] - sum(traced_state.values())},
        )
    if not record.state_bytes:
        return {}, {}
    counted = max(record.state_bytes, key=lambda parts: sum(parts.values()))
    return (
        {part: estimate.parts[part] for part in COUNTED_STATE},
        {part: counted.get(part, 0) for part in COUNTED_STATE},
    )


def _instant(traced: dict) -> str:
    return f"{traced['phase']}: {traced['module']}" if traced["module"] else traced["phase"]


def _relative_error(predicted: int, observed: int) -> float | None:
    return predicted / observed - 1 if observed else None


_PART_TITLES = {
    "parameters": "para-\nmeters",
    "master_weights": "master\nweights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    REST: "all\nelse",
}
_DROPPED_FIRST = ("observed\npeak at", "estimated\npeak at", *_PART_TITLES.values(), "in\nrange")


def ledger_table(
    entries: list[LedgerEntry], totals: list[Summary], *, named: dict[str, str], width: int
) -> RenderableType:
    """Make the table of errors; `named` has a label for each record. Print it with `crop=False`."""
    lines = _lines(entries, named)
    columns = _columns(lines, (*_constant(lines), *_DROPPED_FIRST))
    columns, dropped = columns_that_fit([column for column in columns if column.has_values], width=width)
    notes = [
        "estimated: by closed forms; error: estimated / observed - 1, in total and by part (if nothing was "
        "observed: the difference in MiB)"
    ]
    if any(entry.within_range is not None for entry in entries):
        notes.append("in range: whether the observed value is between the estimate's low and high")
    if dropped:
        notes.append(left_out_note(dropped))
    return Group(
        Text(
            f"{_same(entries)}estimated against {_evidence(entries)}, GiB on the rank with the most",
            style="bold",
        ),
        table_of(columns),
        *(Text(note, style="dim") for note in notes),
        Text("errors", style="bold"),
        _summary_table(totals, named, width),
    )


def _same(entries: list[LedgerEntry]) -> str:
    """Return the model and number of ranks that all entries share; otherwise the labels contain them."""
    models, sizes = {entry.model for entry in entries}, {entry.world_size for entry in entries}
    words = [*(models if len(models) == 1 else ()), *(f"{n} ranks" for n in sizes if len(sizes) == 1)]
    return f"{', '.join(words)}: " if words else ""


def _evidence(entries: list[LedgerEntry]) -> str:
    """Return the evidence of the observations: measured, rehearsed or both."""
    return " and ".join(sorted({entry.evidence for entry in entries}))


def _lines(entries: list[LedgerEntry], named: dict[str, str]) -> list[dict[str, str]]:
    """Return the cells by title, for each whole figure and each reserved peak; parts are columns."""
    lines = []
    for entry in entries:
        if not entry.is_whole and entry.what != PEAK_RESERVED:
            continue
        parts = {
            other.what: _error(other) for other in entries if entry.is_whole and other.record == entry.record
        }
        lines.append(
            {
                "run": _name(entry, named),
                "evidence": entry.evidence,
                "what": entry.what.replace("_", " "),
                "estimated": f"{entry.predicted_bytes / 2**30:.3f}",
                "observed": f"{entry.observed_bytes / 2**30:.3f}",
                "error": _error(entry),
                "in\nrange": {None: DASH, True: "yes", False: "no"}[entry.within_range],
                **{_PART_TITLES[part]: parts.get(part, DASH) for part in (*STATE, REST)},
                "estimated\npeak at": entry.predicted_instant or DASH,
                "observed\npeak at": entry.observed_instant or DASH,
            }
        )
    return lines


def _columns(lines: list[dict[str, str]], dropped_first: tuple[str, ...]) -> list[Column]:
    """Make a column for each title; a narrow console drops `dropped_first`, in that order."""
    order = {title: place for place, title in enumerate(dict.fromkeys(dropped_first), start=1)}
    return [Column(title, [line[title] for line in lines], order.get(title, 0)) for title in lines[0]]


def _constant(lines: list[dict[str, str]]) -> list[str]:
    """Return which of `evidence` and `what` are the same in all lines; the table's title has them."""
    return [title for title in ("evidence", "what") if len({line[title] for line in lines}) == 1]


def _summary_table(totals: list[Summary], named: dict[str, str], width: int) -> RenderableType:
    lines = [
        {
            "strategy": total.strategy or "all",
            "evidence": total.evidence,
            "what": total.what.replace("_", " "),
            "n": str(total.num_records),
            "median\n|error|": f"{total.median_error:.2%}",
            "worst": _error(total.worst),
            "of": _name(total.worst, named),
        }
        for total in totals
    ]
    columns, _ = columns_that_fit(_columns(lines, ("of", "what", "evidence")), width=width)
    return table_of(columns)


def _name(entry: LedgerEntry, named: dict[str, str]) -> str:
    return named.get(entry.record, f"{entry.strategy} {entry.record}")


def _error(entry: LedgerEntry) -> str:
    if entry.error is None:
        return f"{(entry.predicted_bytes - entry.observed_bytes) / 2**20:+.2f} MiB"
    return "0.00%" if abs(entry.error) < 0.00005 else f"{entry.error:+.2%}"
