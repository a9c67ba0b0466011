"""How long a grid still takes, from the runs that are done: those of the same kind first."""

from statistics import mean

from slm_toolkit.compare.grid import PlannedRun


def seconds_left(
    done: list[tuple[PlannedRun, float]],
    waiting: list[PlannedRun],
    running: list[tuple[PlannedRun, float]],
    *,
    num_slots: int,
) -> float | None:
    """Seconds until all are done; `done` and `running` with the seconds they took until now.

    A run takes the mean of those done with its model, strategy and batch, else its model and strategy, else
    its strategy, else of all. None before the first is done.
    """
    if not done:
        return None
    took: dict[tuple, list[float]] = {}
    for run, seconds in done:
        for kind in _kinds(run):
            took.setdefault(kind, []).append(seconds)

    def expected(run: PlannedRun) -> float:
        return next(mean(took[kind]) for kind in _kinds(run) if kind in took)

    rest = [max(0.0, expected(run) - elapsed) for run, elapsed in running]
    total = sum(rest) + sum(expected(run) for run in waiting)
    return max([total / num_slots, *rest])


def as_words(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 2 d 5 h."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{int(hours // 24)} d {round(hours % 24)} h"


def _kinds(run: PlannedRun) -> list[tuple]:
    """From the narrowest to that of all runs."""
    model, strategy, batch = run.spec.name, run.strategy.name, run.config.per_device_train_batch_size
    return [(model, strategy, batch), (model, strategy), (strategy,), ()]
