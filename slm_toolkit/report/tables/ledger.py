"""The prediction ledger as a rich table: a line per record and peak, then a line per strategy."""

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.predict.memory.gpu import STATE
from slm_toolkit.report.ledger import PEAK_RESERVED, REST, LedgerEntry, Summary
from slm_toolkit.report.tables.cells import DASH
from slm_toolkit.report.tables.fitted import Column, columns_that_fit, left_out_note, table_of

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
