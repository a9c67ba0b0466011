"""Which rows of a report may be compared, and their order by tokens per second, ties as ties."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable

from slm_toolkit.record.numerics import differences, numerics_from
from slm_toolkit.report.rows import Row, num_asked_otherwise


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """The rows with their numerics' differences and ranks, in the order given.

    Rows of one model, sequence length and machine are ranked together. Each is held against DDP's row of the
    same `--numerics`, else one process's, else the first of those. With `strict`, a row that was computed
    otherwise, or of which that is not known, has no rank, and numerics are ranked apart. Nor has a
    rehearsal one.
    """
    marked = _marked(rows)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in marked:
        if _competes(row, strict=strict):
            groups[_machine(row), _numerics(row) if strict else None].append(row)
    places = {id(row): place for group in groups.values() for row, place in _places(group)}
    return [
        with_values(row, rank=places[id(row)][0], shares_rank=places[id(row)][1])
        if id(row) in places
        else row
        for row in marked
    ]


def with_values(row: Row, **changes: object) -> Row:
    """What `dataclasses.replace` makes, in a quarter of the time that a report would spend on it."""
    return Row(**{**vars(row), **changes})


def _places(group: list[Row]) -> list[tuple[Row, tuple[int, bool]]]:
    """Rank and whether it is shared, of rows ranked together; none for a row that is alone."""
    if len(group) < 2:
        return []
    # per GPU, so that two GPUs are not twice as good as one; a rank counts the rows that are clearly faster
    lowest = sorted(row.interval[0] / row.world_size for row in group)
    ranks = [1 + len(group) - bisect_right(lowest, row.interval[1] / row.world_size) for row in group]
    num_of_rank = Counter(ranks)
    return [(row, (rank, num_of_rank[rank] > 1)) for row, rank in zip(group, ranks, strict=True)]


def _competes(row: Row, *, strict: bool) -> bool:
    fair = not strict or (row.numerics_probed is not None and not row.numerics_differences)
    timed = row.tokens_per_second is not None and row.world_size is not None and not row.is_rehearsed
    return row.status == "ok" and row.parity_holds is not False and timed and fair


def _machine(row: Row) -> tuple:
    return row.model, row.seq_len, row.gpu or row.cpu


def _numerics(row: Row) -> tuple:
    return row.numerics, row.asked.get("reduce_dtype")


def _marked(rows: list[Row]) -> list[Row]:
    """The rows with what of their numerics differs from their reference's."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.numerics_probed and not row.is_rehearsed:
            groups[_machine(row), _numerics(row)].append(row)
    candidates = {}
    for key, group in groups.items():
        of_engines = ([row for row in group if row.engine == engine] for engine in ("ddp", "single"))
        candidates[key] = _Candidates(next(filter(None, of_engines), group))
    return [
        _held_against(row, found.most_alike(row))
        if (found := candidates.get((_machine(row), _numerics(row)))) and row.numerics_probed
        else row
        for row in rows
    ]


class _Candidates:
    """Rows to choose a reference from: of several the one that was asked most alike."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._of_values: dict[tuple[str, ...], dict[tuple, Row]] = {}
        "by names of flags: the first candidate of each combination of their values"

    def most_alike(self, row: Row) -> Row:
        """A look-up where one was asked the very same: ten thousand rows can't all be held against all."""
        names = tuple(row.asked)
        if names not in self._of_values:
            known = self._of_values.setdefault(names, {})
            for other in self._rows:
                known.setdefault(tuple(map(other.asked.get, names)), other)
        if same := self._of_values[names].get(tuple(row.asked.values())):
            return same
        return min(self._rows, key=lambda other: num_asked_otherwise(row, other))


def _held_against(row: Row, reference: Row) -> Row:
    """The row with what of its numerics differs and is not explained by flags that were asked otherwise."""
    if row is reference or row.is_rehearsed:
        return row
    settings: Iterable[str] = row.asked.keys() | reference.asked.keys()
    other = {name for name in settings if row.asked.get(name) != reference.asked.get(name)}
    if row.world_size != reference.world_size:
        other.add("world_size")
    mine, theirs = numerics_from(row.numerics_probed), numerics_from(reference.numerics_probed)
    found = differences(mine, theirs, other_settings=frozenset(other))
    return with_values(
        row,
        numerics_differences=[str(difference) for difference in found],
        numerics_reference=reference.strategy,
    )
