"""What changed since earlier records of the same runs: slower, bigger or less accurate, beyond noise."""

from dataclasses import dataclass

from slm_toolkit.numerics import LOSS_TOLERANCE
from slm_toolkit.report.rows import Row
from slm_toolkit.report.stats import overlap

MEMORY_TOLERANCE = 0.01
"of a GPU's peak allocated bytes, which repeat to the byte where the allocations do"
PROCESS_MEMORY_TOLERANCE = 0.05
"of a CPU process's peak resident bytes, which depend on what else the system does"


@dataclass(frozen=True)
class Change:
    """One run now and in the baseline. A ratio is now over then; None where one of them is unknown."""

    strategy: str
    tokens_per_second_then: float | None
    tokens_per_second_now: float | None
    speed_ratio: float | None
    speed: str
    "tie, slower, faster or unknown"
    memory_ratio: float | None
    memory: str
    "same, bigger, smaller or unknown"
    max_loss_difference: float | None
    losses: str
    "same, differ or unknown"
    status: str
    "ok, or what went wrong since: `ok -> oom`"
    record_now: str
    record_then: str

    @property
    def is_regression(self) -> bool:
        worse = self.speed == "slower" or self.memory == "bigger" or self.losses == "differ"
        return worse or self.status not in ("ok", "mended")


def changes(now: list[Row], then: list[Row]) -> tuple[list[Change], list[Row]]:
    """Each run of `now` that the baseline has too, and those that it lacks.

    Two runs are the same if model, strategy, GPU, ranks and every flag known to both are; versions may
    differ.
    """
    found, missing = [], []
    for row in now:
        earlier = next((other for other in then if _same_run(row, other)), None)
        if earlier is None:
            missing.append(row)
        else:
            found.append(_change(row, earlier))
    return found, missing


def _same_run(row: Row, other: Row) -> bool:
    names = ("model", "strategy", "gpu")
    known = row.asked.keys() & other.asked.keys()
    ranks = row.world_size == other.world_size or None in (row.world_size, other.world_size)
    return (
        ranks
        and all(getattr(row, name) == getattr(other, name) for name in names)
        and all(row.asked[name] == other.asked[name] for name in known)
    )


def _change(row: Row, earlier: Row) -> Change:
    speed_ratio = _ratio(row.tokens_per_second, earlier.tokens_per_second)
    memory_ratio, memory_tolerance = _memory(row, earlier)
    difference = _loss_difference(row, earlier)
    status = "ok"
    if row.status != earlier.status:
        status = "mended" if row.status == "ok" else f"{earlier.status} -> {row.status}"
    tolerance = LOSS_TOLERANCE[row.numerics]
    return Change(
        strategy=row.strategy,
        tokens_per_second_then=earlier.tokens_per_second,
        tokens_per_second_now=row.tokens_per_second,
        speed_ratio=speed_ratio,
        speed="unknown" if speed_ratio is None else _speed(row, earlier, speed_ratio),
        memory_ratio=memory_ratio,
        memory="unknown"
        if memory_ratio is None
        else "bigger"
        if memory_ratio > 1 + memory_tolerance
        else "smaller"
        if memory_ratio < 1 - memory_tolerance
        else "same",
        max_loss_difference=difference,
        losses="unknown" if difference is None else "differ" if difference > tolerance else "same",
        status=status,
        record_now=row.record,
        record_then=earlier.record,
    )


def _speed(row: Row, earlier: Row, ratio: float) -> str:
    if overlap(_interval(row), _interval(earlier)):
        return "tie"
    return "faster" if ratio > 1 else "slower"


def _interval(row: Row) -> tuple[float, float]:
    return row.tokens_per_second_lowest, row.tokens_per_second_highest


def _memory(row: Row, earlier: Row) -> tuple[float | None, float]:
    """The larger of two ratios: peak memory, and the training state, which is exact on a CPU too."""
    tolerance = MEMORY_TOLERANCE if row.gpu else PROCESS_MEMORY_TOLERANCE
    peaks = [item.peak_allocated_bytes if item.gpu else item.peak_rss_bytes for item in (row, earlier)]
    ratio = _ratio(*peaks)
    state = _ratio(*(sum((item.state_bytes_per_rank or {}).values()) or None for item in (row, earlier)))
    if state is not None and abs(state - 1) > 1e-3:
        return state, 0.0
    return ratio, tolerance


def _loss_difference(row: Row, earlier: Row) -> float | None:
    pairs = list(zip(row.losses, earlier.losses, strict=False))
    if not pairs:
        return None
    return max(float("inf") if None in pair else abs(pair[0] - pair[1]) for pair in pairs)


def _ratio(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then
