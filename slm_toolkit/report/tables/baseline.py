"""Compare runs with earlier records of the same runs: slower, bigger or less accurate, beyond noise."""

from math import inf
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.base.derived import Derived
from slm_toolkit.record.numerics import ALIKE, PARITY_STEPS, growth, precision_of
from slm_toolkit.record.run_record import finite
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import Heading, columns_that_fit, filled, rate, table_of

MEMORY_TOLERANCE = 0.01
"of a GPU's peak allocated bytes; equal allocations give equal bytes"
STATE_TOLERANCE = 0.001
"of the training state's bytes, for runs on a CPU: a process's other memory depends on the rest of the system"
_NOT_PART_OF_THE_RUN = frozenset(("max_steps", "profile", "save_steps"))
"flags that change neither the speed of a step nor its memory"


def _ratio(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then


def _speed(change: "Change") -> str:
    # of a disturbed rate, too: its interval is so wide that it ties with nearly everything
    now, then = change.now.interval, change.then.interval
    if change.speed_ratio is None or None in (now, then):
        return "unknown"
    if now[0] <= then[1] and then[0] <= now[1]:
        return "tie"
    return "faster" if change.speed_ratio > 1 else "slower"


def _memory(change: "Change") -> str:
    if (ratio := change.memory_ratio) is None:
        return "unknown"
    tolerance = STATE_TOLERANCE if change.now.is_on_cpu else MEMORY_TOLERANCE
    return "bigger" if ratio > 1 + tolerance else "smaller" if ratio < 1 - tolerance else "same"


def _loss_difference(change: "Change") -> float | None:
    """Return the largest difference of losses in the first steps; later steps amplify rounding.

    None if the learning rate schedules differ. Infinite if a loss is not finite now but was finite before.
    """
    now, then = change.now, change.then
    pairs = list(zip(now.losses, then.losses, strict=False))
    if not pairs or now.max_steps != then.max_steps or len(now.losses) != len(then.losses):
        return None
    if any(loss is None and earlier is not None for loss, earlier in pairs):
        return inf
    return max((abs(a - b) for a, b in pairs[:PARITY_STEPS] if b is not None), default=None)


def _losses(change: "Change") -> str:
    if (difference := _loss_difference(change)) is None:
        return "unknown"
    tolerance = ALIKE[precision_of(change.now.asked)].loss * growth(PARITY_STEPS)
    return "differ" if difference > tolerance else "same"


def _status(change: "Change") -> str:
    now, then = change.now.status, change.then.status
    return "ok" if now == then else "mended" if now == "ok" else f"{then} -> {now}"


class Change(Derived):
    """One run now and in the baseline. A ratio is now / then; None if one of them is unknown."""

    FIELDS = {
        "strategy": lambda change: change.now.strategy,
        "tokens_per_second_then": lambda change: change.then.tokens_per_second,
        "tokens_per_second_now": lambda change: change.now.tokens_per_second,
        "speed_ratio": lambda change: _ratio(change.tokens_per_second_now, change.tokens_per_second_then),
        # tie, slower, faster or unknown
        "speed": _speed,
        # of the peak on GPUs, else of the training state
        "memory_ratio": lambda change: _ratio(change.now.compared_bytes, change.then.compared_bytes),
        # same, bigger, smaller or unknown
        "memory": _memory,
        "max_loss_difference": lambda change: finite(_loss_difference(change)),
        # same, differ or unknown
        "losses": _losses,
        # ok, mended, or the change of the status: `ok -> oom`
        "status": _status,
        "record_now": lambda change: change.now.record,
        "record_then": lambda change: change.then.record,
    }

    def __init__(self, now: Row, then: Row) -> None:
        self.now, self.then = now, then

    @property
    def is_regression(self) -> bool:
        return "red" in map(_style, (self.speed, self.memory, self.losses, self.status))


def _style(verdict: str) -> str:
    if verdict in ("slower", "bigger", "differ") or "->" in verdict:
        return "red"
    return "green" if verdict in ("faster", "smaller") else ""


def changes(now: list[Row], then: list[Row]) -> tuple[list[Change], list[Row]]:
    """Compare each run of `now` with the baseline `then`; also return the runs that the baseline lacks.

    Two runs are the same if they agree in model, strategy, GPU (or CPU), ranks, allocator (if both have it)
    and all flags; versions may differ. If the baseline has several, the newest counts, one with equal
    flags first.
    """
    run_changes, missing = [], []
    then = sorted(then, key=lambda row: row.started_at, reverse=True)
    for row in now:
        same_runs = [other for other in then if _same_run(row, other)]
        earlier = max(same_runs, key=lambda other: other.asked == row.asked, default=None)
        if earlier is None:
            missing.append(row)
        else:
            run_changes.append(Change(row, earlier))
    return run_changes, missing


def _same_run(row: Row, other: Row) -> bool:
    names = ("model", "strategy", "gpu", "evidence", *(["cpu"] if row.is_on_cpu else []))
    if_known = ("world_size", "num_machines", "allocator")
    flags = (row.asked.keys() & other.asked.keys()) - _NOT_PART_OF_THE_RUN
    return (
        all(getattr(row, name) == getattr(other, name) for name in names)
        and all(len({getattr(row, name), getattr(other, name)} - {None}) < 2 for name in if_known)
        and all(row.asked[name] == other.asked[name] for name in flags)
    )


def baseline_table(
    changed: list[Change], missing: list[Row], *, named: dict[str, str], baseline: Path, width: int
) -> RenderableType:
    """Make a table with a line for each run in both. Print it with `crop=False`."""

    def verdict(name: str) -> Heading:
        def cell(change: Change) -> str:
            by = getattr(change, f"{name}_ratio", None)
            return getattr(change, name) + ("" if by is None else f" ({by - 1:+.1%})")

        return Heading(name, cell, style=lambda change: _style(getattr(change, name)), justify="left")

    headings = (
        Heading("strategy", lambda change: named[change.record_now], justify="left"),
        verdict("status"),
        Heading("tokens/s\nthen", "tokens_per_second_then", rate, 1),
        Heading("tokens/s\nnow", "tokens_per_second_now", rate, 2),
        verdict("speed"),
        verdict("memory"),
        verdict("losses"),
    )
    columns, _ = columns_that_fit(filled(headings, changed), width=width)
    worse = ", ".join(named[change.record_now] for change in changed if change.is_regression)
    if worse:
        conclusion = Text(f"worse than {baseline}: {worse}", "red")
    elif changed:
        conclusion = Text(f"nothing is slower, bigger or less accurate than {baseline} beyond noise", "green")
    else:
        conclusion = Text(f"{baseline} has none of these runs", "yellow")
    notes = [Text(f"not in the baseline: {named[row.record]}", style="dim") for row in missing]
    table = [table_of(columns)] if changed else []
    return Group(Text(f"against the records in {baseline}", style="bold"), *table, conclusion, *notes)
