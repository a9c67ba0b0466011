"""The prediction ledger: what estimates say of each recorded run, held against what it was seen to take."""

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
"""compared where live tensors were counted and nothing was traced; gradients are not: counted as the
optimizer's step begins, estimated as of the peak"""


@dataclass(frozen=True)
class LedgerEntry:
    """One predicted figure and what was observed. The names are the keys of `slm report --errors --json`."""

    model: str
    strategy: str
    world_size: int
    gpu: str | None
    evidence: str
    "of what was observed, measured or rehearsed; the prediction is always estimated"
    what: str
    """peak_allocated; peak_reserved; training_state, the sum of the counted parts where no peak is known; a
    part of the state; or activations_and_temporaries, all of a peak beside the state"""
    predicted_bytes: int
    observed_bytes: int
    error: float | None
    "predicted / observed - 1; None where something was predicted and nothing observed"
    within_range: bool | None
    "of peaks on a GPU, whether the estimate's low to high holds it; None of all else"
    predicted_instant: str | None
    "of the peak, and None where none is compared"
    observed_instant: str | None
    "None where no allocations were followed"
    record: str
    "its file"

    @property
    def is_whole(self) -> bool:
        """Whether this stands for its record in a summary: its allocated peak, else its counted state."""
        return self.what in (PEAK_ALLOCATED, TRAINING_STATE)


@dataclass(frozen=True)
class Summary:
    """The errors of several records' whole figures, of one kind of evidence."""

    strategy: str | None
    "None: of all"
    evidence: str
    what: str
    num_records: int
    median_error: float
    "of absolute values"
    worst: LedgerEntry


def ledger_of(records: list[tuple[Path, RunRecord]]) -> tuple[list[LedgerEntry], list[str]]:
    """The entries of all ok records, in their order; and, as sentences, which were left out and why."""
    entries: list[LedgerEntry] = []
    left_out = []
    for path, record in records:
        if record.status != "ok":
            left_out.append(f"{path}: ended {record.status}")
            continue
        estimate = estimate_of(record)
        if estimate is None:
            left_out.append(f"{path}: no estimate to hold against {record.strategy} here")
            continue
        found = _entries(path, record, estimate)
        if not found:
            left_out.append(f"{path}: holds no bytes of a GPU, a trace or the training state")
        entries += found
    return entries, left_out


def summaries(entries: list[LedgerEntry]) -> list[Summary]:
    """Of each strategy, then of all; measured and rehearsed apart."""
    whole = [entry for entry in entries if entry.is_whole and entry.error is not None]
    kinds = dict.fromkeys((entry.evidence, entry.what) for entry in whole)
    found = []
    for evidence, what in kinds:
        of_kind = [entry for entry in whole if (entry.evidence, entry.what) == (evidence, what)]
        for strategy in (*dict.fromkeys(entry.strategy for entry in of_kind), None):
            chosen = [entry for entry in of_kind if strategy in (None, entry.strategy)]
            errors = [abs(entry.error) for entry in chosen]
            worst = max(chosen, key=lambda entry: abs(entry.error))
            found.append(Summary(strategy, evidence, what, len(chosen), median(errors), worst))
    return found


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

    found = []
    if observed := _peak_allocated(record):
        low, high = estimate.peak_allocated_low_bytes, estimate.peak_allocated_high_bytes
        found.append(peak(PEAK_ALLOCATED, observed, low, estimate.peak_allocated_bytes, high))
    if record.gpu and record.peak_reserved_bytes:
        low, high = estimate.peak_reserved_low_bytes, estimate.peak_reserved_high_bytes
        observed = max(record.peak_reserved_bytes)
        found.append(peak(PEAK_RESERVED, observed, low, estimate.peak_reserved_bytes, high))
    predicted_parts, observed_parts = _parts(record, estimate)
    if predicted_parts and not found:
        predicted, observed = sum(predicted_parts.values()), sum(observed_parts.values())
        found.append(entry(TRAINING_STATE, predicted, observed))
    found += [
        entry(part, predicted, observed_parts[part])
        for part, predicted in predicted_parts.items()
        if predicted or observed_parts[part]
    ]
    return found


def _peak_allocated(record: RunRecord) -> int | None:
    """Of the rank that holds most: a GPU's allocator says it, else the trace does."""
    if record.gpu and record.peak_allocated_bytes:
        return max(record.peak_allocated_bytes)
    return record.memory_at_peak["num_bytes"] if record.memory_at_peak else None


def _parts(record: RunRecord, estimate: Estimate) -> tuple[dict[str, int], dict[str, int]]:
    """Predicted and observed bytes of the same parts: at the peak where it was traced, else as counted.

    None of what is offloaded: traced and counted is what lies on the host, too.
    """
    if offloads(record):
        return {}, {}
    if (traced := record.memory_at_peak) is not None:
        of_trace = {part: traced["parts"].get(part, 0) for part in STATE}
        of_estimate = {part: estimate.parts[part] for part in STATE}
        workspace = estimate.parts["workspace"]  # of the GPU's libraries: nobody traces it
        rest = estimate.peak_allocated_bytes - workspace - sum(of_estimate.values())
        return (
            {**of_estimate, REST: rest},
            {**of_trace, REST: traced["num_bytes"] - sum(of_trace.values())},
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
    """`named`: a label by record. Print it with `crop=False`."""
    lines = _lines(entries, named)
    columns = _columns(lines, (*_constant(lines), *_DROPPED_FIRST))
    columns, dropped = columns_that_fit([column for column in columns if column.has_values], width=width)
    notes = [
        "estimated: closed forms; error: estimated / observed - 1, and so by part in the columns after it "
        "(a difference in MiB where nothing was observed)"
    ]
    if any(entry.within_range is not None for entry in entries):
        notes.append("in range: whether the estimate's low to high holds what was observed")
    if dropped:
        notes.append(left_out_note(dropped))
    return Group(
        Text(
            f"{_same(entries)}estimated against {_evidence(entries)}, GiB on the rank that holds most",
            style="bold",
        ),
        table_of(columns),
        *(Text(note, style="dim") for note in notes),
        Text("errors", style="bold"),
        _summary_table(totals, named, width),
    )


def _same(entries: list[LedgerEntry]) -> str:
    """The model and the number of ranks where all share them: labels tell them where not."""
    models, sizes = {entry.model for entry in entries}, {entry.world_size for entry in entries}
    words = [*(models if len(models) == 1 else ()), *(f"{n} ranks" for n in sizes if len(sizes) == 1)]
    return f"{', '.join(words)}: " if words else ""


def _evidence(entries: list[LedgerEntry]) -> str:
    """measured, rehearsed or both: what the estimates are held against."""
    return " and ".join(sorted({entry.evidence for entry in entries}))


def _lines(entries: list[LedgerEntry], named: dict[str, str]) -> list[dict[str, str]]:
    """Cells by title, of each whole figure and each reserved peak; parts are columns of the whole's line."""
    found = []
    for entry in entries:
        if not entry.is_whole and entry.what != PEAK_RESERVED:
            continue
        parts = {
            other.what: _error(other) for other in entries if entry.is_whole and other.record == entry.record
        }
        found.append(
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
    return found


def _columns(lines: list[dict[str, str]], dropped_first: tuple[str, ...]) -> list[Column]:
    """A column for each title; `dropped_first` may go on a narrow console, in that order."""
    order = {title: place for place, title in enumerate(dict.fromkeys(dropped_first), start=1)}
    return [Column(title, [line[title] for line in lines], order.get(title, 0)) for title in lines[0]]


def _constant(lines: list[dict[str, str]]) -> list[str]:
    """Of `evidence` and `what`, those that are the same in all lines: the table's title has them."""
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
