"""Compare runs with earlier records of the same runs: slower, bigger or less accurate, beyond noise."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.numerics import ALIKE, PARITY_STEPS, precision_of
from slm_toolkit.record.run_record import finite
from slm_toolkit.report.rows import Row, num_different_flags
from slm_toolkit.report.stats import overlap
from slm_toolkit.report.tables.fitted import Column, columns_that_fit, rate, table_of

MEMORY_TOLERANCE = 0.01
"of a GPU's peak allocated bytes; equal allocations give equal bytes"
PROCESS_MEMORY_TOLERANCE = 0.05
"of a CPU process's peak resident bytes, which depend on the rest of the system"
STATE_TOLERANCE = 0.001
"of the training state's bytes, which are exact except for the padding of a rank's shard"
_NOT_PART_OF_THE_RUN = frozenset(("max_steps", "profile", "save_steps"))
"flags that change neither the speed of a step nor its memory"


@dataclass(frozen=True)
class Change:
    """One run now and in the baseline. A ratio is now / then; None if one of them is unknown."""

    strategy: str
    tokens_per_second_then: float | None
    tokens_per_second_now: float | None
    speed_ratio: float | None
    speed: str
    "tie, slower, faster or unknown"
    memory_ratio: float | None
    "ratio of peak memory or of the training state, whichever has the worse verdict"
    memory: str
    "same, bigger, smaller or unknown"
    max_loss_difference: float | None
    losses: str
    "same, differ or unknown"
    status: str
    "ok, mended, or the change of the status: `ok -> oom`"
    record_now: str
    record_then: str

    @property
    def is_regression(self) -> bool:
        worse = self.speed == "slower" or self.memory == "bigger" or self.losses == "differ"
        return worse or self.status not in ("ok", "mended")


def changes(now: list[Row], then: list[Row]) -> tuple[list[Change], list[Row]]:
    """Compare each run of `now` with the baseline `then`; also return the runs that the baseline lacks.

    Two runs are the same if they agree in model, strategy, GPU (or CPU), ranks, allocator (if both have it)
    and all flags; versions may differ. If the baseline has several, the run with the fewest different flags
    counts, and among equals the newest.
    """
    run_changes, missing = [], []
    then = sorted(then, key=lambda row: row.started_at, reverse=True)
    for row in now:
        same_runs = [other for other in then if _same_run(row, other)]
        earlier = min(same_runs, key=lambda other: num_different_flags(row, other), default=None)
        if earlier is None:
            missing.append(row)
        else:
            run_changes.append(_change(row, earlier))
    return run_changes, missing


def _same_run(row: Row, other: Row) -> bool:
    names = ("model", "strategy", "gpu", "evidence")
    names += () if row.gpu or row.is_rehearsed else ("cpu",)
    common_flags = (row.asked.keys() & other.asked.keys()) - _NOT_PART_OF_THE_RUN
    names_if_known = ("world_size", "num_machines", "allocator")
    pairs = [(getattr(row, name), getattr(other, name)) for name in names_if_known]
    return (
        all(value == other_value or None in (value, other_value) for value, other_value in pairs)
        and all(getattr(row, name) == getattr(other, name) for name in names)
        and all(row.asked[name] == other.asked[name] for name in common_flags)
    )


def _change(row: Row, earlier: Row) -> Change:
    speed_ratio = _ratio(row.tokens_per_second, earlier.tokens_per_second)
    memory, memory_ratio = _memory(row, earlier)
    difference = _loss_difference(row, earlier)
    status = "ok"
    if row.status != earlier.status:
        status = "mended" if row.status == "ok" else f"{earlier.status} -> {row.status}"
    tolerance = ALIKE[precision_of(row.asked)].at(PARITY_STEPS).loss
    return Change(
        strategy=row.strategy,
        tokens_per_second_then=earlier.tokens_per_second,
        tokens_per_second_now=row.tokens_per_second,
        speed_ratio=speed_ratio,
        speed=_speed(row, earlier, speed_ratio),
        memory_ratio=memory_ratio,
        memory=memory,
        max_loss_difference=None if difference is None else finite(difference),
        losses="unknown" if difference is None else "differ" if difference > tolerance else "same",
        status=status,
        record_now=row.record,
        record_then=earlier.record,
    )


def _speed(row: Row, earlier: Row, ratio: float | None) -> str:
    # of a disturbed rate, too: its interval is so wide that it ties with nearly everything
    ends = [(each.tokens_per_second_lowest, each.tokens_per_second_highest) for each in (row, earlier)]
    if ratio is None or (None, None) in ends:
        return "unknown"
    if overlap(*ends):
        return "tie"
    return "faster" if ratio > 1 else "slower"


def _memory(row: Row, earlier: Row) -> tuple[str, float | None]:
    """Compare peak memory and training state, each with its own tolerance; return the worse verdict."""
    peaks = [item.peak_bytes for item in (row, earlier)]
    states = [sum((item.state_bytes_per_rank or {}).values()) or None for item in (row, earlier)]
    tolerance = MEMORY_TOLERANCE if row.gpu or row.is_rehearsed else PROCESS_MEMORY_TOLERANCE
    verdicts = [
        (_size(ratio, allowed), ratio)
        for ratio, allowed in ((_ratio(*peaks), tolerance), (_ratio(*states), STATE_TOLERANCE))
        if ratio is not None
    ]
    order = ("bigger", "smaller", "same")
    return min(verdicts, key=lambda verdict: order.index(verdict[0]), default=("unknown", None))


def _size(ratio: float, tolerance: float) -> str:
    return "bigger" if ratio > 1 + tolerance else "smaller" if ratio < 1 - tolerance else "same"


def _loss_difference(row: Row, earlier: Row) -> float | None:
    """Return the largest difference of losses in the first steps; later steps amplify rounding.

    None if the learning rate schedules differ. Infinite if a loss is not finite now but was finite before.
    """
    pairs = list(zip(row.losses, earlier.losses, strict=False))
    if not pairs or row.max_steps != earlier.max_steps or len(row.losses) != len(earlier.losses):
        return None
    if any(now is None and then is not None for now, then in pairs):
        return float("inf")
    return max((abs(now - then) for now, then in pairs[:PARITY_STEPS] if then is not None), default=None)


def _ratio(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then


_STYLES = {"slower": "red", "bigger": "red", "differ": "red", "faster": "green", "smaller": "green"}


def baseline_table(
    changed: list[Change], missing: list[Row], *, named: dict[str, str], baseline: Path, width: int
) -> RenderableType:
    """Make a table with a line for each run in both. Print it with `crop=False`."""
    columns, _ = columns_that_fit(_columns(changed, named), width=width)
    worse = [change for change in changed if change.is_regression]
    verdict = (
        Text(f"worse than {baseline}: {', '.join(named[change.record_now] for change in worse)}", style="red")
        if worse
        else Text(f"nothing is slower, bigger or less accurate than {baseline} beyond noise", style="green")
    )
    if not changed:
        verdict = Text(f"{baseline} has none of these runs", style="yellow")
    notes = [Text(f"not in the baseline: {named[row.record]}", style="dim") for row in missing]
    return Group(Text(f"against the records in {baseline}", style="bold"), table_of(columns), verdict, *notes)


def _columns(changed: list[Change], named: dict[str, str]) -> list[Column]:
    def verdicts(title: str, words: list[str], ratios: list[float | None]) -> Column:
        cells = [
            word if ratio is None else f"{word} ({ratio - 1:+.1%})"
            for word, ratio in zip(words, ratios, strict=True)
        ]
        return Column(title, cells, justify="left", styles=[_STYLES.get(word, "") for word in words])

    status_styles = ["" if change.status in ("ok", "mended") else "red" for change in changed]
    return [
        Column("strategy", [named[change.record_now] for change in changed], justify="left"),
        Column("status", [change.status for change in changed], justify="left", styles=status_styles),
        Column("tokens/s\nthen", [rate(change.tokens_per_second_then) for change in changed], 1),
        Column("tokens/s\nnow", [rate(change.tokens_per_second_now) for change in changed], 2),
        verdicts("speed", [change.speed for change in changed], [change.speed_ratio for change in changed]),
        verdicts(
            "memory", [change.memory for change in changed], [change.memory_ratio for change in changed]
        ),
        verdicts("losses", [change.losses for change in changed], [None] * len(changed)),
    ]
