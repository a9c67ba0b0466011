"""Which rows of a report may be compared, and their order by tokens per second, ties as ties."""

import dataclasses
from collections.abc import Iterable

from slm_toolkit.numerics import differences, numerics_from
from slm_toolkit.report.rows import Row
from slm_toolkit.report.stats import overlap


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """The rows with their numerics' differences and ranks, in the order given.

    Rows of one model, GPU and number of ranks are compared with each other; the reference is DDP's row, else
    one process's, else the first. With `strict`, a row that was computed otherwise has no rank.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.gpu, row.asked.get("seq_len")), []).append(row)
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
    fair = not (strict and row.numerics_differences)
    return row.status == "ok" and row.parity_holds is not False and row.tokens_per_second is not None and fair


def _clearly_faster(other: Row, row: Row) -> bool:
    """Per GPU, so that two GPUs are not twice as good as one."""
    mine, theirs = _interval(row), _interval(other)
    return theirs[0] > mine[1] and not overlap(mine, theirs)


def _interval(row: Row) -> tuple[float, float]:
    return (row.tokens_per_second_lowest / row.world_size, row.tokens_per_second_highest / row.world_size)
