"""Which rows of a report may be compared, and their order by tokens per second, ties as ties."""

import dataclasses
from collections.abc import Iterable

from slm_toolkit.numerics import differences, numerics_from
from slm_toolkit.report.rows import Row


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """The rows with their numerics' differences and ranks, in the order given.

    Rows of one model, sequence length and machine are compared with each other; the reference is DDP's row,
    else one process's, else the first. With `strict`, a row that was computed otherwise, or of which that is
    not known, has no rank.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.seq_len, row.gpu or row.cpu), []).append(row)
    changed: dict[int, Row] = {}
    for group in groups.values():
        marked = [(row, _marked(row, _reference(group))) for row in group]
        competing = [new for _, new in marked if _competes(new, strict=strict)]
        for row, new in marked:
            if new in competing and len(competing) > 1:
                new = dataclasses.replace(
                    new, rank=1 + sum(_clearly_faster(other, new) for other in competing)
                )
            changed[id(row)] = new
    return [changed[id(row)] for row in rows]


def _reference(group: list[Row]) -> Row | None:
    probed = [row for row in group if row.status == "ok" and row.numerics_probed]
    for engine in ("ddp", "single"):
        if found := next((row for row in probed if row.engine == engine), None):
            return found
    return next(iter(probed), None)


def _marked(row: Row, reference: Row | None) -> Row:
    """The row with what of its numerics differs and is not explained by flags that were asked otherwise."""
    mine = numerics_from(row.numerics_probed)
    if reference is None or mine is None or row is reference:
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
    return row.status == "ok" and row.parity_holds is not False and row.tokens_per_second is not None and fair


def _clearly_faster(other: Row, row: Row) -> bool:
    """Per GPU, so that two GPUs are not twice as good as one."""
    return other.interval[0] / other.world_size > row.interval[1] / row.world_size
