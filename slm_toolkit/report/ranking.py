"""Which rows of a report may be compared, and their order by tokens per second, ties as ties."""

import dataclasses
from collections.abc import Iterable

from slm_toolkit.numerics import differences, numerics_from
from slm_toolkit.report.rows import Row, num_asked_otherwise


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """The rows with their numerics' differences and ranks, in the order given.

    Rows of one model, sequence length and machine are ranked together. Each is held against DDP's row of the
    same `--numerics`, else one process's, else the first of those. With `strict`, a row that was computed
    otherwise, or of which that is not known, has no rank, and numerics are ranked apart. Nor has a
    rehearsal one.
    """
    marked = [_marked(row, _reference(row, rows)) for row in rows]
    ranks = {id(row): _rank(row, _competitors(row, marked, strict)) for row in marked}
    found = []
    for row in marked:
        rank = ranks[id(row)]
        others = [other for other in _competitors(row, marked, strict) if other is not row]
        shares = None if rank is None else any(ranks[id(other)] == rank for other in others)
        found.append(dataclasses.replace(row, rank=rank, shares_rank=shares))
    return found


def _competitors(row: Row, marked: list[Row], strict: bool) -> list[Row]:
    """The rows, itself among them, that a row is ranked with; none for one that has no rank."""
    if not _competes(row, strict=strict):
        return []
    return [other for other in marked if _together(row, other, strict)]


def _rank(row: Row, competitors: list[Row]) -> int | None:
    """None for a row that is alone."""
    if len(competitors) < 2:
        return None
    return 1 + sum(_clearly_faster(other, row) for other in competitors)


def _together(row: Row, other: Row, strict: bool) -> bool:
    return (
        _competes(other, strict=strict)
        and _machine(row) == _machine(other)
        and not (strict and _numerics(row) != _numerics(other))
    )


def _machine(row: Row) -> tuple:
    return row.model, row.seq_len, row.gpu or row.cpu


def _numerics(row: Row) -> tuple:
    return row.numerics, row.asked.get("reduce_dtype")


def _reference(row: Row, rows: list[Row]) -> Row | None:
    probed = [
        other
        for other in rows
        if other.status == "ok"
        and other.numerics_probed
        and not other.is_rehearsed
        and (_machine(other), _numerics(other)) == (_machine(row), _numerics(row))
    ]
    # of several, the one that was asked most alike
    probed.sort(key=lambda other: num_asked_otherwise(row, other))
    for engine in ("ddp", "single"):
        if found := next((other for other in probed if other.engine == engine), None):
            return found
    return next(iter(probed), None)


def _marked(row: Row, reference: Row | None) -> Row:
    """The row with what of its numerics differs and is not explained by flags that were asked otherwise."""
    mine = numerics_from(row.numerics_probed)
    if reference is None or mine is None or row is reference or row.is_rehearsed:
        return row
    settings: Iterable[str] = row.asked.keys() | reference.asked.keys()
    other = {name for name in settings if row.asked.get(name) != reference.asked.get(name)}
    if row.world_size != reference.world_size:
        other.add("world_size")
    found = differences(mine, numerics_from(reference.numerics_probed), other_settings=frozenset(other))
    return dataclasses.replace(
        row,
        numerics_differences=[str(difference) for difference in found],
        numerics_reference=reference.strategy,
    )


def _competes(row: Row, *, strict: bool) -> bool:
    fair = not strict or (row.numerics_probed is not None and not row.numerics_differences)
    timed = row.tokens_per_second is not None and not row.is_rehearsed
    return row.status == "ok" and row.parity_holds is not False and timed and fair


def _clearly_faster(other: Row, row: Row) -> bool:
    """Per GPU, so that two GPUs are not twice as good as one."""
    return other.interval[0] / other.world_size > row.interval[1] / row.world_size
