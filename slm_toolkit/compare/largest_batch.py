"""The largest per-device batch that really runs, found by trials: short runs in processes of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slm_toolkit.compare.grid import PlannedRun, with_batch
from slm_toolkit.compare.predicted import setup_of
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, largest_batch
from slm_toolkit.predict.flag_checks import fixed_batch_problems
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.strategy import Strategy

TRIAL_STEPS = 3
"the first makes the optimizer's states, the second is what all later ones are like"
_FIRST_STRIDE = 1 / 16  # of where the search starts: the estimate is seldom farther off


@dataclass(frozen=True)
class BatchSearch:
    """What trials found."""

    largest_ok: int | None
    "0: not even 1 runs; None: a trial failed otherwise, and nothing is known"
    smallest_oom: int | None
    "None: none ran out of memory up to the most that was allowed"


def search(runs: Callable[[int], str], *, start: int, most: int) -> BatchSearch:
    """Find the largest batch up to `most` for which `runs` says "ok"; larger ones say "oom".

    From `start` by strides that double until both answers are known, then by halves. No batch is tried
    twice; any other answer ends the search.
    """
    ok, oom = 0, most + 1
    batch = min(max(1, start), most)
    stride = max(1, int(batch * _FIRST_STRIDE))
    while ok + 1 < oom:
        answer = runs(batch)
        if answer == "ok":
            ok = batch
        elif answer == "oom":
            oom = batch
        else:
            return BatchSearch(None, oom if oom <= most else None)
        if oom > most:  # nothing was too large yet
            batch = min(ok + stride, most)
        elif ok == 0:
            batch = max(oom - stride, 1)
        else:
            batch = (ok + oom) // 2
        stride *= 2
    return BatchSearch(ok, oom if oom <= most else None)


def find_largest_batch(
    run: PlannedRun, execute: Callable[[PlannedRun], RunRecord], *, most: int | None
) -> tuple[BatchSearch, PlannedRun, RunRecord]:
    """Search for one planned run, from the estimate for its GPU (else from 1); `execute` does a trial.

    Returns the trial to show, too: the largest that ran, else batch 1, else the one that failed.
    """
    trials: dict[int, tuple[PlannedRun, RunRecord]] = {}

    def runs(batch: int) -> str:
        trial = with_batch(run, batch)
        trials[batch] = trial, execute(trial)
        return trials[batch][1].status

    found = search(runs, start=estimated_batch(run) or 1, most=most or LARGEST_BATCH_TRIED)
    shown = list(trials)[-1] if found.largest_ok is None else max(1, found.largest_ok)
    return found, *trials[shown]


def estimated_batch(run: PlannedRun) -> int | None:
    """The largest batch that fits on this machine's GPU, says the estimate; None where it can't say."""
    setup = setup_of(run)
    return largest_batch(setup).per_device_train_batch_size if setup else None


def flags_of_trials(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    max_batch: int | None,
    has_gpu: bool,
) -> dict[str, Any]:
    """The flags of a search's runs. Raises one ValueError with all that can't be asked of a search."""
    problems = fixed_batch_problems(strategies)
    if not has_gpu and max_batch is None:
        problems.append(
            "--largest_batch without a GPU, where nothing but the machine ends it: add --max_batch"
        )
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: `slm estimate --largest_batch --gpu NAME` runs nothing"
        )
    trial = {"per_device_train_batch_size": 1}
    if "num_train_epochs" not in given:
        trial["max_steps"] = given.get("max_steps", TRIAL_STEPS)
    return {**given, **trial}
